"""What a sweep is to do: the run, what is left of it, and where it is carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raybench.point import Point
from raybench.records import Status
from raybench.run import Run

if TYPE_CHECKING:
    from raybench.plan import Plan
    from raybench.sources import Code


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
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
    """What a device has in each sweep of a run: not the uuid of a CPU, which names a process."""
    return (kind, uuid, 0) if kind == "cuda" else (kind, host, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run and what is to be done of it.

    plan: of the whole run. attempts: point_id -> the attempt to make; other points are left out.
    ended: point_id -> the status of its latest attempt, of the points that have a row already.
    code: what the workers must load. devices: those that the run has rows of, by `device_key`.
    models: the names of these.
    resume_command: what the user types to go on with it.
    """

    run: Run
    plan: Plan
    attempts: Mapping[str, int]
    ended: Mapping[str, Status]
    code: Code | None = None
    devices: frozenset[DeviceKey] = frozenset()
    models: frozenset[str] = frozenset()
    is_resumed: bool
    resume_command: str

    @property
    def left(self) -> Plan:
        """The plan of the points that are to be run."""
        points = (point for point in self.plan.points if point.point_id in self.attempts)
        return replace(self.plan, points=tuple(points))

    @property
    def ran_out(self) -> list[Point]:
        """Points that ran out of memory before, and are not run again."""
        kept = self.kept
        return [point for point in self.plan.points if kept.get(point.point_id) is Status.OOM]

    @property
    def kept(self) -> dict[str, Status]:
        """point_id -> status, of the points that have a row and are not run again."""
        return {key: status for key, status in self.ended.items() if key not in self.attempts}
