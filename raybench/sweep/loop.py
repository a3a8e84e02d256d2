"""The loop of a run: each point of the plan becomes one record, whatever happens to it."""

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
from raybench.records import Cause, Device, Record, Status, Task, TrialKey
from raybench.records.environment import Code
from raybench.sweep.inflight import InFlight, SustainedRates, make_unmeasured
from raybench.sweep.rounds import Rounds
from raybench.sweep.scheduler import Assign, Attempt, Schedule, Skip, is_tried_again

# How long workers that are coming are waited for before the loop looks around again.
_LOOK_AROUND_S = 1.0


def _as_usual(_: Point) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """How every point of the run is placed and measured.

    profiled: point_ids of those that are profiled too. code: what every worker must have loaded.
    precisions: those that workers live to see, None where nothing is to be found out of them, see
    Task. measure_of: a point's own settings in every round, None where it has those of all.
    releases_idle_nodes: whether nodes that no point needs any more are let go before the end.
    """

    measure: Measure
    strategy: Strategy
    stop_on_error: bool
    isolation: Isolation = "cluster"
    profiled: frozenset[str] = frozenset()
    code: Code | None = None
    precisions: tuple[Precision, ...] | None = ()
    measure_of: Callable[[Point], Measure | None] = _as_usual
    releases_idle_nodes: bool = False

    def measure_attempt(self, attempt: Attempt) -> Measure:
        """Return how an attempt is measured."""
        if own := self.measure_of(attempt.point):
            return own
        is_first = attempt.round == 1 and not attempt.control_of
        return self.measure if is_first else self.measure.of_a_later_round


@dataclass(frozen=True, slots=True, kw_only=True)
class PointStarted:
    """The point is on its way to the workers of `devices`."""

    index: int
    point: Point
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFinished:
    """The point has its record, and the record is written."""

    index: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PointRetried:
    """The point has a record of an attempt that was lost, which is written; it is tried again."""

    index: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PointAdded:
    """The point was not in the plan: a record asked for it. It waits for its turn."""

    index: int
    point: Point
    round: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStarted:
    """A round of several begins, in fresh workers where the rounds are so.

    trials: of this round, that the sweep is to run. later: how many it is to run in later rounds,
    as far as that is known.
    """

    round: int
    rounds: int
    trials: tuple[TrialKey, ...]
    later: int


Event = PointStarted | PointFinished | PointRetried | PointAdded | RoundStarted


def _never() -> bool:
    return False


def _nothing(_: object) -> Sequence[Point]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What an earlier sweep of the run has done, and what this one is to do.

    kept: how trials ended that are not run again. made: point_id -> attempts so far.
    chosen: point_ids; None for all.
    """

    kept: Mapping[TrialKey, Status] = field(default_factory=dict)
    made: Mapping[str, int] = field(default_factory=dict)
    chosen: Collection[str] | None = None

    def left(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Those that are to be run. A control says nothing of a block that ended before."""
        left = [attempt for attempt in attempts if self._is_left(attempt)]
        blocks = {attempt.block for attempt in left if not attempt.control_of}
        return [attempt for attempt in left if attempt.block in blocks]

    def _is_left(self, attempt: Attempt) -> bool:
        is_chosen = self.chosen is None or attempt.point.point_id in self.chosen
        return is_chosen and attempt.key not in self.kept


