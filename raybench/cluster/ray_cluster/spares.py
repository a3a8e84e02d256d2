"""Spare processes on nodes with GPUs: loaded, without a device, ready to replace a worker.

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
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raybench.cluster.ray_cluster.actors import start_standby
from raybench.records import Device

_CORES_PER_DEVICE = 4
_AT_MOST = 2
_AT_MOST_WHEN_LATE = 4
_END_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standby:
    """is_for_late: it was started for a point that is late, and would disturb the next."""

    actor: Any
    is_loaded: Any
    is_for_late: bool


class Standbys:
    """At most two on each node, or four. on_cpus: also where they disturb, for tests."""

    def __init__(self, *, on_cpus: bool = False) -> None:
        self._on_cpus = on_cpus
        self._by_node: defaultdict[str, list[_Standby]] = defaultdict(list)
        self._is_closed = False
        self._lock = threading.Lock()

    def keep(self, devices: Sequence[Device]) -> None:
        """Start what is missing on each node of these devices that can bear it. Does not wait.

        devices: all that this run has on these nodes.
        """
        with self._lock:
            self._start_missing(count_wanted(devices, on_cpus=self._on_cpus), is_for_late=False)

    def prepare(self, devices: Sequence[Device]) -> None:
        """As `keep`, for devices whose point is late: one for each, and no more than four."""
        counts = Counter(device.node_id for device in devices)
        most = {node_id: min(count, _AT_MOST_WHEN_LATE) for node_id, count in counts.items()}
        with self._lock:
            self._start_missing(most, is_for_late=True)

    def dismiss(self, devices: Sequence[Device]) -> None:
        """Let go of what was started for the late point of these devices, which has ended."""
        with self._lock:
            for node_id in {device.node_id for device in devices} & self._by_node.keys():
                there = self._by_node[node_id]
                self._by_node[node_id] = [each for each in there if not each.is_for_late]
                for standby in there:
                    if standby.is_for_late:
                        ray.kill(standby.actor, no_restart=True)

    def take(self, node_id: str) -> Any:
        """Return the actor on this node, which is no standby any more; None where there is none.

        One that is loaded goes first. One that is loading is ahead of a new one all the same.
        """
        with self._lock:
            there = self._by_node[node_id]
            there.sort(key=_is_ready, reverse=True)
            while there:
                standby = there.pop(0)
                if _can_start(standby):
                    return standby.actor
        return None

    def lose(self, node_ids: Collection[str]) -> None:
        """Give up those on these nodes."""
        with self._lock:
            for node_id in self._by_node.keys() & set(node_ids):
                for standby in self._by_node.pop(node_id):
                    ray.kill(standby.actor, no_restart=True)

    def close(self) -> None:
        """Let them go; no other is started."""
        for standby in self._close():
            ray.kill(standby.actor, no_restart=True)

    def close_without_head(self) -> None:
        """As close. One that is still loading cannot be told; its raylet ends it in a minute."""
        refs = [standby.actor.end.remote() for standby in self._close()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_END_TIMEOUT_S)

    def _start_missing(self, counts: Mapping[str, int], *, is_for_late: bool) -> None:
        if self._is_closed:
            return
        for node_id, count in counts.items():
            there = self._by_node[node_id]
            # Those of a late point are let go with it.
            staying = [each for each in there if is_for_late or not each.is_for_late]
            there += [_start(node_id, is_for_late) for _ in range(count - len(staying))]

    def _close(self) -> list[_Standby]:
        with self._lock:
            self._is_closed = True
            standbys = [standby for there in self._by_node.values() for standby in there]
            self._by_node.clear()
        return standbys


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


def _start(node_id: str, is_for_late: bool) -> _Standby:
    actor = start_standby(node_id)
    return _Standby(actor=actor, is_loaded=actor.is_loaded.remote(), is_for_late=is_for_late)


def _is_ready(standby: _Standby) -> bool:
    """Whether it has loaded, or failed to."""
    return bool(ray.wait([standby.is_loaded], timeout=0)[0])


def _can_start(standby: _Standby) -> bool:
    """Tell whether it has not failed to; where all have, a new worker will say why."""
    try:
        ray.get(standby.is_loaded, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return True
    except ray.exceptions.RayError:
        return False
    return True
