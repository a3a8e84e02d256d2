"""The trials of a run round by round, which of them runs next, and on which workers.

Decisions over the plan: no clock, no cluster.

Rounds are the whole plan several times, usually each time in fresh workers. An interval from the
samples of one start says nothing of other starts, so a point is started several times (A. Georges,
D. Buytaert, L. Eeckhout, "Statistically rigorous Java performance evaluation", OOPSLA 2007;
T. Kalibera, R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013). In a round the points
of one world_size follow each other, so that their process group is kept. Within such a block their
order is shuffled, and the blocks run forward in one round and backward in the next, so that a
linear drift of the machine cancels over two rounds. At the end of each block one baseline point is
measured again as a control: it shows a drift within the round.

`batch_size: auto` is a search in the first round, by itself for each series of the plan. The batch
is doubled until memory runs out or `max` is reached, then bisected between the largest that fits
and the smallest that does not, until they are within 1 % or one item. Where the first batch does
not fit, it is bisected down to 1. A failure that says nothing of memory, as a timeout, ends a
search. All that it knows follows from the statuses of its points, so it goes on when a run does.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from raybench.cluster.allocator import DeviceAllocator
from raybench.errors import UsageError
from raybench.job.model import BatchSearch
from raybench.job.plan import Plan, varying_settings
from raybench.job.point import ANY, Isolation, Point, Precision, Strategy, choose_devices
from raybench.job.rounds import is_largest_known
from raybench.records.device import Device
from raybench.records.record import Record, TrialKey
from raybench.records.status import Cause, Status

# The range of the setting batch_size.
_MOST_BATCH = 2**31 - 1
_INT64_MAX = 2**63 - 1  # what the result tables can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a trial.

    index: the place among all trials of the run; with one round, the point's position in the plan.
    A point that a search adds, or a control after one, may have that of a trial of a later round.
    number: counts the attempts at the point over all rounds, from 1; it is 1 before the start.
    tries: counts those of this sweep at the trial, from 1. round, control_of: as of a `TrialKey`.
    """

    index: int
    point: Point
    number: int
    tries: int = 1
    round: int = 1
    control_of: int = 0

    @property
    def key(self) -> TrialKey:
        """The key of the trial of which this is an attempt."""
        return TrialKey(self.point.point_id, self.round, self.control_of)

    @property
    def block(self) -> int:
        """The world_size of the points of its block, also for the control that ends the block."""
        return self.control_of or self.point.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Run the point on the workers with these ids, in rank order."""

    attempt: Attempt
    worker_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Do not run the point; the reason goes into its row."""

    attempt: Attempt
    cause: Cause
    reason: str


Decision = Assign | Skip
# The smallest runs first: round, minus the devices, block by first appearance, position.
_Rank = tuple[int, int, int, int]
_Series = tuple[object, ...]


def workers_needed(plan: Plan, capacity: int, isolation: Isolation = "cluster") -> int:
    """Return how many workers the plan can keep busy at once, `capacity` at most.

    0 if no point fits. capacity: number of devices of the cluster; it is returned if the choice
    depends on the devices themselves, which are not known yet.
    """
    fitting = [point.world_size for point in plan.points if point.world_size <= capacity]
    if not fitting:
        return 0
    strategies = {point.strategy for point in plan.points}
    # The models of the devices, and which of them a node has, are known when workers are there.
    names_devices = any(point.devices != ANY for point in plan.points)
    if isolation == "node" or names_devices or len(strategies) > 1 or "rail" in strategies:
        return capacity
    return max(fitting) if isolation == "cluster" else min(capacity, sum(fitting))


