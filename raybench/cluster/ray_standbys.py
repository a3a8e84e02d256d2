"""One process more on each node with GPUs: loaded, without a device, ready to replace a worker.

Most of a worker's start is Ray's process and the imports of torch. A standby has done both, and
has no CUDA context and no memory on a GPU. Workers see all GPUs of their node, so it can take any
of them; Ray keeps the GPU of the worker that is gone for our placement group.

Starting one keeps a core busy for some seconds while points are measured. So there are standbys
only where at least four cores belong to each of our devices, and none where CPUs are measured.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raybench.cluster.ray_actors import start_standby
from raybench.records import Device

_CORES_PER_DEVICE = 4
_END_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standby:
    actor: Any
    is_loaded: Any


class Standbys:
    """At most one on each node. on_cpus: also where they disturb what is measured, for tests."""

    def __init__(self, *, on_cpus: bool = False) -> None:
        self._on_cpus = on_cpus
        self._by_node: dict[str, _Standby] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def keep(self, devices: Sequence[Device]) -> None:
        """Start one on each node of these devices that can bear it and has none. Does not wait.

        devices: all that this run has on these nodes.
        """
        with self._lock:
            if self._is_closed:
                return
            for node_id in nodes_with_room(devices, on_cpus=self._on_cpus) - self._by_node.keys():
                actor = start_standby(node_id)
                self._by_node[node_id] = _Standby(actor=actor, is_loaded=actor.is_loaded.remote())

    def take(self, node_id: str) -> Any:
        """The actor on this node, which is no standby any more; None where there is none.

        It may still be loading: it is ahead of a new one all the same.
        """
        with self._lock:
            standby = self._by_node.pop(node_id, None)
        if standby is None:
            return None
        try:
            ray.get(standby.is_loaded, timeout=0)
        except ray.exceptions.GetTimeoutError:
            return standby.actor
        except ray.exceptions.RayError:
            return None  # it could not start; a new worker will say why
        return standby.actor

    def lose(self, node_ids: Collection[str]) -> None:
        """Give up those on these nodes."""
        with self._lock:
            for node_id in self._by_node.keys() & set(node_ids):
                ray.kill(self._by_node.pop(node_id).actor, no_restart=True)

    def close(self) -> None:
        """Let them go; no other is started."""
        for standby in self._closed():
            ray.kill(standby.actor, no_restart=True)

    def close_without_head(self) -> None:
        """As close. One that is still loading cannot be told; its raylet ends it in a minute."""
        refs = [standby.actor.end.remote() for standby in self._closed()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_END_TIMEOUT_S)

    def _closed(self) -> list[_Standby]:
        with self._lock:
            self._is_closed = True
            standbys, self._by_node = list(self._by_node.values()), {}
        return standbys


def nodes_with_room(devices: Sequence[Device], *, on_cpus: bool) -> set[str]:
    """Node ids of those on which a standby can start while points are measured. Pure."""
    counts = Counter(device.node_id for device in devices)
    return {
        device.node_id
        for device in devices
        if on_cpus
        or (
            device.kind == "cuda" and device.cpu_count >= _CORES_PER_DEVICE * counts[device.node_id]
        )
    }
