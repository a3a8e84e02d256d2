"""The workers of a run: started on the devices of the hosts, replaced, or lost."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from raybench.cluster import DeviceKind
from raybench.cluster.processes.channel import GONE, Channel, Door
from raybench.cluster.processes.hosts import Host, Hosts
from raybench.cluster.processes.worker_process import WorkerOrder
from raybench.cluster.worker_state import WorkerState
from raybench.records import Device

_START_TIMEOUT_S = 180.0
# A process that is killed while it starts is started again, so often in all.
_MOST_STARTS = 3
_FREE_TIMEOUT_S = 2.0
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A device of a host, by its number there and its lasting name."""

    host: Host
    index: int
    name: str


@dataclass(slots=True, kw_only=True)
class WorkerHandle(WorkerState):
    """A worker and how it is reached."""

    slot: Slot
    channel: Channel


class WorkerStartError(Exception):
    """A worker could not be started. was_killed: from outside of it, so that another may be."""

    def __init__(self, reason: str, *, was_killed: bool = False) -> None:
        super().__init__(reason)
        self.was_killed = was_killed


class _Arrival:
    """What a worker that starts says: its device, or that it is gone."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.device: Future[Device] = Future()

    def come(self, connection: Connection) -> None:
        self.channel = Channel(connection, self._take)

    def _take(self, message: Any) -> None:
        if message is GONE:
            self.device.cancel()
        elif not self.device.done():
            self.device.set_result(message)


class Starter:
    """Starts workers for slots. door: where they report to the driver."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._arrivals: dict[str, _Arrival] = {}
        self._lock = threading.Lock()

    def come(self, connection: Connection, token: str) -> None:
        """Take the connection of a worker that was started; a stranger's is closed."""
        with self._lock:
            arrival = self._arrivals.get(token)
        if arrival is None:
            connection.close()
        else:
            arrival.come(connection)

    def start(
        self, slot: Slot, kind: DeviceKind, environment: Mapping[str, str]
    ) -> Callable[[], tuple[Device, Channel]]:
        """Begin to start a worker; the call waits for it. That raises WorkerStartError."""
        token, arrival = secrets.token_hex(8), _Arrival()
        order = WorkerOrder(
            door=self._door,
            token=token,
            kind=kind,
            index=slot.index,
            node_id=slot.host.facts.node_id,
            address=slot.host.address,
            search_path=os.getcwd(),  # noqa: PTH109  (Path.cwd() is no text)
        )
        with self._lock:
            self._arrivals[token] = arrival
        process = slot.host.ask("start_worker", order, dict(environment))

        def wait() -> tuple[Device, Channel]:
            try:
                device = self._await_device(slot, arrival, process)
            finally:
                with self._lock:
                    del self._arrivals[token]
            assert arrival.channel is not None
            return device, arrival.channel

        return wait

    def _await_device(self, slot: Slot, arrival: _Arrival, process: Future[int]) -> Device:
        where = f"a worker could not start on {slot.host.facts.host}"
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                return arrival.device.result(_LOOK_S)
            except (TimeoutError, CancelledError):
                if slot.host.is_silent():
                    raise WorkerStartError(f"{where}: its agent does not answer") from None
            if why := self._why_ended(slot.host, process):
                reason, was_killed = why
                raise WorkerStartError(f"{where}: its process {reason}", was_killed=was_killed)
        raise WorkerStartError(f"{where}: no process in {_START_TIMEOUT_S:.0f} s")

    def _why_ended(self, host: Host, process: Future[int]) -> tuple[str, bool] | None:
        """Say how a worker that starts has ended, and whether it was killed; None while it lives.

        Raises what has kept the agent from starting it.
        """
        try:
            number = process.result(0)
            end = host.ask("end_of", number, 0.0).result(_LOOK_S)
            if end is None:
                return None
            last = host.ask("log_tail", number).result(_LOOK_S).splitlines()[-1:]
        except (TimeoutError, CancelledError):
            return None
        return ": ".join([str(end), *last]), end.exit_code < 0


