"""New processes on the devices of workers that are gone: standbys, or workers that start now.

Most of a worker's start is Ray's process and the imports of torch. A standby has done both, and
has no CUDA context and no memory on a GPU. Workers see all GPUs of their node, so it can take any
of them; Ray keeps the GPU of the worker that is gone for our placement group.

Starting one keeps a core busy for some seconds while points are measured. So there are standbys
only where each of our devices has at least four cores, and none where CPUs are measured. There are
two of them, because a lost point is tried once more at once, and may be lost again. For a point
that is late more are started: most of its measuring should be over, and soon its processes may
have to be replaced.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from raybench.cluster import DeviceKind
from raybench.cluster.ray_cluster.actors import (
    WorkerHandle,
    start_standby,
    start_worker,
    was_killed,
    why_no_start,
)
from raybench.cluster.ray_cluster.nodes import NodeAgents
from raybench.cluster.timeouts import DEFAULT_TIMEOUTS, ClusterTimeouts
from raybench.records import Device

# A process that is killed while it starts is started again, so often in all.
MOST_STARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyPolicy:
    """How many standbys a node has: one for each of our devices, and at most `per_node`.

    per_node_when_late: while a point there is late. cores_per_device: a node with fewer has none.
    on_cpus: also on nodes with fewer cores or CPU workers, where they disturb; for tests.
    """

    per_node: int = 2
    per_node_when_late: int = 4
    cores_per_device: int = 4
    on_cpus: bool = False

    def wanted(self, devices: Sequence[Device]) -> dict[str, int]:
        """Return by node id how many standbys there should be while points are measured.

        devices: all that this run has. Nodes that should have none are left out.
        """
        counts = Counter(device.node_id for device in devices)
        return {
            device.node_id: min(counts[device.node_id], self.per_node)
            for device in devices
            if self.on_cpus
            or (
                device.kind == "cuda"
                and device.cpu_count >= self.cores_per_device * counts[device.node_id]
            )
        }


class Standbys:
    """The standbys of all nodes. Several points may ask at once."""

    def __init__(
        self, policy: StandbyPolicy | None = None, timeouts: ClusterTimeouts = DEFAULT_TIMEOUTS
    ) -> None:
        self._policy = policy or StandbyPolicy()
        self._timeouts = timeouts
        self._wanted: dict[str, int] = {}
        # Node id -> actors, each with the call that ends when it is loaded.
        self._by_node: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._is_closed = False
        self._lock = threading.Lock()

    def keep(self, devices: Sequence[Device]) -> None:
        """Start the standbys that are missing. Does not wait. devices: all that this run has."""
        with self._lock:
            self._wanted = self._policy.wanted(devices)
            self._start_missing(self._wanted)

    def prepare(self, devices: Sequence[Device]) -> None:
        """Start standbys for a late point, up to one for each of its devices. Does not wait."""
        counts = Counter(device.node_id for device in devices)
        most = self._policy.per_node_when_late
        with self._lock:
            self._start_missing({node: min(count, most) for node, count in counts.items()})

    def dismiss(self, devices: Sequence[Device]) -> None:
        """End the standbys that a late point of these devices, which has ended, has left over."""
        with self._lock:
            for node_id in {device.node_id for device in devices}:
                there = self._by_node[node_id]
                while len(there) > self._wanted.get(node_id, 0):
                    ray.kill(there.pop()[0], no_restart=True)

    def take(self, node_id: str) -> Any:
        """Remove a standby of this node and return its actor; None where there is none.

        A loaded one is taken first. One that is loading is still ahead of a new worker.
        """
        with self._lock:
            there = self._by_node[node_id]
            there.sort(key=lambda one: bool(ray.wait([one[1]], timeout=0)[0]), reverse=True)
            while there:
                actor, is_loaded = there.pop(0)
                try:
                    ray.get(is_loaded, timeout=0)
                except ray.exceptions.GetTimeoutError:
                    return actor
                except ray.exceptions.RayError:
                    continue  # where all have failed, a new worker will show the reason
                return actor
        return None

    def lose(self, node_ids: Collection[str]) -> None:
        """Give up the standbys of these nodes."""
        with self._lock:
            for node_id in self._by_node.keys() & set(node_ids):
                for actor, _ in self._by_node.pop(node_id):
                    ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """End all standbys; no other is started."""
        for actor in self._remove_all():
            ray.kill(actor, no_restart=True)

    def close_without_head(self) -> None:
        """End all standbys where the head is gone.

        One that is still loading does not take the call; its raylet ends it in a minute.
        """
        if refs := [actor.end.remote() for actor in self._remove_all()]:
            ray.wait(refs, num_returns=len(refs), timeout=self._timeouts.end_standbys_s)

    def _start_missing(self, counts: Mapping[str, int]) -> None:
        for node_id, count in counts.items():
            there = self._by_node[node_id]
            while len(there) < count and not self._is_closed:
                actor = start_standby(node_id)
                there.append((actor, actor.is_loaded.remote()))

    def _remove_all(self) -> list[Any]:
        with self._lock:
            self._is_closed = True
            actors = [actor for there in self._by_node.values() for actor, _ in there]
            self._by_node.clear()
        return actors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A process that is to become a worker's. starts: new workers so far, standbys not counted."""

    worker: WorkerHandle
    is_standby: bool
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
        standbys: Standbys,
        lose_nodes: Callable[[Collection[str]], None],
        lose_worker: Callable[[WorkerHandle, str], None],
        timeouts: ClusterTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self._kind = kind
        self._agents = agents
        self._standbys = standbys
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
        # A standby is so quick that it could find the memory of the old process in use.
        devices = [worker.device for worker in workers]
        self._agents.kill(devices)
        self._agents.wait_until_free(devices, self._timeouts.memory_free_of_replaced_s)
        for worker in workers:
            self._begin(worker)
        look_s = self._timeouts.look_for_workers_every_s
        while self._starting:
            for ref in ray.wait(list(self._starting), num_returns=1, timeout=look_s)[0]:
                self._take_over(self._starting.pop(ref), ref)
            self._lose_nodes(self._agents.silent_nodes())
            self._drop_late()

    def _begin(self, worker: WorkerHandle, starts: int = 0) -> None:
        # A standby was started without the variables of a job.
        standby = None if worker.environment else self._standbys.take(worker.slot.node_id)
        is_standby = standby is not None
        worker.actor = standby or start_worker(self._kind, worker.slot, worker.environment)
        worker.is_used = False
        limits = self._timeouts
        limit_s = limits.standby_start_s if is_standby else limits.worker_start_s
        ref = worker.actor.attach_device.remote(self._kind, worker.device.index)
        self._starting[ref] = _Start(
            worker=worker,
            is_standby=is_standby,
            starts=starts + (not is_standby),
            give_up_s=time.monotonic() + limit_s,
        )

    def _take_over(self, start: _Start, ref: Any) -> None:
        worker = start.worker
        try:
            device = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._try_next(start, why_no_start(error), was_killed=was_killed(error))
            return
        # When a GPU has fallen off the bus, CUDA counts the others anew.
        if device.kind == "cuda" and device.uuid != worker.device.uuid:
            self._try_next(start, f"cuda:{device.index} is {device.uuid} now")
        else:
            worker.device = replace(device, rack=worker.device.rack)

    def _drop_late(self) -> None:
        """Forget starts of workers that were lost meanwhile; give up those that take too long."""
        for ref, start in list(self._starting.items()):
            if start.worker.lost_because:
                del self._starting[ref]
            elif time.monotonic() > start.give_up_s:
                del self._starting[ref]
                self._try_next(start, f"no new process in {self._timeouts.worker_start_s:.0f} s")

    def _try_next(self, start: _Start, reason: str, *, was_killed: bool = False) -> None:
        """Try the next standby, after the last a new worker, and that again where it was killed."""
        ray.kill(start.worker.actor, no_restart=True)
        if self._agents.has_ended(start.worker.slot.node_id):
            self._lose_nodes({start.worker.slot.node_id})
        elif start.is_standby or (was_killed and start.starts < MOST_STARTS):
            self._begin(start.worker, start.starts)
        else:
            self._lose_worker(start.worker, reason)
