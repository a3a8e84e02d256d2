"""New processes on the devices of workers that are gone: standbys, or workers that start now."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raybench.cluster.ray_cluster.actors import start_seat
from raybench.cluster.ray_cluster.connection import DeviceKind
from raybench.cluster.ray_cluster.node_agents import NodeAgents
from raybench.cluster.ray_cluster.placement import Seat
from raybench.cluster.ray_cluster.ray_errors import was_killed, why_no_start
from raybench.cluster.ray_cluster.spares import Standbys

START_TIMEOUT_S = 180.0
# A process that is killed while it starts is started again, so often in all.
MOST_STARTS = 3
# A standby has only to make its CUDA context, or to finish what a new worker would begin.
_STANDBY_TIMEOUT_S = 30.0
# The driver takes back the memory of a process that ended within a second.
_FREE_TIMEOUT_S = 2.0
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """A process that is taking its seat. tries: new workers so far, for this seat."""

    seat: Seat
    is_standby: bool
    tries: int
    give_up_s: float


class Replacement:
    """Replaces the processes of some seats. The seats of other points are not touched.

    lose_nodes: gives up the seats of nodes. lose_seat: gives up one, for a reason.
    """

    def __init__(
        self,
        kind: DeviceKind,
        agents: NodeAgents,
        standbys: Standbys,
        lose_nodes: Callable[[Collection[str]], None],
        lose_seat: Callable[[Seat, str], None],
    ) -> None:
        self._kind = kind
        self._agents = agents
        self._standbys = standbys
        self._lose_nodes = lose_nodes
        self._lose_seat = lose_seat
        self._coming: dict[Any, _Coming] = {}

    def run(self, seats: Sequence[Seat]) -> None:
        """Return when each of them has a new process, or is lost."""
        self._lose_nodes(self._agents.silent_nodes())
        seats = [seat for seat in seats if not seat.lost_because]
        self._end(seats)
        for seat in seats:
            self._begin(seat)
        while self._coming:
            for ref in ray.wait(list(self._coming), num_returns=1, timeout=_LOOK_S)[0]:
                self._take_over(self._coming.pop(ref), ref)
            self._lose_nodes(self._agents.silent_nodes())
            self._drop_late()

    def _end(self, seats: Sequence[Seat]) -> None:
        """Kill their processes. A standby is so quick that it could find their memory in use."""
        for seat in seats:
            ray.kill(seat.actor, no_restart=True)
        devices = [seat.device for seat in seats]
        self._agents.kill(devices)
        self._agents.wait_until_free(devices, _FREE_TIMEOUT_S)

    def _begin(self, seat: Seat, tries: int = 0) -> None:
        standby = self._standbys.take(seat.slot.node_id)
        is_standby = standby is not None
        seat.actor = standby or start_seat(self._kind, seat.slot.placement, seat.slot.bundle)
        seat.is_used = False
        limit_s = _STANDBY_TIMEOUT_S if is_standby else START_TIMEOUT_S
        ref = seat.actor.sit.remote(self._kind, seat.device.index)
        self._coming[ref] = _Coming(
            seat=seat,
            is_standby=is_standby,
            tries=tries + (not is_standby),
            give_up_s=time.monotonic() + limit_s,
        )

    def _take_over(self, coming: _Coming, ref: Any) -> None:
        seat = coming.seat
        try:
            device = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._try_next(coming, why_no_start(error), was_killed=was_killed(error))
            return
        # When a GPU has fallen off the bus, CUDA counts the others anew.
        if device.kind == "cuda" and device.uuid != seat.device.uuid:
            self._try_next(coming, f"cuda:{device.index} is {device.uuid} now")
        else:
            seat.device = device

    def _drop_late(self) -> None:
        """Those whose time is up, and those that were lost meanwhile."""
        for ref, coming in list(self._coming.items()):
            if coming.seat.lost_because:
                del self._coming[ref]
            elif time.monotonic() > coming.give_up_s:
                del self._coming[ref]
                self._try_next(coming, f"no new process in {START_TIMEOUT_S:.0f} s")

    def _try_next(self, coming: _Coming, reason: str, *, was_killed: bool = False) -> None:
        """After a standby the next is tried, after the last a new worker, and again if killed."""
        ray.kill(coming.seat.actor, no_restart=True)
        if self._agents.has_ended(coming.seat.slot.node_id):
            self._lose_nodes({coming.seat.slot.node_id})
        elif coming.is_standby or (was_killed and coming.tries < MOST_STARTS):
            self._begin(coming.seat, coming.tries)
        else:
            self._lose_seat(coming.seat, reason)