def sweep(
    rounds: Rounds,
    settings: SweepSettings,
    cluster: Cluster,
    write: Callable[[Sequence[tuple[int, Record]]], None],
    before: Before | None = None,
    *,
    stopping: Callable[[], bool] = _never,
    ran_out: Sequence[Point] = (),
    follow: Callable[[Record], Sequence[Point]] = _nothing,
    further: Callable[[int], Sequence[Point]] = _nothing,
) -> Generator[Event]:
    """Run the trials, and tell of each by events.

    write: gets each record before the event that tells of it, with its index, and with those that
    end at the same time.
    before: without it all trials are run. In one round an index is always the point's position in
    the whole plan, in whatever order they are run.
    stopping: once it is true no point starts any more, and the loop ends with those in flight.
    ran_out: points that ran out of device memory in an earlier sweep of this run.
    follow: the further points that the last record of a point asks for in the first round; their
    indices come after those of the plan.
    further: the points of one more round, of which it gets the number, when all rounds are over;
    it is asked again until there are none.

    An interrupt, or closing the generator, writes the points in flight as cancelled, a
    ClusterError as lost; both go on to the caller. Events and writes come on the caller's thread;
    each point runs on a thread of its own, so that an interrupt does not wait for a stuck cluster.
    """
    schedule = Schedule((), settings.isolation, ran_out)
    ask = _Asked(stopping=stopping, follow=follow, further=further)
    loop = _Loop(rounds, before or Before(), settings, cluster, write, ask, schedule)
    try:
        yield from loop.events()
    except (KeyboardInterrupt, GeneratorExit):
        loop.write_in_flight(Cause.INTERRUPTED, "by the user")
        raise
    except ClusterError as error:
        loop.write_in_flight(Cause.CLUSTER_LOST, str(error))
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Whom the loop asks what to do next, see `sweep`."""

    stopping: Callable[[], bool]
    follow: Callable[[Record], Sequence[Point]]
    further: Callable[[int], Sequence[Point]]


class _Loop:
    """The state of one sweep."""

    def __init__(
        self,
        rounds: Rounds,
        before: Before,
        settings: SweepSettings,
        cluster: Cluster,
        write: Callable[[Sequence[tuple[int, Record]]], None],
        ask: _Asked,
        schedule: Schedule,
    ) -> None:
        self._rounds = rounds
        self._before = before
        self._round = 0
        self._ended_so = dict(before.kept)
        self._attempts = Counter(before.made)
        self._has_used_workers = False
        self._settings = settings
        self._cluster = cluster
        self._write = write
        self._stopping = ask.stopping
        self._ask = ask
        self._schedule = schedule
        self._running = InFlight(cluster)
        self._sustained = SustainedRates()
        self._next_index = len(rounds.plan.points)
        self._has_ended = False
        self._is_search = rounds.plan.batch_search is not None

    def events(self) -> Iterator[Event]:
        # At the end nobody is asked any more: a cluster may be gone when all is measured.
        while not (self._running.is_empty and (self._stopping() or self._has_ended)):
            if self._running.is_empty and self._schedule.is_done:
                yield from self._next_round()
                continue
            self._give_back()
            self._look_around(0.0)
            yield from self._decide()
            if not self._running.is_empty:
                yield from self._wait_for_next()
            elif not (self._stopping() or self._schedule.is_done):
                assert self._schedule.pending, "what waits beside an idle cluster waits for workers"
                self._look_around(_LOOK_AROUND_S)

    def write_in_flight(self, cause: Cause, reason: str) -> None:
        batch = [
            (
                one.attempt.index,
                make_unmeasured(
                    one.attempt,
                    cause,
                    reason,
                    started_at=one.started_at,
                    neighbours=tuple(one.neighbours),
                ),
            )
            for one in self._running.now
        ]
        if batch:
            self._write(batch)

    def _next_round(self) -> Iterator[Event]:
        """Begin the next round, in workers that have run nothing yet where the rounds are so."""
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
        """Begin a round that was not foreseen, or end the sweep."""
        points = () if self._schedule.is_stopped else self._ask.further(self._round)
        if not points:
            self._has_ended = True
            return
        self._next_index = max(self._next_index, self._rounds.first_free_index)
        yield RoundStarted(round=self._round, rounds=self._round, trials=(), later=0)
        yield from self._add(points, self._round)

    def _trials_left(self, number: int) -> list[Attempt]:
        if self._schedule.is_stopped:
            return []
        return self._before.left(self._rounds.attempts(number, self._ended_so))

    def _give_back(self) -> None:
        """Let nodes go that nothing needs any more, where that is known: in the last round."""
        is_last = self._round == self._rounds.count and not self._is_search
        if not (self._settings.releases_idle_nodes and is_last and self._running.is_empty):
            return
        if wanted := self._schedule.most_wanted:
            self._cluster.release_idle_nodes(*wanted)

    def _look_around(self, timeout_s: float) -> None:
        cluster = self._cluster
        cluster.refresh(timeout_s)
        self._schedule.see(cluster.devices, cluster.capacity, cluster.lost, cluster.pending)

    def _decide(self) -> Iterator[Event]:
        """Start what can begin now, and write what is skipped."""
        while not self._stopping() and (decision := self._schedule.next()) is not None:
            decision = replace(decision, attempt=self._count(decision.attempt))
            if isinstance(decision, Skip):
                yield from self._end([(decision.attempt, _make_skipped(decision))])
            else:
                yield from self._start(decision)

    def _count(self, attempt: Attempt) -> Attempt:
        """With the number of its attempt: a point has one more in each round."""
        point_id = attempt.point.point_id
        self._attempts[point_id] += 1
        return replace(attempt, number=self._attempts[point_id])

    def _start(self, decision: Assign) -> Iterator[Event]:
        attempt, settings = decision.attempt, self._settings
        devices = tuple(self._cluster.devices[worker_id] for worker_id in decision.worker_ids)
        yield PointStarted(index=attempt.index, point=attempt.point, devices=devices)
        profile = attempt.point.point_id in settings.profiled
        is_known = self._sustained.are_known(devices, attempt.point.precision)
        task = Task(
            point=attempt.point,
            settings=settings.measure_attempt(attempt),
            profile=profile,
            code=settings.code,
            precisions=None if is_known else settings.precisions,
        )
        self._has_used_workers = True
        self._running.submit(attempt, task, decision.worker_ids, devices)

    def _wait_for_next(self) -> Iterator[Event]:
        """Wait for the next points in flight, or for workers that are coming."""
        wait_s = _LOOK_AROUND_S if self._schedule.pending else None
        next_finished = [
            (attempt, self._sustained.complete(record))
            for attempt, record in self._running.next_finished(wait_s)
        ]
        for attempt, _ in next_finished:
            self._schedule.free(attempt)
        yield from self._end(next_finished)

    def _end(self, ended: Sequence[tuple[Attempt, Record]]) -> Iterator[Event]:
        if ended:
            self._write([(attempt.index, record) for attempt, record in ended])
        for attempt, record in ended:
            yield from self._follow_up(attempt, record)

    def _follow_up(self, attempt: Attempt, record: Record) -> Iterator[Event]:
        """Do what follows from a record that is written."""
        if is_tried_again(record, attempt.tries) and not self._stopping():
            self._schedule.add(replace(attempt, tries=attempt.tries + 1))
            yield PointRetried(index=attempt.index, record=record)
            return
        self._ended_so[attempt.key] = record.status
        if record.status is Status.OOM:
            self._schedule.note_oom(attempt.point)
        if self._settings.stop_on_error and self._is_failure(record.status):
            self._schedule.stop(attempt.point.point_id)
        yield PointFinished(index=attempt.index, record=record)
        if not self._stopping() and attempt.round == 1 and not attempt.control_of:
            yield from self._add(self._ask.follow(record), attempt.round)

    def _is_failure(self, status: Status) -> bool:
        # A batch that does not fit is what a search looks for.
        return status.is_failure and not (self._is_search and status is Status.OOM)

    def _add(self, points: Sequence[Point], number: int) -> Iterator[Event]:
        for point in points:
            attempt = Attempt(index=self._next_index, point=point, number=1, round=number)
            self._next_index += 1
            self._schedule.add(attempt)
            yield PointAdded(index=attempt.index, point=point, round=number)


def _make_skipped(decision: Skip) -> Record:
    return make_unmeasured(
        decision.attempt, decision.cause, decision.reason, started_at=datetime.now(UTC)
    )