class Workers:
    """All workers, in order of their numbers.

    tell: gets a line for the user when workers are lost.
    """

    def __init__(
        self, starter: Starter, kind: DeviceKind, hosts: Hosts, tell: Callable[[str], None]
    ) -> None:
        self._starter, self._kind, self._hosts, self._tell = starter, kind, hosts, tell
        self._workers: list[WorkerHandle] = []

    def __getitem__(self, number: int) -> WorkerHandle:
        return self._workers[number]

    @property
    def devices(self) -> tuple[Device, ...]:
        """As Cluster.devices."""
        return tuple(worker.device for worker in self._workers)

    @property
    def lost(self) -> frozenset[int]:
        """As Cluster.lost."""
        return frozenset(n for n, worker in enumerate(self._workers) if worker.lost_because)

    def start(self, slots: Sequence[Slot]) -> list[Device]:
        """Start workers on these, all at once. Raises WorkerStartError where one cannot start."""
        begun = [(slot, self._begin(slot, {})) for slot in slots]
        for slot, wait in begun:
            device, channel = wait()
            device = replace(device, rack=slot.host.facts.rack)
            self._hosts.adopt({device.uuid: slot.host})
            self._workers.append(WorkerHandle(slot=slot, device=device, channel=channel))
        return [worker.device for worker in self._workers]

    def order(self, positions: Sequence[int]) -> None:
        """Put the workers in this order."""
        self._workers = [self._workers[position] for position in positions]

    def replace(self, numbers: Collection[int]) -> None:
        """Start new processes on the same devices; a worker that cannot have one is lost."""
        self.lose_silent()
        workers = [self._workers[number] for number in numbers]
        workers = [worker for worker in workers if not worker.lost_because]
        devices = [worker.device for worker in workers]
        self._hosts.kill(devices)
        for worker in workers:
            worker.channel.close()
        self._hosts.wait_until_free(devices, _FREE_TIMEOUT_S)
        begun = [(worker, self._begin(worker.slot, worker.environment)) for worker in workers]
        for worker, wait in begun:
            self._take_over(worker, wait)

    def lose_silent(self) -> None:
        """Give up what is on hosts whose agents do not answer."""
        silent = self._hosts.silent()
        for worker in self._workers:
            if worker.slot.host in silent:
                self._lose(worker, f"node {worker.device.host} does not answer")

    def close(self) -> None:
        """End all."""
        self._hosts.kill(self.devices)
        for worker in self._workers:
            worker.channel.close()
        self._workers = []

    def _begin(
        self, slot: Slot, environment: Mapping[str, str]
    ) -> Callable[[], tuple[Device, Channel]]:
        """Begin to start one; one that is killed meanwhile is started again."""
        first = self._starter.start(slot, self._kind, environment)

        def wait() -> tuple[Device, Channel]:
            waiting = first
            for tries in range(1, _MOST_STARTS + 1):
                try:
                    return waiting()
                except WorkerStartError as error:
                    if not error.was_killed or tries == _MOST_STARTS:
                        raise
                    self._tell(f"{error} (tried once more)")
                    waiting = self._starter.start(slot, self._kind, environment)
            raise AssertionError("the last try returns or raises")

        return wait

    def _take_over(self, worker: WorkerHandle, wait: Callable[[], tuple[Device, Channel]]) -> None:
        try:
            device, channel = wait()
        except WorkerStartError as error:
            self._lose(worker, _loss(worker.device, str(error)))
            return
        # When a GPU has fallen off the bus, CUDA counts the others anew.
        if device.kind == "cuda" and device.uuid != worker.device.uuid:
            channel.close()
            self._lose(worker, _loss(worker.device, f"it is {device.uuid} now"))
            return
        self._hosts.adopt({device.uuid: worker.slot.host})
        worker.device = replace(device, rack=worker.device.rack)
        worker.channel, worker.is_used = channel, False

    def _lose(self, worker: WorkerHandle, reason: str) -> None:
        if not worker.lost_because:
            worker.lost_because = reason
            worker.channel.close()  # it ends by itself, where it is idle
            self._tell(reason)


def _loss(device: Device, reason: str) -> str:
    return f"{device.kind}:{device.index} on {device.host} is lost: {reason}"
