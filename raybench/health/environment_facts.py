"""The facts of the stage `environment`, and the judgement of one fact. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from raybench.health.suite import ENVIRONMENT, HealthTest, device_subjects
from raybench.health.verdicts import Judgement
from raybench.records.conditions import Condition, FactValue
from raybench.records.device import Device
from raybench.records.devices import Action, DeviceFacts, HostFacts, Subject, Verdict
from raybench.records.judgement import Command, Reason, ReasonKind
from raybench.report.words import health as words


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class EnvironmentFacts:
    """What workers and nodes report before any test."""

    # Devices by rank; at least one device.
    devices: tuple[Device, ...]
    # Number of devices of the cluster without a worker.
    missing: int = 0
    # Whether raybench has started all processes itself, without a cluster of `ray start`.
    is_private: bool = False
    # Other sweeps on the same devices, in words.
    other_sweeps: tuple[str, ...] = ()
    # State of each device; empty if the devices were not read.
    states: tuple[DeviceFacts, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Whether a worker owns a GPU."""
        return any(device.kind == "cuda" for device in self.devices)

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """The devices as subjects, by rank."""
        return device_subjects(self.devices)

    @cached_property
    def nodes(self) -> dict[str, list[int]]:
        """Node id -> ranks of its devices."""
        ranks: dict[str, list[int]] = {}
        for rank, device in enumerate(self.devices):
            ranks.setdefault(device.node_id, []).append(rank)
        return ranks

    @cached_property
    def hosts(self) -> dict[str, HostFacts]:
        """Node id -> state of its host, if it was read."""
        return {one.device.node_id: one.host for one in self.states if one.host is not None}

    @cached_property
    def cluster(self) -> Subject:
        """All devices as one subject."""
        return Subject(
            kind="cluster",
            uuids=tuple(subject.uuids[0] for subject in self.subjects),
            name=words.devices_name(len(self.devices), self.devices[0].kind),
            model="",
        )

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names of the hosts, without repeats."""
        return tuple(dict.fromkeys(device.host for device in self.devices))

    def node(self, node_id: str) -> Subject:
        """Return a node as a subject."""
        ranks = self.nodes[node_id]
        return Subject(
            kind="node",
            uuids=tuple(self.subjects[rank].uuids[0] for rank in ranks),
            name=self.devices[ranks[0]].host,
            model="",
        )


def environment_test(name: str, unit: str = "") -> HealthTest:
    """Return the test of one fact of the environment; without a unit its value is on or off."""
    return HealthTest(name=name, stage=ENVIRONMENT, unit=unit, floor=0.0, is_compared=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a fact spoils or disturbs measurements, and what to type."""

    reason: Reason
    command: Command | None = None
    # NOTE if the fact may disturb measurements, BAD if it spoils them.
    verdict: Verdict = Verdict.NOTE


def fault(
    condition: Condition,
    command: Command | None = None,
    *,
    value: float | None = None,
    limit: float | None = None,
    names: Sequence[str] = (),
    verdict: Verdict = Verdict.NOTE,
) -> Fault:
    """Return the fault of a condition; `value`, `limit` and `names` become fields of its reason."""
    reason = Reason(
        kind=ReasonKind.CONDITION,
        condition=condition,
        value=value,
        limit=limit,
        names=tuple(names),
    )
    return Fault(reason=reason, command=command, verdict=verdict)


def judge_fact(
    test: HealthTest,
    subject: Subject,
    value: float | None,
    fault: Fault | None = None,
    facts: Sequence[FactValue] = (),
) -> Judgement:
    """Return the judgement of a fact: healthy without a fault, and unknown without a value."""
    verdict, reason, command = Verdict.HEALTHY, None, None
    if fault is not None:
        verdict, reason, command = fault.verdict, fault.reason, fault.command
    elif value is None:
        verdict, reason = Verdict.UNKNOWN, Reason(kind=ReasonKind.NOT_REPORTED)
    return Judgement(
        test=test,
        subject=subject,
        passes=1,
        value=value,
        verdict=verdict,
        reason=reason,
        evidence=(Reason(kind=ReasonKind.FACTS, facts=tuple(facts)),) if facts else (),
        action=Action.SETTING if fault else None,
        commands=(command,) if command else (),
    )
