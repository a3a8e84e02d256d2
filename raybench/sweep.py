"""The loop of a run: each point of the plan becomes one record, whatever happens to it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from raybench.cluster import Cluster
from raybench.cluster.ranks import Isolation, Strategy
from raybench.errors import ClusterError
from raybench.flights import Flights
from raybench.job import Measure
from raybench.outcomes import unmeasured
from raybench.plan import Plan
from raybench.point import Point, Precision
from raybench.records import Device, Record, Status, Task
from raybench.scheduler import Assign, Schedule, Skip, Turn, is_tried_again
from raybench.sources import Code

# How long workers that are coming are waited for before the loop looks around again.
_LOOK_AROUND_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """How every point of the run is placed and measured.

    profiled: point_ids of those that are profiled too. code: what every worker must have loaded.
    precisions: those that workers live to see, see Task.
    """

    measure: Measure
    strategy: Strategy
    stop_on_error: bool
    isolation: Isolation = "cluster"
    profiled: frozenset[str] = frozenset()
    code: Code | None = None
    precisions: tuple[Precision, ...] = ()


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


Event = PointStarted | PointFinished | PointRetried | PointAdded


def _never() -> bool:
    return False


def _nothing(record: Record) -> Sequence[Point]:
    return ()


def sweep(
    plan: Plan,
    settings: SweepSettings,
    cluster: Cluster,
    write: Callable[[Sequence[tuple[int, Record]]], None],
    attempts: Mapping[str, int] | None = None,
    *,
    stopping: Callable[[], bool] = _never,
    ran_out: Sequence[Point] = (),
    follow: Callable[[Record], Sequence[Point]] = _nothing,
) -> Generator[Event]:
    """Run the points; `write` gets each record before the event that tells of it, with its index
    and with those that end at the same time.

    attempts: point_id -> number of its first attempt here; other points are left out. Without it
    all are run, from 1. An index is always the point's position in the whole plan, in whatever
    order they are run.
    stopping: once it is true no point starts any more, and the loop ends with those in flight.
    ran_out: points that ran out of device memory in an earlier sweep of this run.
    follow: the further points that the last record of a point asks for; their indices come after
    those of the plan.

    An interrupt, or closing the generator, writes the points in flight as cancelled, a
    ClusterError as lost; both go on to the caller. Events and writes come on the caller's thread;
    each point runs on a thread of its own, so that an interrupt does not wait for a stuck cluster.
    """
    schedule = Schedule(_turns(plan, attempts), settings.strategy, settings.isolation, ran_out)
    flights = Flights(cluster)
    loop = _Loop(plan, settings, cluster, write, stopping, follow, schedule, flights)
    try:
        yield from loop.events()
    except (KeyboardInterrupt, GeneratorExit):
        loop.write_in_flight(Status.CANCELLED, "Interrupted", "by the user")
        raise
    except ClusterError as error:
        loop.write_in_flight(Status.LOST, "ClusterError", str(error))
        raise


def _turns(plan: Plan, attempts: Mapping[str, int] | None) -> list[Turn]:
    numbered = (
        (index, point, 1 if attempts is None else attempts.get(point.point_id))
        for index, point in enumerate(plan.points)
    )
    return [
        Turn(index=index, point=point, attempt=attempt)
        for index, point, attempt in numbered
        if attempt is not None
    ]


class _Loop:
    """The state of one sweep."""

    def __init__(
        self,
        plan: Plan,
        settings: SweepSettings,
        cluster: Cluster,
        write: Callable[[Sequence[tuple[int, Record]]], None],
        stopping: Callable[[], bool],
        follow: Callable[[Record], Sequence[Point]],
        schedule: Schedule,
        flights: Flights,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._write = write
        self._stopping = stopping
        self._follow = follow
        self._schedule = schedule
        self._flights = flights
        self._next_index = len(plan.points)
        self._is_search = plan.batch_search is not None

    def events(self) -> Iterator[Event]:
        while True:
            self._look_around(0.0)
            yield from self._decided()
            if self._flights.are_none:
                if self._stopping() or self._schedule.is_done:
                    return
                assert self._schedule.coming, "what waits beside an idle cluster waits for workers"
                self._look_around(_LOOK_AROUND_S)
            else:
                yield from self._landed()

    def write_in_flight(self, status: Status, error_type: str, reason: str) -> None:
        batch = [
            (
                flight.turn.index,
                unmeasured(
                    flight.turn,
                    status,
                    error_type,
                    reason,
                    started_at=flight.started_at,
                    neighbours=tuple(flight.neighbours),
                ),
            )
            for flight in self._flights.now
        ]
        if batch:
            self._write(batch)

    def _look_around(self, timeout_s: float) -> None:
        cluster = self._cluster
        cluster.refresh(timeout_s)
        self._schedule.see(cluster.devices, cluster.capacity, cluster.lost, cluster.coming)

    def _decided(self) -> Iterator[Event]:
        """Start what can begin now, and write what is skipped."""
        while not self._stopping() and (decision := self._schedule.next()) is not None:
            if isinstance(decision, Skip):
                yield from self._ended([(decision.turn, _skipped(decision))])
            else:
                yield from self._started(decision)

    def _started(self, decision: Assign) -> Iterator[Event]:
        turn, settings = decision.turn, self._settings
        devices = tuple(self._cluster.devices[seat] for seat in decision.seats)
        yield PointStarted(index=turn.index, point=turn.point, devices=devices)
        profile = turn.point.point_id in settings.profiled
        task = Task(
            point=turn.point,
            settings=settings.measure,
            profile=profile,
            code=settings.code,
            precisions=settings.precisions,
        )
        self._flights.launch(turn, task, decision.seats, devices)

    def _landed(self) -> Iterator[Event]:
        """Wait for the next points in flight, or for workers that are coming."""
        landed = self._flights.landed(_LOOK_AROUND_S if self._schedule.coming else None)
        for turn, _ in landed:
            self._schedule.ended(turn)
        yield from self._ended(landed)

    def _ended(self, ended: Sequence[tuple[Turn, Record]]) -> Iterator[Event]:
        if ended:
            self._write([(turn.index, record) for turn, record in ended])
        for turn, record in ended:
            yield from self._kept(turn, record)

    def _kept(self, turn: Turn, record: Record) -> Iterator[Event]:
        """What follows from a record that is written."""
        if is_tried_again(record, turn.tries) and not self._stopping():
            self._schedule.add(replace(turn, attempt=turn.attempt + 1, tries=turn.tries + 1))
            yield PointRetried(index=turn.index, record=record)
            return
        if record.status is Status.OOM:
            self._schedule.note_oom(turn.point)
        if self._settings.stop_on_error and self._is_failure(record.status):
            self._schedule.stop(turn.point.point_id)
        yield PointFinished(index=turn.index, record=record)
        if not self._stopping():
            yield from self._added(self._follow(record))

    def _is_failure(self, status: Status) -> bool:
        # A batch that does not fit is what a search looks for.
        return status not in (Status.OK, Status.SKIPPED) and not (
            self._is_search and status is Status.OOM
        )

    def _added(self, points: Sequence[Point]) -> Iterator[Event]:
        for point in points:
            turn = Turn(index=self._next_index, point=point, attempt=1)
            self._next_index += 1
            self._schedule.add(turn)
            yield PointAdded(index=turn.index, point=point)


def _skipped(decision: Skip) -> Record:
    return unmeasured(
        decision.turn,
        decision.status,
        decision.error_type,
        decision.reason,
        started_at=datetime.now(UTC),
    )
