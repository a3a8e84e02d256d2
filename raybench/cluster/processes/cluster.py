"""Workers as plain processes, one per device, each reached by a connection of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from raybench.cluster import DeviceKind, allocator
from raybench.cluster.allocator import Strategy
from raybench.cluster.claims import Claims
from raybench.cluster.device_locks import Terms
from raybench.cluster.failures import with_losses
from raybench.cluster.point_end import RunningRanks, finish_point
from raybench.cluster.processes.channel import GONE
from raybench.cluster.processes.connection import Joined
from raybench.cluster.processes.groups import ProcessGroups
from raybench.cluster.processes.hosts import Hosts
from raybench.cluster.processes.workers import Slot, WorkerHandle, Workers, WorkerStartError
from raybench.cluster.worker_state import answer_unstarted, check_devices, need_new_processes
from raybench.errors import ClusterError
from raybench.records import Answer, Cause, Device, DeviceSample, Failure, Task
from raybench.records.device_facts import DeviceFacts
from raybench.records.device_list import DeviceList

# A rank on a host that does not answer is lost.
_LOOK_S = 1.0


class _RunningProcesses(RunningRanks):
    """The ranks of a point. workers: in rank order. abort: as RunningRanks'."""

    def __init__(
        self, workers: Sequence[WorkerHandle], hosts: Hosts, abort: Callable[[], None]
    ) -> None:
        self.devices = [worker.device for worker in workers]
        self._workers, self._hosts, self._abort = workers, hosts, abort
        self._came: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._waiting = set(range(len(workers)))
        for rank, worker in enumerate(workers):
            worker.channel.listen(partial(self._take, rank))

    def answers(self, timeout_s: float) -> Mapping[int, Answer]:
        with suppress(Empty):
            rank, message = self._came.get(timeout=min(timeout_s, _LOOK_S))
            if rank in self._waiting:
                self._waiting.remove(rank)
                return {rank: self._death(rank) if message is GONE else message}
        return self._on_silent_hosts()

    def abort(self) -> None:
        self._abort()

    def kill(self, ranks: Collection[int]) -> None:
        self._waiting.difference_update(ranks)
        self._hosts.kill([self.devices[rank] for rank in ranks])

    def log_tails(self, ranks: Collection[int]) -> Mapping[int, str]:
        return self._hosts.log_tails({rank: self.devices[rank] for rank in ranks})

    def wait_until_free(self, ranks: Collection[int], timeout_s: float) -> Sequence[str]:
        return self._hosts.wait_until_free([self.devices[rank] for rank in ranks], timeout_s)

    def _take(self, rank: int, message: Any) -> None:
        self._came.put((rank, message))

    def _death(self, rank: int) -> Answer:
        end = self._hosts.end_of(self.devices[rank])
        is_memory = end is not None and end.killed_for_memory
        cause = Cause.HOST_OUT_OF_MEMORY if is_memory else Cause.WORKER_DIED
        how = str(end) if end else "is gone, and its agent does not say how"
        return Failure.of(cause, rank=rank, message=f"the worker process {how}")

    def _on_silent_hosts(self) -> dict[int, Answer]:
        silent = self._hosts.silent()
        lost = [rank for rank in self._waiting if self._workers[rank].slot.host in silent]
        self._waiting.difference_update(lost)
        return {
            rank: Failure.of(
                Cause.NODE_LOST,
                rank=rank,
                message=f"node {self.devices[rank].host} does not answer",
            )
            for rank in lost
        }


