"""A cluster in this process, for tests and benchmarks without Ray.

The default worker is the real one on the CPU; a process has one process group, so it serves points
of one device. Where many devices are to be played, give the devices and a `make_worker`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from raybench.cluster import allocator
from raybench.cluster.point_end import RunningRanks, finish_point
from raybench.hardware.devices import FactReader
from raybench.job.point import Strategy
from raybench.records.device import Device, DeviceKind
from raybench.records.devices import DeviceFacts, DeviceSample
from raybench.records.hang import HangVerdict
from raybench.records.measurement import RankAnswer
from raybench.records.record import OtherUsers
from raybench.records.task import GroupSpec, RankInfo, Task


def choose_workers(
    devices: Sequence[Device], world_size: int, strategy: Strategy
) -> tuple[int, ...]:
    """The workers of a point on an idle cluster, in rank order."""
    alone = allocator.DeviceAllocator(devices, (), strategy, "cluster")
    worker_ids = alone.choose(world_size)
    assert worker_ids is not None, f"{world_size} devices asked, {len(devices)} there"
    return worker_ids


class InProcessWorker(Protocol):
    def run(self, task: Task, place: RankInfo, group: GroupSpec | None) -> RankAnswer: ...


class _RanksInTurn(RunningRanks):
    """The ranks of a point; each runs when its answer is asked for, without a time limit."""

    def __init__(
        self, devices: Sequence[Device], workers: Sequence[InProcessWorker], task: Task
    ) -> None:
        self.devices = devices
        self._task = task
        self._left = deque(zip(workers, allocator.assign_ranks(devices), strict=True))

    def answers(self, timeout_s: float) -> Mapping[int, RankAnswer]:
        worker, place = self._left.popleft()
        return {place.rank: worker.run(self._task, place, None)}

    def abort(self) -> None:
        pass

    def kill(self, ranks: Collection[int]) -> None:
        pass

    def log_tails(self, ranks: Collection[int]) -> Mapping[int, str]:
        return {}


class LocalCluster:
    """Workers in this process, one per device; the ranks of a point run one after the other."""

    lost: frozenset[int] = frozenset()
    pending = 0
    other_sweeps: tuple[str, ...] = ()
    is_private = True

    def __init__(
        self, devices: Sequence[Device], make_worker: Callable[[Device], InProcessWorker]
    ) -> None:
        self._offered = [devices[position] for position in allocator.in_device_order(devices)]
        self._make_worker = make_worker
        self._workers: dict[str, InProcessWorker] = {}
        self._devices: tuple[Device, ...] = ()
        self._facts = FactReader()

    @property
    def description(self) -> str:
        return f"in this process, {self.capacity} devices"

    @property
    def kind(self) -> DeviceKind:
        return self._offered[0].kind

    @property
    def capacity(self) -> int:
        return len(self._offered)

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._devices

    def refresh(self, timeout_s: float) -> None:
        pass

    def start(self, count: int, strategy: Strategy) -> None:
        worker_ids = choose_workers(self._offered, count, strategy)
        self._devices = tuple(self._offered[worker_id] for worker_id in worker_ids)
        self.restart()

    def restart(self) -> None:
        self._workers = {device.uuid: self._make_worker(device) for device in self._devices}

    def run(
        self,
        task: Task,
        worker_ids: Sequence[int],
        tell_hang: Callable[[HangVerdict], None] = print,
    ) -> tuple[RankAnswer, ...]:
        devices = [self._devices[worker_id] for worker_id in worker_ids]
        workers = [self._workers[device.uuid] for device in devices]
        outcome = finish_point(_RanksInTurn(devices, workers, task), task, tell_hang)
        for rank in outcome.unfit:
            self._workers[devices[rank].uuid] = self._make_worker(devices[rank])
        return outcome.answers

    def watch_other_users(self, worker_ids: Sequence[int]) -> Callable[[], OtherUsers]:
        return OtherUsers

    def telemetry(self) -> tuple[DeviceSample, ...]:
        return ()

    def read_device_facts(self) -> tuple[DeviceFacts, ...]:
        return self._facts.read(self._devices)

    def close(self) -> None:
        self._workers, self._devices = {}, ()


def this_process() -> LocalCluster:
    """Return a cluster of one real worker, on this process's CPU."""
    from raybench.worker.worker import Worker

    worker = Worker("cpu", 0)
    device = worker.identity(node_id="local", address="127.0.0.1")
    return LocalCluster([device], lambda _: worker)
