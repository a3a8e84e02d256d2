"""Which attempt begins next, and on which workers: pure decisions, without clock or cluster."""

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
# The waiting attempt with the smallest tuple runs first: (round, minus the number of devices, block
# in order of appearance, order of `add`).
_Priority = tuple[int, int, int, int]


def workers_needed(plan: Plan, capacity: int, isolation: Isolation = "cluster") -> int:
    """Return how many workers the plan can keep busy at once; 0 if no point fits.

    Args:
        capacity: number of devices of the cluster, and upper limit of the result.
    """
    fitting = [point.world_size for point in plan.points if point.world_size <= capacity]
    if not fitting:
        return 0
    strategies = {point.strategy for point in plan.points}
    names_devices = any(point.devices != ANY for point in plan.points)
    if isolation == "node" or names_devices or len(strategies) > 1 or "rail" in strategies:
        # The choice depends on models and nodes, which are not known before all workers start.
        return capacity
    return max(fitting) if isolation == "cluster" else min(capacity, sum(fitting))


class Schedule:
    """The waiting attempts, and the decision which of them begins next on the idle workers.

    Attempts run round by round. With isolation `cluster` the points of one world_size follow each
    other and keep their process group. With `node` and `device` the points with most devices come
    first, so that small points fill the gaps at the end. Later attempts overtake an attempt that
    has to wait for workers, except for the control of its block.
    """

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        # point_id of the point that made `stop` be called.
        self._stopped_by: str | None = None
        # Series -> smallest batch size that was out of memory.
        self._smallest_oom: dict[SeriesKey, int] = {}
        # (world_size, strategy, devices, control_of) -> heap of attempts. If the first attempt of a
        # heap finds no workers, the others of the heap find none either.
        self._waiting: dict[tuple[int, Strategy, str, int], list[tuple[_Priority, Attempt]]] = {}
        # (round, index of the attempt) -> priority.
        self._priorities: dict[tuple[int, int], _Priority] = {}
        # (round, block) -> order of appearance.
        self._blocks: dict[tuple[int, int], int] = {}
        self._devices: Sequence[Device] = ()
        self._all_cuda = True
        self._capacity = 0
        self._lost: frozenset[int] = frozenset()
        # As `Cluster.pending`.
        self.pending = 0
        # (devices that a point asks for, strategy) -> allocator.
        self._allocators: dict[tuple[str, Strategy], DeviceAllocator] = {}
        # Index of a running attempt -> its workers.
        self._running: dict[int, tuple[int, ...]] = {}

    @property
    def is_done(self) -> bool:
        """Whether no attempt waits; some may still run."""
        return not any(self._waiting.values())

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped_by is not None

    def update_cluster(
        self, devices: Sequence[Device], capacity: int, lost: frozenset[int], pending: int
    ) -> None:
        """Set the state of the cluster; the arguments are the properties of `Cluster`."""
        self._capacity, self.pending = capacity, pending
        # Comparing is fast, because most items are the same objects as before.
        if devices == self._devices and lost == self._lost:
            return
        self._devices, self._lost = devices, lost
        self._all_cuda = all(device.kind == "cuda" for device in devices)
        self._allocators = {}

    def add(self, attempt: Attempt) -> None:
        """Add an attempt at the end of its block; a retry gets the position of its first try."""
        trial, point = (attempt.round, attempt.index), attempt.point
        if trial not in self._priorities:
            size = 0 if self._isolation == "cluster" else -point.world_size
            block = self._blocks.setdefault((attempt.round, attempt.block), len(self._blocks))
            self._priorities[trial] = (attempt.round, size, block, len(self._priorities))
        request = point.world_size, point.strategy, point.devices, attempt.control_of
        heapq.heappush(self._waiting.setdefault(request, []), (self._priorities[trial], attempt))

    def next(self) -> Decision | None:
        """Remove the next attempt from the queue and return what to do with it.

        The workers of an `Assign` are busy until `free`. None: no attempt can begin before a
        running one ends or a worker joins.
        """
        if self._isolation == "cluster" and self._running:
            return None
        # (round, block) of attempts that have to wait. The control of such a block waits too.
        waiting_blocks = set()
        for heap in sorted(filter(None, self._waiting.values())):
            _, attempt = heap[0]
            if attempt.control_of and (attempt.round, attempt.block) in waiting_blocks:
                continue
            decision: Decision | None = self._skip_of(attempt)
            if decision is None:
                taken = set(chain.from_iterable(self._running.values()))
                chosen = self._allocator(attempt.point).choose(attempt.point.world_size, taken)
                if chosen is None:
                    waiting_blocks.add((attempt.round, attempt.block))
                    continue
                self._running[attempt.index] = chosen
                decision = Assign(attempt=attempt, worker_ids=chosen)
            heapq.heappop(heap)
            return decision
        return None

    def free(self, attempt: Attempt) -> None:
        """Mark the workers of this attempt as idle; does nothing if it was skipped."""
        self._running.pop(attempt.index, None)

    def note_oom(self, point: Point) -> None:
        """Make `next` skip larger batches of the series of this point, which was out of memory."""
        if point.batch_size is not None:
            series = series_key(point)
            smallest = self._smallest_oom.get(series, point.batch_size)
            self._smallest_oom[series] = min(smallest, point.batch_size)

    def stop(self, point_id: str) -> None:
        """Make `next` skip all attempts, because this point failed with `on_error: stop`."""
        self._stopped_by = self._stopped_by or point_id

    def _allocator(self, point: Point) -> DeviceAllocator:
        choice = point.devices, point.strategy
        if choice not in self._allocators:
            chosen = None
            if point.devices != ANY:
                # Devices are numbered by worker id, which stays when more workers join.
                chosen = choose_devices(point.devices, [device.name for device in self._devices])
            self._allocators[choice] = DeviceAllocator(
                self._devices, self._lost, point.strategy, self._isolation, chosen
            )
        return self._allocators[choice]

    def _skip_of(self, attempt: Attempt) -> Skip | None:
        """Return a Skip if the attempt can never run; None if it can run now or later."""
        point = attempt.point
        if self._stopped_by is not None:
            reason = f"on_error: stop, after point {self._stopped_by} failed"
            return Skip(attempt=attempt, cause=Cause.STOPPED, reason=reason)
        if point.world_size > self._allocator(point).alive + self.pending:
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
        """Return a Skip whose reason says why the cluster has too few devices for the attempt."""
        needed, choice = attempt.point.world_size, attempt.point.devices
        usable = self._allocator(attempt.point).alive
        cause = Cause.TOO_FEW_DEVICES
        living = [device for worker, device in enumerate(self._devices) if worker not in self._lost]
        if choice != ANY and needed <= len(living):
            models = Counter(device.name for device in living)
            listed = ", ".join(f"{count} x {model}" for model, count in models.items())
            why = f"{usable} {'is' if usable == 1 else 'are'} {choice}; the cluster has {listed}"
        elif self._lost and needed <= len(self._devices):
            hosts = Counter(device.host for device in self._devices)
            lost = Counter(self._devices[worker_id].host for worker_id in sorted(self._lost))
            # A host that has lost all its workers counts as a lost node.
            is_node = all(hosts[host] == number for host, number in lost.items())
            cause = Cause.NODE_LOST if is_node else Cause.WORKER_LOST
            subject = "node" if is_node else f"{lost.total()} of the workers on"
            why = f"{usable} left; lost: {subject} {', '.join(lost)}"
        else:
            verb = "has" if usable == 1 else "have"
            why = f"{usable} {verb} a worker: the others did not come"
            if needed > self._capacity:
                on_cpus = any(device.kind == "cpu" for device in self._devices)
                hint = "; a private Ray has a CPU worker for each core (placement.oversubscribe)"
                why = f"the cluster has {self._capacity}{hint if on_cpus else ''}"
        return Skip(attempt=attempt, cause=cause, reason=f"needs {needed} devices, {why}")
