"""One attempt at a point, with the answers of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeVar

from raybench.job.point import Point
from raybench.records.device import Device
from raybench.records.doubts import Doubt
from raybench.records.hang import HangVerdict
from raybench.records.measurement import Measurement
from raybench.records.other_program import OtherProgram
from raybench.records.status import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """Load of other processes on the cores of a host that CPU workers may use."""

    host: str
    # Mean number of cores that other processes kept busy.
    busy_cores: float
    # Number of cores that CPU workers may use.
    cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherUsers:
    """Other sweeps and processes that used the nodes of a point, each as a noun phrase."""

    # Users of the point's devices.
    on_devices: tuple[str, ...] = ()
    # Users of other devices of the point's nodes.
    on_nodes: tuple[str, ...] = ()
    # Load on the cores of the point's CPU workers.
    loads: tuple[HostLoad, ...] = ()
    # Hosts whose agent did not answer, so that their users are unknown.
    silent_hosts: tuple[str, ...] = ()
    # The processes among these users, as data.
    programs: tuple[OtherProgram, ...] = ()


class TrialKey(NamedTuple):
    """The identity of a trial in a run: a point in a round."""

    point_id: str
    round: int = 1
    # World size of the block after which a control runs; 0 for a point that is no control.
    control_of: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One attempt at one point: its status, its failure, and its measurements."""

    point: Point
    # Counts from 1 over all rounds of the point.
    attempt: int
    round: int = 1
    control_of: int = 0
    status: Status
    started_at: datetime
    duration_s: float
    # In rank order; empty if the point was skipped or cancelled.
    devices: tuple[Device, ...] = ()
    # In rank order, one per rank if status is ok, else empty.
    measurements: tuple[Measurement, ...] = ()
    error_type: str | None = None
    error_message: str | None = None
    # The rank that failed first, if known.
    error_rank: int | None = None
    # Traceback and last lines of output of that rank.
    error_detail: str | None = None
    hang: HangVerdict | None = None
    # Output of each rank, in rank order; empty if no rank wrote anything.
    outputs: tuple[str, ...] = ()
    # Ids of points that ran on the same nodes, and other users of the point's devices in words.
    neighbours: tuple[str, ...] = ()
    # Users of other devices of the point's nodes, in words.
    node_neighbours: tuple[str, ...] = ()
    # The processes among the users of the point's devices and cores, as data.
    other_programs: tuple[OtherProgram, ...] = ()
    # The worst doubt of each kind and subject; empty unless status is ok.
    doubts: tuple[Doubt, ...] = ()
    # Estimated peak memory of a rank; None if unknown, or on a CPU.
    mem_estimate_bytes: int | None = None

    @property
    def key(self) -> TrialKey:
        """Key of the trial."""
        return TrialKey(self.point.point_id, self.round, self.control_of)


_Text = TypeVar("_Text", bound=str)


def status_by_point(statuses: Mapping[TrialKey, _Text]) -> dict[str, _Text]:
    """Return the status of each point over all rounds, without controls.

    The status of a point is its first failure, else ok, else skipped, else cancelled.

    Args:
        statuses: status of the latest attempt at each trial; an unknown status is a failure.
    """
    worst: dict[str, _Text] = {}
    for key, status in statuses.items():
        if key.control_of:
            continue
        previous = worst.get(key.point_id)
        if previous is None or _priority(status) < _priority(previous):
            worst[key.point_id] = status
    return worst


# The most important status first. Failures and unknown statuses are more important than these.
_NO_FAILURES = (Status.OK, Status.SKIPPED, Status.CANCELLED)


def _priority(status: str) -> int:
    """Return a sort key: smaller for a more important status."""
    return _NO_FAILURES.index(status) if status in _NO_FAILURES else -1
