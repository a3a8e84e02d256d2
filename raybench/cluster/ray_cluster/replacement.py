"""New processes on the devices of workers that are gone: standbys, or workers that start now.

Most of a worker's start is Ray's process and the imports of torch. A standby has done both, and
has no CUDA context and no memory on a GPU. Workers see all GPUs of their node, so it can take any
of them; Ray keeps the GPU of the worker that is gone for our placement group.

Starting one keeps a core busy for some seconds while points are measured. So there are standbys
only where at least four cores belong to each of our devices, and none where CPUs are measured.
There are two of them, because what is lost is tried once more at once, and may be lost again.

On every node some are started for a point that is late: most of its measuring should be over, and
soon its processes may have to be replaced.
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
from raybench.cluster.ray_cluster.actors import start_standby, start_worker
from raybench.cluster.ray_cluster.node_agents import NodeAgents
from raybench.cluster.ray_cluster.placement import WorkerHandle
from raybench.cluster.ray_cluster.ray_errors import was_killed, why_no_start
from raybench.records import Device

_CORES_PER_DEVICE = 4
_AT_MOST = 2
_AT_MOST_WHEN_LATE = 4
_END_TIMEOUT_S = 1.0
START_TIMEOUT_S = 180.0
# A process that is killed while it starts is started again, so often in all.
MOST_STARTS = 3
# A standby has only to make its CUDA context, or to finish what a new worker would begin.
_STANDBY_TIMEOUT_S = 30.0
# The driver takes back the memory of a process that ended within a second.
_FREE_TIMEOUT_S = 2.0
_LOOK_S = 1.0


class Standbys:
    """At most two on each node, or four. on_cpus: also where they disturb, for tests."""

    def __init__(self, *, on_cpus: bool = False) -> None:
        self._on_cpus = on_cpus
        self._wanted: dict[str, int] = {}
        # Node id -> actors, and what says that each is loaded.
        self._by_node: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._is_closed = False
        self._lock = threading.Lock()

    def keep(self, devices: Sequence[Device]) -> None:
        """Start what is missing on each node of these devices that can bear it. Does not wait.

        devices: all that this run has on these nodes.
        """
        with self._lock:
            self._wanted = count_wanted(devices, on_cpus=self._on_cpus)
            self._start_missing(self._wanted)

    def prepare(self, devices: Sequence[Device]) -> None:
        """As `keep`, for devices whose point is late: one for each, and no more than four."""
        counts = Counter(device.node_id for device in devices)
        with self._lock:
            self._start_missing({node: min(n, _AT_MOST_WHEN_LATE) for node, n in counts.items()})

    def dismiss(self, devices: Sequence[Device]) -> None:
        """Let go of what a late point of these devices, which has ended, has left over."""
        with self._lock:
            for node_id in {device.node_id for device in devices}:
                there = self._by_node[node_id]
                while len(there) > self._wanted.get(node_id, 0):
                    _kill(there.pop())

    def take(self, node_id: str) -> Any:
        """Return the actor on this node, which is no standby any more; None where there is none.

        One that is loaded goes first. One that is loading is ahead of a new one all the same.
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
                    continue  # where all have failed, a new worker will say why
                return actor
        return None

    def lose(self, node_ids: Collection[str]) -> None:
        """Give up those on these nodes."""
        with self._lock:
            for node_id in self._by_node.keys() & set(node_ids):
                for standby in self._by_node.pop(node_id):
                    _kill(standby)

    def close(self) -> None:
        """Let them go; no other is started."""
        for standby in self._close():
            _kill(standby)

    def close_without_head(self) -> None:
        """As close. One that is still loading cannot be told; its raylet ends it in a minute."""
        refs = [actor.end.remote() for actor, _ in self._close()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_END_TIMEOUT_S)

    def _start_missing(self, counts: Mapping[str, int]) -> None:
        for node_id, count in counts.items():
            there = self._by_node[node_id]
            while len(there) < count and not self._is_closed:
                actor = start_standby(node_id)
                there.append((actor, actor.is_loaded.remote()))

    def _close(self) -> list[tuple[Any, Any]]:
        with self._lock:
            self._is_closed = True
            standbys = [standby for there in self._by_node.values() for standby in there]
            self._by_node.clear()
        return standbys


def _kill(standby: tuple[Any, Any]) -> None:
    ray.kill(standby[0], no_restart=True)


def count_wanted(devices: Sequence[Device], *, on_cpus: bool) -> dict[str, int]:
    """Node id -> standbys, where they can start while points are measured. Pure."""
    counts = Counter(device.node_id for device in devices)
    return {
        device.node_id: min(counts[device.node_id], _AT_MOST)
        for device in devices
        if on_cpus
        or (
            device.kind == "cuda" and device.cpu_count >= _CORES_PER_DEVICE * counts[device.node_id]
        )
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A process that is taking its worker. tries: new workers so far, for this worker."""

    worker: WorkerHandle
    is_standby: bool
    tries: int
    give_up_s: float


class Replacement:
    """Replaces the processes of some workers. The workers of other points are not touched.

    lose_nodes: gives up the workers of nodes. lose_worker: gives up one, for a reason.
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
        self._pending: dict[Any, _Pending] = {}

    def run(self, workers: Sequence[WorkerHandle]) -> None:
        """Return when each of them has a new process, or is lost."""
        self._lose_nodes(self._agents.silent_nodes())
        workers = [worker for worker in workers if not worker.lost_because]
        self._end(workers)
        for worker in workers:
            self._begin(worker)
        while self._pending:
            for ref in ray.wait(list(self._pending), num_returns=1, timeout=_LOOK_S)[0]:
                self._take_over(self._pending.pop(ref), ref)
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
        # A standby was started without the variables of a job.
        standby = None if worker.environment else self._standbys.take(worker.slot.node_id)
        is_standby = standby is not None
        worker.actor = standby or start_worker(
            self._kind, worker.slot.placement, worker.slot.bundle, worker.environment
        )
        worker.is_used = False
        limit_s = _STANDBY_TIMEOUT_S if is_standby else START_TIMEOUT_S
        ref = worker.actor.attach_device.remote(self._kind, worker.device.index)
        self._pending[ref] = _Pending(
            worker=worker,
            is_standby=is_standby,
            tries=tries + (not is_standby),
            give_up_s=time.monotonic() + limit_s,
        )

    def _take_over(self, pending: _Pending, ref: Any) -> None:
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
            worker.device = replace(device, rack=worker.device.rack)

    def _drop_late(self) -> None:
        """Those whose time is up, and those that were lost meanwhile."""
        for ref, pending in list(self._pending.items()):
            if pending.worker.lost_because:
                del self._pending[ref]
            elif time.monotonic() > pending.give_up_s:
                del self._pending[ref]
                self._try_next(pending, f"no new process in {START_TIMEOUT_S:.0f} s")

    def _try_next(self, pending: _Pending, reason: str, *, was_killed: bool = False) -> None:
        """After a standby the next is tried, after the last a new worker, and again if killed."""
        ray.kill(pending.worker.actor, no_restart=True)
        if self._agents.has_ended(pending.worker.slot.node_id):
            self._lose_nodes({pending.worker.slot.node_id})
        elif pending.is_standby or (was_killed and pending.tries < MOST_STARTS):
            self._begin(pending.worker, pending.tries)
        else:
            self._lose_worker(pending.worker, reason)
