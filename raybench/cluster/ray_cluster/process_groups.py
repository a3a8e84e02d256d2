"""The process groups of the workers: each kept while consecutive points use the same workers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from raybench.cluster.ray_cluster.actors import start_store
from raybench.cluster.ray_cluster.liveness import HeadMonitor
from raybench.cluster.ray_cluster.ray_errors import all_done
from raybench.cluster.ray_cluster.workers import WorkerGroup
from raybench.errors import ClusterError
from raybench.records import Group

_START_TIMEOUT_S = 60.0
_LOOK_S = 0.5
# An idle group goes in milliseconds; other points wait for it, so a stuck one must not take long.
_LEAVE_TIMEOUT_S = 10.0


class ProcessGroups:
    """Who is in which group, and the store in which a new one meets."""

    def __init__(self, workers: WorkerGroup, monitor: HeadMonitor) -> None:
        self._workers = workers
        self._monitor = monitor
        self._groups: dict[tuple[int, ...], Group] = {}
        self._store: Any = None
        self._epochs = itertools.count()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the store, which takes as long as a worker. Does not wait."""
        self._store = start_store()

    def join(self, worker_ids: tuple[int, ...]) -> Group | None:
        """Return the group of exactly these workers, None for one alone; what they were in is left.

        Raises ClusterError when there can be no store.
        """
        with self._lock:
            endpoint = self._endpoint() if len(worker_ids) > 1 else None
            kept = self._groups.get(worker_ids)
            if kept and (kept.store_address, kept.store_port) == endpoint:
                return kept
            self._leave(worker_ids)
            if endpoint is None:
                return None
            address, port = endpoint
            name = f"group-{next(self._epochs)}"
            self._groups[worker_ids] = Group(name=name, store_address=address, store_port=port)
            return self._groups[worker_ids]

    def leave(self, worker_ids: Sequence[int]) -> None:
        """Take down all groups that one of these workers is in."""
        with self._lock:
            self._leave(worker_ids)

    def forget(self, worker_ids: Sequence[int]) -> None:
        """Note that these workers' groups are gone, with their processes or without."""
        with self._lock:
            for members in self._with(worker_ids):
                del self._groups[members]

    def tell_abort(self, group: Group | None) -> None:
        """Wake what waits in the members to abort the group, where there is one."""
        store = self._store  # another thread may find that it died
        if group is not None and store is not None:
            store.tell_abort.remote(group)

    def close(self) -> None:
        """Let the store go."""
        if self._store is not None:
            ray.kill(self._store, no_restart=True)
        self._store, self._groups = None, {}

    def _with(self, worker_ids: Sequence[int]) -> list[tuple[int, ...]]:
        return [members for members in self._groups if not set(members).isdisjoint(worker_ids)]

    def _leave(self, worker_ids: Sequence[int]) -> None:
        """All members of a group must leave it before one of them joins another.

        They are idle: a point runs on all members of its group.
        """
        for members in self._with(worker_ids):
            group = self._groups.pop(members)
            if not self._workers.lost.isdisjoint(members):
                # Without all members it cannot be left; the others end it when they join the next.
                self.tell_abort(group)
                continue
            refs = [self._workers[worker_id].actor.leave.remote() for worker_id in members]
            if not all_done(refs, _LEAVE_TIMEOUT_S):
                self._workers.replace(members)

    def _endpoint(self) -> tuple[str, int]:
        """Of the store; of a new one when that is gone."""
        for _ in range(2):
            if self._store is None:
                self._store = start_store()
            try:
                endpoint: tuple[str, int] = ray.get(
                    self._await_answer(self._store.endpoint.remote())
                )
            except ray.exceptions.RayActorError:
                self._store = None
            else:
                return endpoint
        raise ClusterError("the rendezvous store died as soon as it was started")

    def _await_answer(self, ref: Any) -> Any:
        """Wait for it, as long as there is a Ray that could start the store."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not ray.wait([ref], timeout=_LOOK_S)[0]:
            self._monitor.check()
            if time.monotonic() > deadline_s:
                raise ClusterError(
                    f"the rendezvous store does not answer: no process for it in "
                    f"{_START_TIMEOUT_S:g} s; see `ray status`"
                )
        return ref
