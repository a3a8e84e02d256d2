"""What a sweep is to do: the run, what is left of it, and where it is carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raybench.job.point import Point
from raybench.records import Status, TrialKey, by_point
from raybench.results.run import Run

if TYPE_CHECKING:
    from raybench.job.plan import Plan
    from raybench.records.sources import Code
    from raybench.sweep.loop import Before
    from raybench.sweep.rounds import Rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTarget:
    """Where a run is carried out, where its tables go, and the point_ids to profile.

    wait_s: how long the cluster may take to get the devices that the biggest point needs, and other
    sweeps to let go of theirs. shared: measure beside other sweeps.
    """

    address: str
    device: Literal["auto", "cuda", "cpu"]
    output: Path
    profiled: frozenset[str]
    wait_s: float = 0.0
    shared: bool = False

    @property
    def is_on_cpus(self) -> bool:
        """Whether a private Ray would surely be one of CPU workers."""
        has_gpus = any(Path("/dev").glob("nvidia[0-9]*"))
        return self.device == "cpu" or (self.device == "auto" and not has_gpus)


DeviceKey = tuple[str, str, int]


def device_key(kind: str, uuid: str, host: str, index: int) -> DeviceKey:
    """Return what a device keeps over the sweeps of a run; a CPU's uuid names a process."""
    return (kind, uuid, 0) if kind == "cuda" else (kind, host, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run and what is to be done of it.

    rounds: of the whole run. ended: how the trials ended that have a row already. before: which of
    them are kept, and what is to be run.
    code: what the workers must load. devices: those that the run has rows of, by `device_key`.
    models: the names of these.
    resume_command: what the user types to go on with it.
    """

    run: Run
    rounds: Rounds
    ended: Mapping[TrialKey, Status] = field(default_factory=dict)
    before: Before
    code: Code | None = None
    devices: frozenset[DeviceKey] = frozenset()
    models: frozenset[str] = frozenset()
    is_resumed: bool
    resume_command: str

    @property
    def plan(self) -> Plan:
        """Of the whole run."""
        return self.rounds.plan

    @property
    def todo(self) -> tuple[TrialKey, ...]:
        """The trials that are to be run, as far as they are known."""
        kept = self.before.kept
        rounds = (self.rounds.attempts(n, kept) for n in range(1, self.rounds.count + 1))
        return tuple(attempt.key for attempts in rounds for attempt in self.before.left(attempts))

    @property
    def left(self) -> Plan:
        """The plan of the points that are to be run."""
        left = {key.point_id for key in self.todo}
        points = (point for point in self.plan.points if point.point_id in left)
        return replace(self.plan, points=tuple(points))

    @property
    def ran_out(self) -> list[Point]:
        """Points that ran out of memory before, and are not run again."""
        kept = by_point(self.before.kept)
        return [point for point in self.plan.points if kept.get(point.point_id) is Status.OOM]

    @property
    def searched(self) -> dict[str, Status]:
        """point_id -> status in the first round, of the points that are not run again there."""
        return {k.point_id: status for k, status in self.before.kept.items() if k.round == 1}
