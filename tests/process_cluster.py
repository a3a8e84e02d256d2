"""A launcher without Ray: workers as plain processes of this host, each behind a pipe.

It shows what a launcher has to bring along, and how little that is: everything that is decided
about a point is in `raybench.cluster`. The processes, their gloo groups and what kills them are
real. They are forks of a server that has loaded torch, so each is there in a moment.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from raybench.cluster import DeviceKind
from raybench.cluster.allocator import Strategy, assign_ranks
from raybench.cluster.node_processes import log_tail
from raybench.cluster.point_end import RunningRanks, finish_point
from raybench.cluster.rendezvous import StoreHost
from raybench.hardware.device_facts import FactReader
from raybench.records import Answer, Cause, Device, DeviceSample, Failure, Group, Task
from raybench.records.device_facts import DeviceFacts

_ADDRESS = "127.0.0.1"
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["raybench.worker.worker"])


def serve(connection: Connection, index: int, logs: Path) -> None:
    """Be a worker: say which device this is, then answer one task after the other."""
    for descriptor, kind in ((1, "out"), (2, "err")):
        path = logs / f"worker-{index}-{os.getpid()}.{kind}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    from raybench.worker.worker import Worker

    worker = Worker("cpu", index)
    device = worker.identity(node_id="here", address=_ADDRESS)
    connection.send(device)
    with suppress(EOFError):  # the driver has ended
        while True:
            connection.send(worker.run(*connection.recv()))


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """A worker, its process and the pipe to it."""

    process: BaseProcess
    connection: Connection
    device: Device
    is_used: bool = False


class _RunningProcesses(RunningRanks):
    """The ranks of a point. workers: in rank order."""

    def __init__(
        self, workers: Sequence[WorkerProcess], logs: Path, abort: Callable[[], None]
    ) -> None:
        self.devices = [worker.device for worker in workers]
        self._workers, self._logs, self._abort = workers, logs, abort
        self._waiting = {worker.connection: rank for rank, worker in enumerate(workers)}

    def answers(self, timeout_s: float) -> Mapping[int, Answer]:
        came = {}
        for connection in wait(list(self._waiting), timeout_s):
            assert isinstance(connection, Connection)
            rank = self._waiting.pop(connection)
            try:
                came[rank] = connection.recv()
            except (EOFError, ConnectionResetError):
                came[rank] = _death(rank, self._workers[rank].process)
        return came

    def abort(self) -> None:
        self._abort()

    def kill(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._workers[rank].process.kill()
            self._workers[rank].process.join()

    def log_tails(self, ranks: Collection[int]) -> Mapping[int, str]:
        return {rank: log_tail(self._logs, self.devices[rank].process_id) for rank in ranks}


def _death(rank: int, process: BaseProcess) -> Failure:
    process.join()
    code = process.exitcode or 0
    how = f"died by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Failure.of(Cause.WORKER_DIED, rank=rank, message=f"the worker process {how}")


class ProcessCluster:
    """Workers on the processors of this host. logs: where they write what they print."""

    kind: DeviceKind = "cpu"
    description = "plain processes of this host"
    lost: frozenset[int] = frozenset()
    pending = 0
    others: tuple[str, ...] = ()

    def __init__(self, capacity: int, logs: Path) -> None:
        self.capacity = capacity
        self._logs = logs
        self._store = StoreHost(_ADDRESS)
        self._workers: list[WorkerProcess] = []
        self._groups: dict[tuple[int, ...], Group] = {}
        self._epochs = itertools.count()
        self._lock = threading.Lock()

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(worker.device for worker in self._workers)

    def start(self, count: int, strategy: Strategy) -> None:
        self._workers = self._launch(range(count))

    def refresh(self, timeout_s: float) -> None:
        """Nothing comes and goes here."""

    def run(self, task: Task, worker_ids: Sequence[int]) -> tuple[Answer, ...]:
        chosen = tuple(worker_ids)
        if task.settings.fresh_workers:
            self._replace([one for one in chosen if self._workers[one].is_used])
        group = self._join(chosen)
        workers = [self._workers[worker_id] for worker_id in chosen]
        places = assign_ranks([worker.device for worker in workers])
        for worker, place in zip(workers, places, strict=True):
            worker.is_used = True
            with suppress(BrokenPipeError):  # it died while it was idle, and answers by that
                worker.connection.send((task, place, group))
        ranks = _RunningProcesses(workers, self._logs, lambda: self._tell_abort(group))
        outcome = finish_point(ranks, task)
        if outcome.group_is_gone:
            self._forget(chosen)
        self._replace([chosen[rank] for rank in sorted(outcome.unfit)])
        return outcome.answers

    def restart(self) -> None:
        self._replace(range(len(self._workers)))

    def bystanders(self, worker_ids: Sequence[int]) -> Callable[[], tuple[str, ...]]:
        return tuple

    def telemetry(self) -> tuple[DeviceSample, ...]:
        return ()

    def read_device_facts(self) -> tuple[DeviceFacts, ...]:
        return FactReader().read(self.devices)

    def close(self) -> None:
        for worker in self._workers:
            _end(worker)
        self._workers, self._groups = [], {}

    def _launch(self, indices: Sequence[int]) -> list[WorkerProcess]:
        """Start workers for the processors of these numbers, all at once, and wait for them."""
        started = []
        for index in indices:
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=serve, args=(theirs, index, self._logs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        return [
            WorkerProcess(process=process, connection=ours, device=ours.recv())
            for process, ours in started
        ]

    def _replace(self, worker_ids: Sequence[int]) -> None:
        self._forget(worker_ids)
        for worker_id in worker_ids:
            _end(self._workers[worker_id])
        for worker_id, worker in zip(worker_ids, self._launch(worker_ids), strict=True):
            self._workers[worker_id] = worker

    def _join(self, chosen: tuple[int, ...]) -> Group | None:
        """The group of exactly these workers, kept from point to point; None for one alone.

        A worker leaves its last group by itself when it joins another.
        """
        with self._lock:
            if chosen not in self._groups:
                self._drop_groups_of(chosen)
                address, port = self._store.endpoint()
                name = f"group-{next(self._epochs)}"
                self._groups[chosen] = Group(name=name, store_address=address, store_port=port)
            return self._groups[chosen] if len(chosen) > 1 else None

    def _forget(self, worker_ids: Sequence[int]) -> None:
        with self._lock:
            self._drop_groups_of(worker_ids)

    def _drop_groups_of(self, worker_ids: Sequence[int]) -> None:
        for members in [one for one in self._groups if not set(one).isdisjoint(worker_ids)]:
            del self._groups[members]

    def _tell_abort(self, group: Group | None) -> None:
        if group is not None:
            self._store.tell_abort(group)


def _end(worker: WorkerProcess) -> None:
    worker.process.kill()
    worker.process.join()
    worker.process.close()
    worker.connection.close()
