"""New processes on the devices of workers that are gone or must be fresh.

Workers see all GPUs of their node, and Ray keeps the GPU of a worker that is gone for our placement
group, so that the new process gets the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from raybench.cluster import DeviceKind
from raybench.cluster.ray_cluster.actors import WorkerHandle, start_worker, was_killed, why_no_start
from raybench.cluster.ray_cluster.nodes import NodeAgents
from raybench.cluster.timeouts import DEFAULT_TIMEOUTS, ClusterTimeouts

# A process that is killed while it starts is started again, so often in all.
MOST_STARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A process that is to become a worker's. starts: processes started for it, with this one."""

    worker: WorkerHandle
    starts: int
    give_up_s: float


class Replacement:
    """Replaces the processes of some workers; those of other points are not touched.

    lose_nodes: gives up all workers of these nodes. lose_worker: gives up one, for a reason.
    """

    def __init__(
        self,
        kind: DeviceKind,
        agents: NodeAgents,
        lose_nodes: Callable[[Collection[str]], None],
        lose_worker: Callable[[WorkerHandle, str], None],
        timeouts: ClusterTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self._kind = kind
        self._agents = agents
        self._lose_nodes = lose_nodes
        self._lose_worker = lose_worker
        self._timeouts = timeouts
        self._starting: dict[Any, _Start] = {}

    def run(self, workers: Sequence[WorkerHandle]) -> None:
        """Return when each of the workers has a new process, or is lost."""
        self._lose_nodes(self._agents.silent_nodes())
        workers = [worker for worker in workers if not worker.lost_because]
        for worker in workers:
            ray.kill(worker.actor, no_restart=True)
        self._agents.kill([worker.device for worker in workers])  # those that hang, too
        for worker in workers:
            self._begin(worker, starts=1)
        look_s = self._timeouts.look_for_workers_every_s
        while self._starting:
            for ref in ray.wait(list(self._starting), num_returns=1, timeout=look_s)[0]:
                self._take_over(self._starting.pop(ref), ref)
            self._lose_nodes(self._agents.silent_nodes())
            self._drop_late()

    def _begin(self, worker: WorkerHandle, starts: int) -> None:
        worker.actor = start_worker(self._kind, worker.slot, worker.environment)
        worker.is_used = False
        ref = worker.actor.attach_device.remote(self._kind, worker.device.index)
        give_up_s = time.monotonic() + self._timeouts.worker_start_s
        self._starting[ref] = _Start(worker=worker, starts=starts, give_up_s=give_up_s)

    def _take_over(self, start: _Start, ref: Any) -> None:
        worker = start.worker
        try:
            device = ray.get(ref)
        except ray.exceptions.RayError as error:
            is_worth_another = was_killed(error) and start.starts < MOST_STARTS
            self._fail(start, why_no_start(error), try_again=is_worth_another)
            return
        # When a GPU has fallen off the bus, CUDA counts the others anew.
        if device.kind == "cuda" and device.uuid != worker.device.uuid:
            self._fail(start, f"cuda:{device.index} is {device.uuid} now")
        else:
            worker.device = replace(device, rack=worker.device.rack)

    def _drop_late(self) -> None:
        """Forget starts of workers that were lost meanwhile; give up those that take too long."""
        for ref, start in list(self._starting.items()):
            if start.worker.lost_because:
                del self._starting[ref]
            elif time.monotonic() > start.give_up_s:
                del self._starting[ref]
                self._fail(start, f"no new process in {self._timeouts.worker_start_s:.0f} s")

    def _fail(self, start: _Start, reason: str, *, try_again: bool = False) -> None:
        """Give up this process; the worker is lost unless it is tried again."""
        ray.kill(start.worker.actor, no_restart=True)
        if self._agents.has_ended(start.worker.slot.node_id):
            self._lose_nodes({start.worker.slot.node_id})
        elif try_again:
            self._begin(start.worker, start.starts + 1)
        else:
            self._lose_worker(start.worker, reason)
