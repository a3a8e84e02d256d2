"""New processes on the devices of workers that are gone: standbys, or workers that start now."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raybench.cluster import DeviceKind
from raybench.cluster.ray_cluster.actors import start_worker
from raybench.cluster.ray_cluster.node_agents import NodeAgents
from raybench.cluster.ray_cluster.placement import WorkerHandle
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
    """A process that is taking its worker. tries: new workers so far, for this worker."""

    worker: WorkerHandle
    is_standby: bool
    tries: int
    give_up_s: float


class Replacement:
    """Replaces the processes of some workers. The workers of other points are not touched.

    lose_nodes: gives up the workers of nodes. lose_seat: gives up one, for a reason.
    """

    def __init__(
        self,
        kind: DeviceKind,
        agents: NodeAgents,
        standbys: Standbys,
        lose_nodes: Callable[[Collection[str]], None],
        lose_worker: Callable[[WorkerHandle, str], None],
    ) -> None:
        self._kind = kind
        self._agents = agents
        self._standbys = standbys
        self._lose_nodes = lose_nodes
        self._lose_worker = lose_worker
        self._coming: dict[Any, _Coming] = {}

    def run(self, workers: Sequence[WorkerHandle]) -> None:
        """Return when each of them has a new process, or is lost."""
        self._lose_nodes(self._agents.silent_nodes())
        workers = [worker for worker in workers if not worker.lost_because]
        self._end(workers)
        for worker in workers:
            self._begin(worker)
        while self._coming:
            for ref in ray.wait(list(self._coming), num_returns=1, timeout=_LOOK_S)[0]:
                self._take_over(self._coming.pop(ref), ref)
            self._lose_nodes(self._agents.silent_nodes())
            self._drop_late()

    def _end(self, workers: Sequence[WorkerHandle]) -> None:
        """Kill their processes. A standby is so quick that it could find their memory in use."""
        for worker in workers:
            ray.kill(worker.actor, no_restart=True)
        devices = [worker.device for worker in workers]
        self._agents.kill(devices)
        self._agents.wait_until_free(devices, _FREE_TIMEOUT_S)

    def _begin(self, worker: WorkerHandle, tries: int = 0) -> None:
        standby = self._standbys.take(worker.slot.node_id)
        is_standby = standby is not None
        worker.actor = standby or start_worker(
            self._kind, worker.slot.placement, worker.slot.bundle
        )
        worker.is_used = False
        limit_s = _STANDBY_TIMEOUT_S if is_standby else START_TIMEOUT_S
        ref = worker.actor.attach_device.remote(self._kind, worker.device.index)
        self._coming[ref] = _Coming(
            worker=worker,
            is_standby=is_standby,
            tries=tries + (not is_standby),
            give_up_s=time.monotonic() + limit_s,
        )

    def _take_over(self, pending: _Coming, ref: Any) -> None:
        worker = pending.worker
        try:
            device = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._try_next(pending, why_no_start(error), was_killed=was_killed(error))
            return
        # When a GPU has fallen off the bus, CUDA counts the others anew.
        if device.kind == "cuda" and device.uuid != worker.device.uuid:
            self._try_next(pending, f"cuda:{device.index} is {device.uuid} now")
        else:
            worker.device = device

    def _drop_late(self) -> None:
        """Those whose time is up, and those that were lost meanwhile."""
        for ref, pending in list(self._coming.items()):
            if pending.worker.lost_because:
                del self._coming[ref]
            elif time.monotonic() > pending.give_up_s:
                del self._coming[ref]
                self._try_next(pending, f"no new process in {START_TIMEOUT_S:.0f} s")

    def _try_next(self, pending: _Coming, reason: str, *, was_killed: bool = False) -> None:
        """After a standby the next is tried, after the last a new worker, and again if killed."""
        ray.kill(pending.worker.actor, no_restart=True)
        if self._agents.has_ended(pending.worker.slot.node_id):
            self._lose_nodes({pending.worker.slot.node_id})
        elif pending.is_standby or (was_killed and pending.tries < MOST_STARTS):
            self._begin(pending.worker, pending.tries)
        else:
            self._lose_worker(pending.worker, reason)
