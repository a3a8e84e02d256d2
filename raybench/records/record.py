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
from raybench.records.status import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """How busy other processes keep the cores of a host that CPU workers may use."""

    host: str
    busy_cores: float
    cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherUsers:
    """Who else used the nodes of a point: other sweeps and processes, as a noun phrase each."""

    # On the devices of the point.
    on_devices: tuple[str, ...] = ()
    # On other devices of its nodes.
    on_nodes: tuple[str, ...] = ()
    # On the cores of its CPU workers.
    loads: tuple[HostLoad, ...] = ()
    # Hosts whose agent did not answer, so that other users are not known.
    silent_hosts: tuple[str, ...] = ()


class TrialKey(NamedTuple):
    """What identifies a trial in a run: a point in a round."""

    point_id: str
    round: int = 1
    # World size of the block that the point ends as a control; 0 if it is no control.
    control_of: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One attempt at one point: its status, its failure, and its measurements."""

    point: Point
    # Counts from 1, over all rounds of the point.
    attempt: int
    # Counts from 1.
    round: int = 1
    # As in `TrialKey`.
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
    # Which rank hung and why, where the status is timeout and evidence tells.
    hang: HangVerdict | None = None
    # What each rank wrote, by rank; empty if no rank wrote anything.
    outputs: tuple[str, ...] = ()
    # Ids of points that ran on the same nodes, and noun phrases for other users of its devices.
    neighbours: tuple[str, ...] = ()
    # Users of other devices of its nodes.
    node_neighbours: tuple[str, ...] = ()
    # Doubts of ranks and driver, the worst of each kind and subject; empty unless ok.
    doubts: tuple[Doubt, ...] = ()
    # Estimated peak memory of a rank; None if unknown, or on a CPU.
    mem_estimate_bytes: int | None = None

    @property
    def key(self) -> TrialKey:
        """The key of its trial."""
        return TrialKey(self.point.point_id, self.round, self.control_of)


_Text = TypeVar("_Text", bound=str)


def by_point(statuses: Mapping[TrialKey, _Text]) -> dict[str, _Text]:
    """Return the status of each point over all rounds; controls are left out.

    The status of a point is its first failure, else ok, else skipped, else cancelled. An unknown
    status is a failure.

    Args:
        statuses: status of the latest attempt at each trial.
    """
    # Failures and unknown statuses are not listed; they come before all others.
    order = {str(status): place for place, status in enumerate(Status) if not status.is_failure}
    worst: dict[str, _Text] = {}
    for key, status in statuses.items():
        if not key.control_of:
            # `min` returns the first of equal statuses, so the first failure stays.
            both = (worst.get(key.point_id, status), status)
            worst[key.point_id] = min(both, key=lambda status: order.get(status, -1))
    return worst
