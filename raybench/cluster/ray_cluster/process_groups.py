"""The process groups of the workers, and the store in which the ranks of a new group meet."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray

from raybench.cluster import timeouts
from raybench.cluster.ray_cluster.nodes import node_address, start_on_node
from raybench.cluster.ray_cluster.pool import WorkerPool
from raybench.cluster.ray_cluster.start import HeadMonitor
from raybench.errors import ClusterError
from raybench.records.task import GroupSpec


class _Store:
    """The actor with the rendezvous store of all process groups, on the driver's node."""

    def __init__(self) -> None:
        # Import torch in this actor only.
        from raybench.worker.process_group import break_group, serve_store

        self._store = serve_store(node_address())
        self._break_group = break_group

    def endpoint(self) -> tuple[str, int]:
        return self._store.host, self._store.port

    def break_group(self, group: GroupSpec) -> None:
        self._break_group(self._store, group)


class ProcessGroups:
    """The process groups of the workers; a group is kept for later points on the same workers.

    Args:
        replace: replaces the processes of workers that do not leave their group.
    """

    def __init__(
        self,
        pool: WorkerPool,
        monitor: HeadMonitor,
        replace: Callable[[Collection[int]], object],
    ) -> None:
        self._pool = pool
        self._monitor = monitor
        self._replace = replace
        # Worker ids in rank order -> their group.
        self._groups: dict[tuple[int, ...], GroupSpec] = {}
        # Handle of the `_Store`.
        self._store: Any = None
        self._group_numbers = itertools.count()
        self._lock = threading.RLock()

    def start(self) -> None:
        """Start the store early, so that the first `join` does not wait for the store."""
        self._store = start_on_node(_Store, ray.get_runtime_context().get_node_id())

    def join(self, worker_ids: tuple[int, ...]) -> GroupSpec | None:
        """Return the process group of exactly these workers; None for a single worker.

        The workers leave all other groups. The ranks form a new group when their point begins.

        Args:
            worker_ids: in rank order.

        Raises:
            ClusterError: the store does not answer.
        """
        with self._lock:
            endpoint = self._store_endpoint() if len(worker_ids) > 1 else None
            group = self._groups.get(worker_ids)
            # A group of a store that has died cannot be used any more.
            if group and (group.store_address, group.store_port) == endpoint:
                return group
            self.leave(worker_ids)
            if endpoint is None:
                return None
            address, port = endpoint
            name = f"group-{next(self._group_numbers)}"
            group = GroupSpec(name=name, store_address=address, store_port=port)
            self._groups[worker_ids] = group
            return group

    def leave(self, worker_ids: Sequence[int]) -> None:
        """End all groups of the given workers; the members must be idle.

        If a member does not leave in time, all members are replaced.
        """
        with self._lock:
            for members in self._groups_with(worker_ids):
                group = self._groups.pop(members)
                if not self._pool.lost.isdisjoint(members):
                    # A lost member cannot take part in leaving, which is a collective. So abort the
                    # group; the other members leave it when they join their next group.
                    self.abort(group)
                    continue
                calls = [self._pool[member].process.actor.leave.remote() for member in members]
                try:
                    ray.get(calls, timeout=timeouts.LEAVE_GROUP_S)
                except ray.exceptions.RayError:  # includes a timeout
                    self._replace(members)

    def forget(self, worker_ids: Sequence[int]) -> None:
        """Drop the groups of the given workers; the groups must have ended."""
        with self._lock:
            for members in self._groups_with(worker_ids):
                del self._groups[members]

    def abort(self, group: GroupSpec | None) -> None:
        """Tell the members to abort the group; do not wait. The caller must `forget` the group."""
        store = self._store  # a copy, because another thread may set the attribute to None
        if group is not None and store is not None:
            store.break_group.remote(group)

    def close(self) -> None:
        """End the store, and drop all groups without a message to their members."""
        if self._store is not None:
            ray.kill(self._store, no_restart=True)
        self._store, self._groups = None, {}

    def _groups_with(self, worker_ids: Sequence[int]) -> list[tuple[int, ...]]:
        return [members for members in self._groups if not set(members).isdisjoint(worker_ids)]

    def _store_endpoint(self) -> tuple[str, int]:
        """Return address and port of the store; start a new store if the old store has died."""
        # The old store may have died; a new store gets one try.
        for _ in range(2):
            if self._store is None:
                self.start()
            call = self._store.endpoint.remote()
            deadline_s = time.monotonic() + timeouts.STORE_START_S
            while not ray.wait([call], timeout=timeouts.POLL_EVERY_S)[0]:
                self._monitor.check()
                if time.monotonic() > deadline_s:
                    raise ClusterError(
                        f"the rendezvous store does not answer: no process for it in "
                        f"{timeouts.STORE_START_S:g} s; see `ray status`"
                    )
            try:
                endpoint: tuple[str, int] = ray.get(call)
            except ray.exceptions.RayActorError:
                self._store = None
            else:
                return endpoint
        raise ClusterError("the rendezvous store died as soon as it was started")
