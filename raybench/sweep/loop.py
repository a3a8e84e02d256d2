"""The loop of a sweep: each trial of the plan becomes a record, whatever happens to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from raybench.cluster import Cluster
from raybench.cluster.allocator import Isolation, Strategy
from raybench.errors import ClusterError
from raybench.job.model import Measure
from raybench.job.point import Point, Precision
from raybench.records import Cause, Device, Record, Status, Task, TrialKey, by_point
from raybench.records.environment import Code
from raybench.sweep.inflight import InFlight, make_unmeasured
from raybench.sweep.rounds import Rounds
from raybench.sweep.scheduler import Attempt, Schedule, Skip, is_tried_again

# How long to wait for workers that are coming before the loop looks at the cluster again.
_LOOK_AROUND_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """How every point of the run is placed and measured.

    profiled: ids of points that are profiled too. code: source files that every worker must have.
    precisions: as of a `Task`. measure_of: returns a point's own settings for all rounds, or None
    where it has `measure`.
    """

    measure: Measure
    strategy: Strategy
    stop_on_error: bool
    isolation: Isolation = "cluster"
    profiled: frozenset[str] = frozenset()
    code: Code | None = None
    precisions: tuple[Precision, ...] | None = ()
    measure_of: Callable[[Point], Measure | None] | None = None

    def measure_attempt(self, attempt: Attempt) -> Measure:
        """Return how an attempt is measured: later rounds and controls do less."""
        if self.measure_of and (own := self.measure_of(attempt.point)):
            return own
        is_first = attempt.round == 1 and not attempt.control_of
        return self.measure if is_first else self.measure.of_a_later_round


@dataclass(frozen=True, slots=True, kw_only=True)
class PointStarted:
    """The point is about to be sent to the workers of `devices`."""

    index: int
    point: Point
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFinished:
    """The last record of the trial is written."""

    index: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PointRetried:
    """The record of an attempt that was lost is written; the trial is tried again."""

    index: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PointAdded:
    """A point that was not in the plan was added, and waits for its turn."""

    index: int
    point: Point
    round: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStarted:
    """A round begins, of several.

    trials: those of this round that the sweep will run. later: how many it will run in later
    rounds, as far as that is known.
    """

    round: int
    rounds: int
    trials: tuple[TrialKey, ...]
    later: int


Event = PointStarted | PointFinished | PointRetried | PointAdded | RoundStarted


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierSweeps:
    """What earlier sweeps of a run have done, and what is left for this one.

    kept: how the trials ended that are not run again. attempts: point_id -> attempts so far.
    chosen: ids of the points that this sweep may run; None for all.
    """

    kept: Mapping[TrialKey, Status] = field(default_factory=dict)
    attempts: Mapping[str, int] = field(default_factory=dict)
    chosen: Collection[str] | None = None

    def left(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Return the attempts that are to be run.

        Controls of blocks that are finished are dropped: repeating the baseline alone compares
        nothing.
        """
        left = [
            attempt
            for attempt in attempts
            if attempt.key not in self.kept
            and (self.chosen is None or attempt.point.point_id in self.chosen)
        ]
        blocks = {attempt.block for attempt in left if not attempt.control_of}
        return [attempt for attempt in left if attempt.block in blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCallbacks:
    """Hooks that decide whether to stop and which points to add.

    stopping: once it returns True no point starts any more, and the loop ends when those in flight
    have ended. follow_ups: returns further points to run in the first round, from the last record
    of each point. further_round: returns the points of one more round, when all rounds are over; it
    gets the number of that round, and is called again until it returns none.
    """

    stopping: Callable[[], bool] = lambda: False
    follow_ups: Callable[[Record], Sequence[Point]] = lambda _: ()
    further_round: Callable[[int], Sequence[Point]] = lambda _: ()


def sweep(
    rounds: Rounds,
    settings: SweepSettings,
    cluster: Cluster,
    write: Callable[[Sequence[tuple[int, Record]]], None],
    earlier: EarlierSweeps | None = None,
    callbacks: LoopCallbacks | None = None,
) -> Generator[Event]:
    """Run the trials on the cluster, and yield an event for each step.

    write: gets the records that end at the same time, each with its index, before their events.
    With one round the index is the point's position in the plan, in whatever order the points
    run; added points have the indices after those. earlier: without it all trials are run.

    An interrupt, or closing the generator, writes the points in flight as cancelled, a
    ClusterError as lost; both are raised again. Events and writes come on the caller's thread;
    each point runs on a thread of its own, so that an interrupt does not wait for a stuck cluster.
    """
    earlier, callbacks = earlier or EarlierSweeps(), callbacks or LoopCallbacks()
    loop = _Loop(rounds, settings, cluster, write, earlier, callbacks)
    try:
        yield from loop.events()
    except (KeyboardInterrupt, GeneratorExit):
        loop.write_in_flight(Cause.INTERRUPTED, "by the user")
        raise
    except ClusterError as error:
        loop.write_in_flight(Cause.CLUSTER_LOST, str(error))
        raise


class _Loop:
    """The state of one sweep."""

    def __init__(
        self,
        rounds: Rounds,
        settings: SweepSettings,
        cluster: Cluster,
        write: Callable[[Sequence[tuple[int, Record]]], None],
        earlier: EarlierSweeps,
        callbacks: LoopCallbacks,
    ) -> None:
        self._rounds, self._settings, self._cluster = rounds, settings, cluster
        self._write, self._earlier, self._callbacks = write, earlier, callbacks
        self._round = 0
        self._statuses = dict(earlier.kept)
        self._attempts = Counter(earlier.attempts)
        self._has_used_workers = False
        kept = by_point(earlier.kept)
        self._schedule = Schedule((), settings.isolation)
        for point in rounds.plan.points:
            if kept.get(point.point_id) is Status.OOM:
                self._schedule.note_oom(point)
        self._running = InFlight(cluster)
        self._next_index = len(rounds.plan.points)
        self._has_ended = False

    def events(self) -> Iterator[Event]:
        stopping = self._callbacks.stopping
        # At the end the cluster is not asked any more: it may be gone when all is measured.
        while not (self._running.is_empty and (stopping() or self._has_ended)):
            if self._running.is_empty and self._schedule.is_done:
                yield from self._next_round()
                continue
            self._refresh(0.0)
            yield from self._decide()
            if not self._running.is_empty:
                wait_s = _LOOK_AROUND_S if self._schedule.pending else None
                yield from self._end(self._running.next_finished(wait_s))
            elif not (stopping() or self._schedule.is_done):
                assert self._schedule.pending, "on an idle cluster points only wait for workers"
                self._refresh(_LOOK_AROUND_S)

    def write_in_flight(self, cause: Cause, reason: str) -> None:
        """Write a record of each point in flight, which ended for this cause."""
        batch = []
        for one in self._running.now:
            record = make_unmeasured(
                one.attempt, cause, reason, started_at=one.started_at, neighbours=one.neighbours
            )
            batch.append((one.attempt.index, record))
        if batch:
            self._write(batch)

    def _next_round(self) -> Iterator[Event]:
        """Begin the next round, in fresh workers where the rounds ask for them."""
        self._round += 1
        if self._round > self._rounds.count:
            yield from self._further_round()
            return
        attempts = self._trials_left(self._round)
        if self._rounds.count > 1:
            yield RoundStarted(
                round=self._round,
                rounds=self._rounds.count,
                trials=tuple(attempt.key for attempt in attempts),
                later=sum(
                    len(self._trials_left(later))
                    for later in range(self._round + 1, self._rounds.count + 1)
                ),
            )
        if attempts and self._has_used_workers and self._rounds.in_fresh_workers:
            self._cluster.restart()
            self._has_used_workers = False
        for attempt in attempts:
            self._schedule.add(attempt)

    def _further_round(self) -> Iterator[Event]:
        """Begin a round that was not in the plan, or end the sweep."""
        stopped = self._schedule.is_stopped
        points = () if stopped else self._callbacks.further_round(self._round)
        if not points:
            self._has_ended = True
            return
        self._next_index = max(self._next_index, self._rounds.first_free_index)
        yield RoundStarted(round=self._round, rounds=self._round, trials=(), later=0)
        yield from self._add(points, self._round)

    def _trials_left(self, number: int) -> list[Attempt]:
        if self._schedule.is_stopped:
            return []
        return self._earlier.left(self._rounds.attempts(number, self._statuses))

    def _refresh(self, timeout_s: float) -> None:
        cluster = self._cluster
        cluster.refresh(timeout_s)
        self._schedule.see(cluster.devices, cluster.capacity, cluster.lost, cluster.pending)

    def _decide(self) -> Iterator[Event]:
        """Start what can begin now, and write what is skipped."""
        while not self._callbacks.stopping() and (decision := self._schedule.next()) is not None:
            point_id = decision.attempt.point.point_id
            self._attempts[point_id] += 1  # over all rounds
            attempt = replace(decision.attempt, number=self._attempts[point_id])
            if isinstance(decision, Skip):
                now = datetime.now(UTC)
                skipped = make_unmeasured(attempt, decision.cause, decision.reason, started_at=now)
                yield from self._end([(attempt, skipped)])
            else:
                yield from self._start(attempt, decision.worker_ids)

    def _start(self, attempt: Attempt, worker_ids: Sequence[int]) -> Iterator[Event]:
        settings = self._settings
        devices = tuple(self._cluster.devices[worker_id] for worker_id in worker_ids)
        yield PointStarted(index=attempt.index, point=attempt.point, devices=devices)
        task = Task(
            point=attempt.point,
            settings=settings.measure_attempt(attempt),
            profile=attempt.point.point_id in settings.profiled,
            code=settings.code,
            precisions=settings.precisions,
        )
        self._has_used_workers = True
        self._running.submit(attempt, task, worker_ids, devices)

    def _end(self, ended: Sequence[tuple[Attempt, Record]]) -> Iterator[Event]:
        for attempt, _ in ended:
            self._schedule.free(attempt)
        if ended:
            self._write([(attempt.index, record) for attempt, record in ended])
        for attempt, record in ended:
            yield from self._after_record(attempt, record)

    def _after_record(self, attempt: Attempt, record: Record) -> Iterator[Event]:
        """Try the trial again, or note how it ended and add the points that follow from it."""
        stopping = self._callbacks.stopping
        if is_tried_again(record, attempt.tries) and not stopping():
            self._schedule.add(replace(attempt, tries=attempt.tries + 1))
            yield PointRetried(index=attempt.index, record=record)
            return
        self._statuses[attempt.key] = record.status
        if record.status is Status.OOM:
            self._schedule.note_oom(attempt.point)
        # A batch that does not fit is what a search looks for.
        is_searched = self._rounds.plan.batch_search and record.status is Status.OOM
        if self._settings.stop_on_error and record.status.is_failure and not is_searched:
            self._schedule.stop(attempt.point.point_id)
        yield PointFinished(index=attempt.index, record=record)
        if not stopping() and attempt.round == 1 and not attempt.control_of:
            yield from self._add(self._callbacks.follow_ups(record), attempt.round)

    def _add(self, points: Sequence[Point], number: int) -> Iterator[Event]:
        for point in points:
            attempt = Attempt(index=self._next_index, point=point, number=1, round=number)
            self._next_index += 1
            self._schedule.add(attempt)
            yield PointAdded(index=attempt.index, point=point, round=number)
