"""The process groups of the workers: each kept while consecutive points use the same workers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from raybench.cluster.processes.store import StoreProcess
from raybench.records import Group


class ProcessGroups:
    """Who is in which group, and the store in which a new one meets. address: of the driver."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._store: StoreProcess | None = None
        self._groups: dict[tuple[int, ...], Group] = {}
        self._epochs = itertools.count()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the store, which takes as long as a worker. Does not wait."""
        self._store = StoreProcess(self._address)

    def join(self, worker_ids: tuple[int, ...]) -> Group | None:
        """Return the group of exactly these workers, None for one alone.

        A worker leaves its last group by itself when it joins another.
        Raises ClusterError where there can be no store.
        """
        with self._lock:
            if len(worker_ids) > 1 and (self._store is None or self._store.has_ended()):
                self.start()
                self._groups.clear()
            if self._store is None or len(worker_ids) < 2:
                self._drop_groups_of(worker_ids)
                return None
            if worker_ids not in self._groups:
                self._drop_groups_of(worker_ids)
                address, port = self._store.endpoint()
                name = f"group-{next(self._epochs)}"
                self._groups[worker_ids] = Group(name=name, store_address=address, store_port=port)
            return self._groups[worker_ids]

    def forget(self, worker_ids: Sequence[int]) -> None:
        """Note that these workers' groups are gone."""
        with self._lock:
            self._drop_groups_of(worker_ids)

    def tell_abort(self, group: Group | None) -> None:
        """Wake what waits in the members to abort the group, where there is one."""
        store = self._store
        if group is not None and store is not None:
            store.tell_abort(group)

    def close(self) -> None:
        """Let the store go."""
        if self._store is not None:
            self._store.close()
        self._store, self._groups = None, {}

    def _drop_groups_of(self, worker_ids: Sequence[int]) -> None:
        for members in [one for one in self._groups if not set(one).isdisjoint(worker_ids)]:
            del self._groups[members]
