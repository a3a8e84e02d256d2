"""One attempt at a point, with the answers of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeVar

from raybench.job.point import Point
from raybench.records.device import Device
from raybench.records.doubts import Doubt
from raybench.records.measurement import Measurement
from raybench.records.status import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """How many cores of a host other processes kept busy, of those that CPU workers may use."""

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
    """What identifies a trial in a run: a point in a round.

    control_of: the world_size of the block that the point ends as a control; 0 where it is none.
    """

    point_id: str
    round: int = 1
    control_of: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One attempt at one point: its status, the reason when it is not ok, and its measurements.

    attempt: counts from 1, over all rounds of the point. round: counts from 1.
    control_of: as of a TrialKey.
    measurements: rank order, one per rank when status is ok, else empty.
    devices: those that ran it, in rank order; empty if it was skipped, or cut short with the sweep.
    error_rank: the rank that failed first, as far as one can be named. error_detail: its traceback
    and the last lines that it wrote. outputs: what each rank wrote, by rank; () if none did.
    neighbours: point_ids that ran on a node of this one at the same time; and in words who else
    used its devices, other sweeps and other processes.
    node_neighbours: who used other devices of its nodes.
    doubts: those of the ranks and of the driver, the worst of each kind and subject; only when
    status is ok.
    mem_estimate_bytes: what a rank was estimated to need at most; None if not known, or on a CPU.
    """

    point: Point
    attempt: int
    round: int = 1
    control_of: int = 0
    status: Status
    started_at: datetime
    duration_s: float
    devices: tuple[Device, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    error_type: str | None = None
    error_message: str | None = None
    error_rank: int | None = None
    error_detail: str | None = None
    outputs: tuple[str, ...] = ()
    neighbours: tuple[str, ...] = ()
    node_neighbours: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    mem_estimate_bytes: int | None = None

    @property
    def key(self) -> TrialKey:
        """The key of its trial."""
        return TrialKey(self.point.point_id, self.round, self.control_of)


_Text = TypeVar("_Text", bound=str)


def by_point(statuses: Mapping[TrialKey, _Text]) -> dict[str, _Text]:
    """Return point_id -> its status over all rounds. statuses: of the latest attempt at each trial.

    Controls are left out. It is the first failure in the order of `statuses`, else ok if one round
    is ok, else skipped if one is, else cancelled. An unknown status counts as a failure.
    """
    severity = {str(one): place for place, one in enumerate(Status) if not one.is_failure}
    found: dict[str, _Text] = {}
    for key, status in statuses.items():
        if not key.control_of:
            both = (found.get(key.point_id, status), status)
            found[key.point_id] = min(both, key=lambda one: severity.get(one, -1))
    return found