class ProcessCluster:
    """The processes that raybench has on the hosts of a connection.

    tell: gets a line for the user when workers are lost. terms: on which devices are taken from
    other sweeps; without them no device is locked, and nobody is seen beside a point.
    only: the devices that may be used; all where there is none.
    """

    pending = 0

    def __init__(
        self,
        joined: Joined,
        tell: Callable[[str], None] = lambda _: None,
        *,
        terms: Terms | None = None,
        only: DeviceList | None = None,
    ) -> None:
        self._joined = joined
        self._hosts = joined.hosts
        self._workers = Workers(joined.meeting.starter, joined.kind, joined.hosts, tell)
        self._claims = Claims(joined.hosts, terms, tell)
        self._groups = ProcessGroups(joined.meeting.address)
        self._slots = _keep_listed(joined.slots, only)

    @property
    def description(self) -> str:
        """As Cluster.description."""
        noun = "GPU" if self.kind == "cuda" else "CPU worker"
        return f"{self._joined.where}, up to {self.capacity} {noun}{'s' * (self.capacity != 1)}"

    @property
    def kind(self) -> DeviceKind:
        """As Cluster.kind."""
        return self._joined.kind

    @property
    def capacity(self) -> int:
        """As Cluster.capacity."""
        return len(self._slots)

    @property
    def devices(self) -> tuple[Device, ...]:
        """As Cluster.devices."""
        return self._workers.devices

    @property
    def lost(self) -> frozenset[int]:
        """As Cluster.lost."""
        return self._workers.lost

    @property
    def others(self) -> tuple[str, ...]:
        """As Cluster.others."""
        return self._claims.others

    def start(self, count: int, strategy: Strategy) -> None:
        """As Cluster.start."""
        if count > 1:
            self._groups.start()
        free = Counter(slot.host.facts.node_id for slot in self._slots)
        racks = {slot.host.facts.node_id: slot.host.facts.rack for slot in self._slots}
        left = allocator.shares(free, count, strategy, racks)
        chosen = []
        for slot in self._slots:
            if left.get(slot.host.facts.node_id):
                left[slot.host.facts.node_id] -= 1
                chosen.append(slot)
        try:
            devices = self._workers.start(chosen)
        except WorkerStartError as error:
            raise ClusterError(str(error)) from None
        check_devices(devices)
        self._claims.hold(devices)
        self._hosts.watch(devices)
        self._workers.order(allocator.in_device_order(devices))

    def refresh(self, timeout_s: float) -> None:
        """As Cluster.refresh: hosts may go, none comes."""
        self._workers.lose_silent()

    def run(self, task: Task, worker_ids: Sequence[int]) -> tuple[Answer, ...]:
        """As Cluster.run."""
        chosen = tuple(worker_ids)
        workers = [self._workers[worker_id] for worker_id in chosen]
        self._workers.lose_silent()
        if need_new_processes(task, workers):
            for worker in workers:
                worker.environment = task.worker_environment
            self._replace(chosen)
        if any(worker.lost_because for worker in workers):
            return with_losses(*answer_unstarted(workers))
        group = self._groups.join(chosen)
        running = _RunningProcesses(workers, self._hosts, lambda: self._groups.tell_abort(group))
        places = allocator.assign_ranks(running.devices)
        for worker, place in zip(workers, places, strict=True):
            worker.is_used = True
            worker.channel.send((task, place, group))
        outcome = finish_point(running, task)
        if outcome.group_is_gone:
            self._groups.forget(chosen)
        clocked = self._hosts.with_clocks(outcome.answers, running.devices)
        outputs = self._hosts.new_outputs(running.devices)
        self._replace([chosen[rank] for rank in sorted(outcome.unfit)])
        answers = zip(clocked, outputs, strict=True)
        return with_losses(
            [replace(answer, output=output) for answer, output in answers],
            [worker.lost_because for worker in workers],
        )

    def restart(self) -> None:
        """As Cluster.restart."""
        numbers = range(len(self.devices))
        self._replace([number for number in numbers if self._workers[number].is_used])

    def give_back(self, count: int, strategy: Strategy) -> None:
        """Nobody else could have them before all of these processes end."""

    def bystanders(self, worker_ids: Sequence[int]) -> Callable[[], tuple[str, ...]]:
        """As Cluster.bystanders."""
        return self._hosts.bystanders([self._workers[one].device for one in worker_ids])

    def telemetry(self) -> tuple[DeviceSample, ...]:
        """As Cluster.telemetry."""
        return self._hosts.drain()

    def read_device_facts(self) -> tuple[DeviceFacts, ...]:
        """As Cluster.read_device_facts."""
        return self._hosts.device_facts(self.devices)

    def close(self) -> None:
        """Let all processes go."""
        self._workers.close()
        self._groups.close()
        self._joined.close()

    def _replace(self, worker_ids: Collection[int]) -> None:
        if worker_ids:
            self._groups.forget(tuple(worker_ids))
            self._workers.replace(worker_ids)


def _keep_listed(slots: Sequence[Slot], only: DeviceList | None) -> tuple[Slot, ...]:
    """Return the devices that may be used. Raises ClusterError for one that is not there."""
    if only is None:
        return tuple(slots)
    there = {slot.name for slot in slots}
    if missing := [name for name in only.names if name not in there]:
        raise ClusterError(f"{only.source}: {missing[0]} is not there; take it out of the list")
    return tuple(slot for slot in slots if slot.name in only.names)