class Schedule:
    """The attempts that wait for their turn, and which of them can begin on the idle workers.

    isolation `cluster`: points of one world_size follow each other and keep their process group;
    `node` and `device`: points of many devices first, so that small ones fill the gaps at the end.
    Otherwise attempts run round by round, in the order of `add`. One whose workers are busy or may
    still come is overtaken by later ones, not by its control. pending: of a `Cluster`.
    """

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self._stopped_by: str | None = None
        self._smallest_oom: dict[_Series, int] = {}
        # Heaps, by number, placement and devices of the workers that they wait for, and control_of.
        self._waiting: dict[tuple[int, Strategy, str, int], list[tuple[_Rank, Attempt]]] = {}
        self._ranks: dict[tuple[int, int], _Rank] = {}
        self._blocks: dict[tuple[int, int], int] = {}
        self._devices: Sequence[Device] = ()
        self._all_cuda = True
        self._capacity = 0
        self._lost: frozenset[int] = frozenset()
        self.pending = 0
        # By the devices that points ask for, and the strategy.
        self._allocators: dict[tuple[str, Strategy], DeviceAllocator] = {}
        self._running: dict[int, tuple[int, ...]] = {}

    @property
    def is_done(self) -> bool:
        """Whether no attempt waits; others may still run."""
        return not any(self._waiting.values())

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called: `next` then skips whatever waits or is added."""
        return self._stopped_by is not None

    def update_cluster(
        self, devices: Sequence[Device], capacity: int, lost: frozenset[int], pending: int
    ) -> None:
        """Set the state of the cluster, by which `next` decides; call it before the first `next`.

        devices: of every worker. capacity: most devices of a point. lost: ids of unusable workers.
        pending: number of workers still waited for. All as in `Cluster`.
        """
        self._capacity, self.pending = capacity, pending
        # The tuples are new at each look, but hold the same items: they are compared by their ids.
        if devices == self._devices and lost == self._lost:
            return
        self._devices, self._lost = devices, lost
        self._all_cuda = all(device.kind == "cuda" for device in devices)
        self._allocators = {}

    def add(self, attempt: Attempt) -> None:
        """Add an attempt, at the end of its block in its round.

        One with the round and index of an earlier one is a new try, and gets that one's place.
        """
        trial = attempt.round, attempt.index
        if trial not in self._ranks:
            most = 0 if self._isolation == "cluster" else -attempt.point.world_size
            block = self._blocks.setdefault((attempt.round, attempt.block), len(self._blocks))
            self._ranks[trial] = (attempt.round, most, block, len(self._ranks))
        point = attempt.point
        asked = point.world_size, point.strategy, point.devices, attempt.control_of
        heapq.heappush(self._waiting.setdefault(asked, []), (self._ranks[trial], attempt))

    def next(self) -> Decision | None:
        """Take the next attempt off the queue, and return what to do with it.

        The workers of an `Assign` count as busy until `free`. None if no attempt waits, or none can
        begin before a point that runs has ended or a worker has come.
        """
        if self._isolation == "cluster" and self._running:
            return None
        passed = set()
        for waiting in sorted(filter(None, self._waiting.values())):
            attempt = waiting[0][1]
            if attempt.control_of and (attempt.round, attempt.block) in passed:
                continue  # a control ends its block
            decision: Decision | None = self._why_not(attempt)
            if decision is None:
                taken = set(chain.from_iterable(self._running.values()))
                chosen = self._allocator(attempt.point).choose(attempt.point.world_size, taken)
                if chosen is None:
                    passed.add((attempt.round, attempt.block))
                    continue
                self._running[attempt.index] = chosen
                decision = Assign(attempt=attempt, worker_ids=chosen)
            heapq.heappop(waiting)
            return decision
        return None

    def free(self, attempt: Attempt) -> None:
        """Note that this attempt's workers are idle again; does nothing if it was skipped."""
        self._running.pop(attempt.index, None)

    def note_oom(self, point: Point) -> None:
        """Make `next` skip points that differ from this one only in a larger batch: it was oom."""
        if point.batch_size is not None:
            series = _series(point)
            smallest = self._smallest_oom.get(series, point.batch_size)
            self._smallest_oom[series] = min(smallest, point.batch_size)

    def stop(self, point_id: str) -> None:
        """Make `next` skip all that waits or is added: this point failed, with `on_error: stop`."""
        self._stopped_by = self._stopped_by or point_id

    def _allocator(self, point: Point) -> DeviceAllocator:
        """Return the allocator of the devices that the point may use."""
        asked = point.devices, point.strategy
        if asked not in self._allocators:
            chosen = None
            if point.devices != ANY:
                # A device's number is its worker id, which does not change when others come later.
                chosen = choose_devices(point.devices, [device.name for device in self._devices])
            self._allocators[asked] = DeviceAllocator(
                self._devices, self._lost, point.strategy, self._isolation, chosen
            )
        return self._allocators[asked]

    def _why_not(self, attempt: Attempt) -> Skip | None:
        """Return the reason why the point cannot be run, now or later; None where it can."""
        point = attempt.point
        if self._stopped_by is not None:
            reason = f"on_error: stop, after point {self._stopped_by} failed"
            return Skip(attempt=attempt, cause=Cause.STOPPED, reason=reason)
        if point.world_size > self._allocator(point).alive + self.pending:
            return self._too_few_devices(attempt)
        if point.cuda_graph and not self._all_cuda:
            reason = "cuda_graph: true needs CUDA devices"
            return Skip(attempt=attempt, cause=Cause.NEEDS_CUDA, reason=reason)
        smallest = self._smallest_oom.get(_series(point))
        if smallest is not None and point.batch_size is not None and smallest < point.batch_size:
            reason = f"oom at batch_size {smallest}"
            return Skip(attempt=attempt, cause=Cause.OUT_OF_MEMORY_BEFORE, reason=reason)
        return None

    def _too_few_devices(self, attempt: Attempt) -> Skip:
        """Return why an attempt has too few devices: lost nodes or workers where those sufficed."""
        asked, choice = attempt.point.world_size, attempt.point.devices
        left = self._allocator(attempt.point).alive
        cause = Cause.TOO_FEW_DEVICES
        living = [device for worker, device in enumerate(self._devices) if worker not in self._lost]
        if choice != ANY and asked <= len(living):
            models = Counter(device.name for device in living)
            each = ", ".join(f"{count} x {model}" for model, count in models.items())
            why = f"{left} {'is' if left == 1 else 'are'} {choice}; the cluster has {each}"
        elif self._lost and asked <= len(self._devices):
            hosts = Counter(device.host for device in self._devices)
            lost = Counter(self._devices[worker_id].host for worker_id in sorted(self._lost))
            is_node = all(hosts[host] == number for host, number in lost.items())
            cause = Cause.NODE_LOST if is_node else Cause.WORKER_LOST
            gone = f"{'node' if is_node else f'{lost.total()} of the workers on'} {', '.join(lost)}"
            why = f"{left} left; lost: {gone}"
        else:
            why = f"{left} {'has' if left == 1 else 'have'} a worker: the others did not come"
            if asked > self._capacity:
                on_cpus = any(device.kind == "cpu" for device in self._devices)
                hint = "; a private Ray has a CPU worker for each core (placement.oversubscribe)"
                why = f"the cluster has {self._capacity}{hint if on_cpus else ''}"
        return Skip(attempt=attempt, cause=cause, reason=f"needs {asked} devices, {why}")


