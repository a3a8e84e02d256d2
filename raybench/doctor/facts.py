"""The facts that doctor's checks look at, its answer, and words that all checks share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from raybench.records import Device
from raybench.records.devices import DeviceFacts

UNKNOWN = "unknown"
_NAMES_SHOWN = 4


class Verdict(StrEnum):
    """The result of a check: ok as far as is known; warn: numbers may suffer; fail: they do."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of doctor's answer.

    found: in words. advice: what to do; empty where the verdict is ok.
    details: for programs; a name ends in the unit of its figure.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the checks look at.

    devices: those with a worker, by node and then by index. versions: of this process.
    refusal: why raybench would measure nothing on these devices; empty where it would.
    others: other sweeps that have the devices, in words. states: of the devices, by NVML and the
    kernel's log.
    """

    devices: tuple[Device, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    others: tuple[str, ...] = ()
    states: tuple[DeviceFacts, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Return whether any worker owns a GPU."""
        return any(device.kind == "cuda" for device in self.devices)

    @property
    def nodes(self) -> dict[str, list[Device]]:
        """Return the devices of each node, by its id."""
        nodes: dict[str, list[Device]] = {}
        for device in self.devices:
            nodes.setdefault(device.node_id, []).append(device)
        return nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Doctor's answer. cluster: in words. environment: the variables of this process."""

    cluster: str
    facts: Facts
    checks: tuple[Check, ...]
    environment: Mapping[str, str]

    @property
    def has_failed(self) -> bool:
        """Return whether any check failed."""
        return any(check.verdict is Verdict.FAIL for check in self.checks)


def label(device: Device) -> str:
    """Return `alpha cuda:3`, or of a CPU worker `alpha process 4711`."""
    number = f"cuda:{device.index}" if device.kind == "cuda" else f"process {device.process_id}"
    return f"{device.host} {number}"


def join_names(names: Sequence[str]) -> str:
    """Return the first four names, and how many more there are."""
    text = ", ".join(names[:_NAMES_SHOWN])
    left = len(names) - _NAMES_SHOWN
    return f"{text} and {left} more" if left > 0 else text


def describe(devices: Sequence[Device], fact: Callable[[Device], str | None]) -> str:
    """Return a fact of the devices: once where all agree, else by device, the commonest first.

    fact: of one device in words; None where it is unknown.
    """
    groups: dict[str, list[str]] = {}
    for device in devices:
        groups.setdefault(fact(device) or UNKNOWN, []).append(label(device))
    (most, owners), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
    if not others:
        return most
    parts = [f"{text} on {join_names(names)}" for text, names in others]
    return "; ".join([f"{most} on {count_noun(len(owners), 'device')}", *parts])


def count_noun(count: int, noun: str) -> str:
    """Return `1 node`, `4 nodes`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def judge(
    name: str, found: str, bad: Sequence[Device], advice: str, verdict: Verdict = Verdict.WARN
) -> Check:
    """Return a check that is ok without `bad` devices, else has `verdict` and `advice`."""
    if not bad:
        return Check(name=name, verdict=Verdict.OK, found=found)
    names = [label(device) for device in bad]
    return Check(name=name, verdict=verdict, found=found, advice=advice, details={"devices": names})
