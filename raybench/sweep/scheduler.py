"""Decide which attempt begins next, and on which workers, without clock or cluster."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from raybench.cluster.allocator import DeviceAllocator
from raybench.job.plan import Plan
from raybench.job.point import ANY, Isolation, Point, Strategy, choose_devices
from raybench.records.device import Device
from raybench.records.status import Cause
from raybench.sweep.batch_search import SeriesKey, series_key
from raybench.sweep.rounds import Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Run the attempt."""

    attempt: Attempt
    # In rank order.
    worker_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Do not run the attempt."""

    attempt: Attempt
    cause: Cause
    # The error message of its row.
    reason: str


Decision = Assign | Skip
# (world_size, strategy, devices, control_of).
_Request = tuple[int, Strategy, str, int]
# (round, 0 or minus world_size, order of the block, order of `add`); the smallest runs first.
_Priority = tuple[int, int, int, int]


def workers_needed(plan: Plan, capacity: int, isolation: Isolation = "cluster") -> int:
    """Return how many workers, up to `capacity`, the plan can keep busy; 0 if no point fits."""
    fitting = [point.world_size for point in plan.points if point.world_size <= capacity]
    if not fitting:
        return 0
    strategies = {point.strategy for point in plan.points}
    names_devices = any(point.devices != ANY for point in plan.points)
    if isolation == "node" or names_devices or len(strategies) > 1 or "rail" in strategies:
        # The devices are chosen by model and node, which are unknown before all workers start.
        return capacity
    return max(fitting) if isolation == "cluster" else min(capacity, sum(fitting))


class Schedule:
    """A priority queue of attempts, which assigns idle workers to the next attempt that fits.

    Attempts run round by round. With isolation `cluster`, blocks run one after another and keep
    their process group. With `node` and `device`, points with many devices come first, so that
    small points fill the gaps. Other attempts overtake an attempt that has to wait for workers,
    except for the control of its block.
    """

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        # The failed point (point_id) after which all attempts are skipped.
        self._stopped_by: str | None = None
        # Series -> smallest batch size that was out of memory.
        self._smallest_oom: dict[SeriesKey, int] = {}
        # A heap for each request. Its attempts need the same number and choice of workers, so if
        # the first attempt finds no workers, no other attempt in the heap does.
        self._waiting: dict[_Request, list[tuple[_Priority, Attempt]]] = {}
        # (round, index of the attempt) -> priority.
        self._priorities: dict[tuple[int, int], _Priority] = {}
        # (round, world_size of the block) -> order of appearance.
        self._blocks: dict[tuple[int, int], int] = {}
        # Device of each worker; the position is the worker id.
        self._devices: Sequence[Device] = ()
        self._all_cuda = True
        # Largest possible number of devices of a point, lost and pending devices included.
        self._capacity = 0
        # Ids of the lost workers.
        self._lost: frozenset[int] = frozenset()
        # Upper bound of the number of workers that may still join.
        self.pending = 0
        # (setting `devices` of a point, its strategy) -> allocator.
        self._allocators: dict[tuple[str, Strategy], DeviceAllocator] = {}
        # Index of a running attempt -> its workers.
        self._running: dict[int, tuple[int, ...]] = {}

    @property
    def is_done(self) -> bool:
        """Whether no attempt waits; attempts may still run."""
        return not any(self._waiting.values())

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped_by is not None

    def update_cluster(
        self, devices: Sequence[Device], capacity: int, lost: frozenset[int], pending: int
    ) -> None:
        """Set the state of the cluster from the properties of `Cluster`.

        Args:
            devices: of each worker, in the order of worker ids.
            capacity: largest possible number of devices of a point.
            lost: ids of the workers that are gone for good.
            pending: upper bound of the number of workers that may still join.
        """
        self._capacity, self.pending = capacity, pending
        # Comparing is fast, because most devices are the same objects.
        if devices == self._devices and lost == self._lost:
            return
        self._devices, self._lost = devices, lost
        self._all_cuda = all(device.kind == "cuda" for device in devices)
        self._allocators = {}

    def add(self, attempt: Attempt) -> None:
        """Add an attempt at the end of its block; a retry gets the priority of its first try."""
        trial, point = (attempt.round, attempt.index), attempt.point
        if trial not in self._priorities:
            largest_first = 0 if self._isolation == "cluster" else -point.world_size
            # Number the blocks and the attempts in the order of their first `add`.
            block = self._blocks.setdefault((attempt.round, attempt.block), len(self._blocks))
            order = len(self._priorities)
            self._priorities[trial] = (attempt.round, largest_first, block, order)
        request = point.world_size, point.strategy, point.devices, attempt.control_of
        heapq.heappush(self._waiting.setdefault(request, []), (self._priorities[trial], attempt))

    def next(self) -> Decision | None:
        """Remove the next attempt from the queue and return what to do with the attempt.

        None means that all attempts must wait for a running attempt to end or a worker to join.
        """
        if self._isolation == "cluster" and self._running:
            return None
        busy = set(chain.from_iterable(self._running.values()))
        # Blocks with an attempt that has to wait for workers.
        waiting_blocks = set()
        # Heaps compare by their first entries, so the heap with the next attempt comes first.
        heaps = sorted(heap for heap in self._waiting.values() if heap)
        for heap in heaps:
            _, attempt = heap[0]
            block = (attempt.round, attempt.block)
            # A control ends its block, so the control waits for the rest of the block.
            if attempt.control_of and block in waiting_blocks:
                continue
            decision: Decision | None = self._skip_of(attempt)
            if decision is None:
                worker_ids = self._allocator(attempt.point).choose(attempt.point.world_size, busy)
                if worker_ids is None:
                    waiting_blocks.add(block)
                    continue
                self._running[attempt.index] = worker_ids
                decision = Assign(attempt=attempt, worker_ids=worker_ids)
            heapq.heappop(heap)
            return decision
        return None

    def free(self, attempt: Attempt) -> None:
        """Mark the workers of this attempt as idle; ignores skipped attempts."""
        self._running.pop(attempt.index, None)

    def note_oom(self, point: Point) -> None:
        """Make `next` skip larger batches of this series: the point was out of memory."""
        if point.batch_size is not None:
            series = series_key(point)
            smallest = self._smallest_oom.get(series, point.batch_size)
            self._smallest_oom[series] = min(smallest, point.batch_size)

    def stop(self, point_id: str) -> None:
        """Make `next` skip all attempts, because this point failed."""
        self._stopped_by = self._stopped_by or point_id

    def _allocator(self, point: Point) -> DeviceAllocator:
        """Return the allocator for the devices and the strategy that the point asks for."""
        choice = point.devices, point.strategy
        if choice not in self._allocators:
            allowed = None  # all workers
            if point.devices != ANY:
                # The number of a device is the id of its worker.
                allowed = choose_devices(point.devices, [device.name for device in self._devices])
            self._allocators[choice] = DeviceAllocator(
                self._devices, self._lost, point.strategy, self._isolation, allowed
            )
        return self._allocators[choice]

    def _skip_of(self, attempt: Attempt) -> Skip | None:
        """Return a Skip if the attempt can never run, else None."""
        point = attempt.point
        if self._stopped_by is not None:
            reason = f"on_error: stop, after point {self._stopped_by} failed"
            return Skip(attempt=attempt, cause=Cause.STOPPED, reason=reason)
        if point.world_size > self._allocator(point).usable_count + self.pending:
            return self._too_few_devices(attempt)
        if point.cuda_graph and not self._all_cuda:
            reason = "cuda_graph: true needs CUDA devices"
            return Skip(attempt=attempt, cause=Cause.NEEDS_CUDA, reason=reason)
        smallest = self._smallest_oom.get(series_key(point))
        if smallest is not None and point.batch_size is not None and smallest < point.batch_size:
            reason = f"oom at batch_size {smallest}"
            return Skip(attempt=attempt, cause=Cause.OUT_OF_MEMORY_BEFORE, reason=reason)
        return None

    def _too_few_devices(self, attempt: Attempt) -> Skip:
        """Return the Skip of an attempt that needs more devices than the cluster can give."""
        needed, choice = attempt.point.world_size, attempt.point.devices
        usable = self._allocator(attempt.point).usable_count
        cause = Cause.TOO_FEW_DEVICES
        alive = [device for worker, device in enumerate(self._devices) if worker not in self._lost]
        if choice != ANY and needed <= len(alive):
            # Too few devices have the model or the numbers of the point.
            models = Counter(device.name for device in alive)
            listed = ", ".join(f"{count} x {model}" for model, count in models.items())
            verb = "is" if usable == 1 else "are"
            why = f"{usable} {verb} {choice}; the cluster has {listed}"
        elif self._lost and needed <= len(self._devices):
            # Host -> number of workers, and number of lost workers.
            workers = Counter(device.host for device in self._devices)
            lost = Counter(self._devices[worker_id].host for worker_id in sorted(self._lost))
            # A host that has lost all its workers counts as a lost node.
            are_nodes_lost = all(workers[host] == count for host, count in lost.items())
            cause = Cause.NODE_LOST if are_nodes_lost else Cause.WORKER_LOST
            subject = "node" if are_nodes_lost else f"{lost.total()} of the workers on"
            why = f"{usable} left; lost: {subject} {', '.join(lost)}"
        elif needed > self._capacity:
            why = f"the cluster has {self._capacity}"
            if any(device.kind == "cpu" for device in self._devices):
                why += "; a private Ray has a CPU worker for each core (placement.oversubscribe)"
        else:
            verb = "has" if usable == 1 else "have"
            why = f"{usable} {verb} a worker: the others did not come"
        return Skip(attempt=attempt, cause=cause, reason=f"needs {needed} devices, {why}")