def smaller_batches_first(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts with those of each series sorted by batch size among their places.

    A series is the points that differ in their batch size only. A batch that runs out of memory
    then spares the larger ones.
    """
    by_batch: defaultdict[_Series, deque[Attempt]] = defaultdict(deque)
    for attempt in sorted(attempts, key=lambda one: one.point.batch_size or 0):
        by_batch[_series(attempt.point)].append(attempt)
    return [by_batch[_series(attempt.point)].popleft() for attempt in attempts]


def _series(point: Point) -> _Series:
    """Return a key that is equal for points which differ in their batch size only."""
    others = *sorted(point.params.items()), *sorted(point.env.items())
    return (point.workload, others, point.world_size, *point.execution.values(), point.scaling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The trials of a run, round by round.

    seed: of the order of the points in each block; None keeps the order of the plan. has_controls:
    whether a control ends each block; it says something only where one point runs at a time.
    in_fresh_workers: whether each round but the first replaces the processes that ran a point.
    """

    plan: Plan
    count: int = 1
    seed: int | None = 0
    has_controls: bool = True
    in_fresh_workers: bool = True

    @property
    def first_free_index(self) -> int:
        """An index above those of all trials of all rounds; not for a plan with a batch search."""
        return self.count * (len(self.plan.points) + len(_blocks(self.plan.points)))

    def attempts(self, number: int, ended: Mapping[TrialKey, Status]) -> tuple[Attempt, ...]:
        """Return the attempts of a round, in the order in which a `Schedule` is to get them.

        number: of the round, from 1. ended: how trials ended so far; those of this round stay in.
        A point that failed (but was not lost) or was skipped in an earlier round is left out. With
        a batch search the first round has the plan's points, to which it adds, the others have the
        largest batch of each series that was ok. With one round the order is that of the plan,
        smaller batches of a series first. With more, points are in blocks of one world size; with a
        seed each block is shuffled, and even rounds have the blocks backward. A control, the
        baseline point once more, ends each block; not in a round that searches, or without it.
        """
        points: Sequence[Point] = self.plan.points
        if self.plan.batch_search is not None and number > 1:
            in_first = {key.point_id: one for key, one in ended.items() if key.round == 1}
            points = _largest_found(self.plan, in_first)
        stopped = {
            key.point_id
            for key, status in ended.items()
            if key.round < number and not key.control_of and status.is_lasting
        }
        points = [point for point in points if point.point_id not in stopped]
        of_plan = {point.point_id: index for index, point in enumerate(self.plan.points)}
        first = (number - 1) * (len(of_plan) + len(_blocks(self.plan.points)))
        found = (point.point_id for point in points if point.point_id not in of_plan)
        indices = of_plan | {one: index for index, one in enumerate(found, len(of_plan))}
        attempts = [
            Attempt(index=first + indices[point.point_id], point=point, number=1, round=number)
            for point in points
        ]
        if self.count == 1:
            return tuple(smaller_batches_first(attempts))
        blocks: dict[int, list[Attempt]] = {size: [] for size in _blocks(self.plan.points)}
        for attempt in attempts:
            blocks.setdefault(attempt.point.world_size, []).append(attempt)
        in_order = [block for block in blocks.values() if block]
        if self.seed is not None:
            draw = random.Random(f"{self.seed}/{number}")
            for block in blocks.values():
                draw.shuffle(block)
            in_order = in_order if number % 2 else in_order[::-1]
        # The largest batch in a precision other than fp16: its step waits least for the host, so it
        # scatters least.
        baseline = self.plan.baseline.items()
        there = [point for point in points if baseline and baseline <= point.settings.items()]
        is_search = self.plan.batch_search is not None and number == 1
        if not there or is_search or not self.has_controls:
            return tuple(chain.from_iterable(in_order))
        control = max(there, key=lambda p: (p.precision is not Precision.FP16, p.batch_size or 0))
        ordered = []
        for place, block in enumerate(in_order, first + len(indices)):
            of = block[0].point.world_size
            last = Attempt(index=place, point=control, number=1, round=number, control_of=of)
            ordered += [*block, last]
        return tuple(ordered)


def _blocks(points: Sequence[Point]) -> list[int]:
    return list(dict.fromkeys(point.world_size for point in points))


# The batch size to try next; why a search ended without a batch; None where it has found it.
Step = int | str | None


def next_batch(start: int, most: int, outcomes: Mapping[int, Status]) -> Step:
    """Return the batch size to try next; None if the largest that fits `is_largest_known`.

    A text if the search ended without it: the reason. start: the batch size to begin with, at most
    `most`, the largest to try. outcomes: batch size -> how its point ended, of this series alone.
    """
    ran_out = min((b for b, status in outcomes.items() if status is Status.OOM), default=None)
    below = {b: status for b, status in outcomes.items() if ran_out is None or b < ran_out}
    for batch, status in sorted(below.items()):
        if status is not Status.OK:
            return f"batch_size {batch:,} ended {status.value}"
    fits = max(below, default=0)
    if ran_out is None:
        if fits >= most:
            return f"batch_size {fits:,} fits, and no larger one may be tried"
        return min(2 * fits, most) if fits else start
    if not is_largest_known(fits, ran_out):
        return (fits + ran_out) // 2
    return None if fits else "not even batch_size 1 fits"


def check_bounded(plan: Plan, kind: Literal["cuda", "cpu"]) -> None:
    """Raise UsageError for a search without a maximum on CPU workers: it would fill the host."""
    search = plan.batch_search
    if search is None or search.max is not None or kind == "cuda":
        return
    raise UsageError(
        "matrix.batch_size: auto on CPU workers would fill the host's memory; give a maximum, "
        f"as in --set 'matrix.batch_size={{start: {search.start}, max: {16 * search.start}}}'"
    )


def with_probes(plan: Plan, statuses: Mapping[str, Status]) -> Plan:
    """Return the plan of a job with the points that the searches of its run added, at the end.

    The batch that a search wants next is added too. plan: without such points. statuses: point_id
    -> how its latest attempt in the first round ended, in the order of the rows, which the added
    points get. Without a search the plan is unchanged.
    """
    search = plan.batch_search
    if search is None:
        return plan
    order = {point_id: place for place, point_id in enumerate(statuses)}
    probes = [point for first in plan.points for point in _follow(search, first, statuses)[0]]
    probes.sort(key=lambda probe: order.get(probe.point_id, len(order)))
    return replace(plan, points=(*plan.points, *probes))


def _largest_found(plan: Plan, outcomes: Mapping[str, Status]) -> list[Point]:
    """Return for each series the point with the largest batch that was ok so far.

    A series without one is left out. plan: must have a search; the points that it added may be
    missing. outcomes: point_id -> status in round 1.
    """
    search = plan.batch_search
    assert search is not None, "only a search finds batches"
    largest = []
    for first in _first_points(search, plan.points):
        points = [first, *_follow(search, first, outcomes)[0]]
        fitting = [point for point in points if outcomes.get(point.point_id) is Status.OK]
        largest += [max(fitting, key=lambda point: point.batch_size or 0)] if fitting else []
    return largest


class BatchSearches:
    """The searches of all series, in the first round; without one in the plan nothing follows.

    plan: of `with_probes`. statuses: by point_id, in round 1, of points that are not tried again.
    """

    def __init__(self, plan: Plan, statuses: Mapping[str, Status]) -> None:
        self._plan = plan
        self._statuses = dict(statuses)
        self._asked = {point.point_id for point in plan.points}

    def follow_ups(self, record: Record) -> tuple[Point, ...]:
        """Note how a point ended; return the next point of its series, or ().

        () if the search is over, or its next point was returned before or is one of the plan.
        record: the last one of a trial of round 1, no control.
        """
        search = self._plan.batch_search
        if search is None:
            return ()
        self._statuses[record.point.point_id] = record.status
        added, _ = _follow(search, _with_batch(record.point, search.start), self._statuses)
        new = tuple(point for point in added if point.point_id not in self._asked)
        self._asked.update(point.point_id for point in new)
        return new

    def endings(self) -> Iterator[str]:
        """Yield the reason, in a line, of each search that ended without the largest that fits."""
        search = self._plan.batch_search
        if search is None:
            return
        varying = [name for name in varying_settings(self._plan.points) if name != "batch_size"]
        for first in _first_points(search, self._plan.points):
            _, step = _follow(search, first, self._statuses)
            if isinstance(step, str):
                told = "".join(f" {name}={first.settings.get(name)}" for name in varying)
                yield f"batch_size: auto{told}: {step}"


def _first_points(search: BatchSearch, points: Sequence[Point]) -> list[Point]:
    """Return the point of each series with which its search begins."""
    firsts = (_with_batch(point, search.start) for point in points)
    return list({first.point_id: first for first in firsts}.values())


def _follow(
    search: BatchSearch, first: Point, statuses: Mapping[str, Status]
) -> tuple[list[Point], Step]:
    """Return the points that a search has added to its first one, and its next step.

    The point of that step is among them. statuses: by point_id, of points that have ended.
    """
    # The range of the setting, and what the tables can hold.
    most = min(search.max or _MOST_BATCH, _INT64_MAX // _share(first))
    outcomes: dict[int, Status] = {}
    # The status of a point may have changed when it was tried again. Its search went on because
    # the point was ok or ran out of memory.
    taken: dict[int, Status] = {}
    step: Step = search.start
    while isinstance(step, int) and (status := statuses.get(_with_batch(first, step).point_id)):
        outcomes[step] = status
        taken[step] = Status.OK if status is Status.OK else Status.OOM
        step = next_batch(search.start, most, taken)
    wanted = next_batch(search.start, most, outcomes)
    batches = dict.fromkeys([*outcomes, *([wanted] if isinstance(wanted, int) else [])])
    return [_with_batch(first, batch) for batch in batches if batch != search.start], wanted


def _share(point: Point) -> int:
    """Return the batches of all ranks in an optimizer step: global_batch_size / batch_size."""
    assert point.global_batch_size is not None
    assert point.batch_size is not None
    return point.global_batch_size // point.batch_size


def _with_batch(first: Point, batch_size: int) -> Point:
    return replace(first, batch_size=batch_size, global_batch_size=batch_size * _share(first))
