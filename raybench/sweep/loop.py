"""The loop of a sweep, which makes a record of each trial, even of a failed one."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from queue import Empty, SimpleQueue

from raybench.cluster import Cluster
from raybench.errors import ClusterError
from raybench.job.model import Measure
from raybench.job.point import Isolation, Point, Precision, Strategy
from raybench.records.code import Code
from raybench.records.device import Device
from raybench.records.hang import HangVerdict
from raybench.records.record import Record, TrialKey, status_by_point
from raybench.records.status import Cause, Status
from raybench.records.task import Task
from raybench.sweep.point_record import RunningAttempt, make_record, make_unmeasured
from raybench.sweep.point_source import PointSource
from raybench.sweep.rounds import Attempt, Rounds
from raybench.sweep.scheduler import Assign, Schedule, Skip

# While workers may still join, the cluster is queried at this interval.
_REFRESH_S = 1.0
# Upper bound of the records that are written at once: more would delay the first record.
_MOST_AT_ONCE = 64
# A device that was idle for longer needs heating again. The pause between rounds takes 4.5 s.
_STAYS_HOT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """How the points of a run are placed and measured."""

    # Warm-up and timing. The breakdown runs in the first round only, and not for controls.
    measure: Measure
    # Default placement; a point may override it.
    strategy: Strategy
    # Skip all waiting points after the first failure. In a batch search, out of memory is none.
    stop_on_error: bool
    isolation: Isolation = "cluster"
    # Ids of the points to profile.
    profiled: frozenset[str] = frozenset()
    # Source files that every worker must have; None skips the check.
    code: Code | None = None
    # See `Task.precisions`.
    precisions: tuple[Precision, ...] | None = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PointStarted:
    """The workers are about to get a point."""

    index: int
    point: Point
    # In rank order.
    devices: tuple[Device, ...]
    # Duration of heating before the warm-up.
    heat_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFinished:
    """A trial has ended; its record is written."""

    index: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PointRetried:
    """An attempt was lost; its record is written, and its trial is tried again."""

    index: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PointAdded:
    """A point was added to a round."""

    index: int
    point: Point
    round: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStarted:
    """A round begins. A plan of a single round has no such event."""

    round: int
    rounds: int
    # Trials that the sweep will run in this round; `PointAdded` adds more.
    trials: tuple[TrialKey, ...]
    # Number of known trials in later rounds.
    later: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PointHangs:
    """A rank of a running point hangs."""

    index: int
    point: Point
    verdict: HangVerdict


Event = PointStarted | PointHangs | PointFinished | PointRetried | PointAdded | RoundStarted
# Receives (index of the trial in the run, record) of several attempts.
Write = Callable[[Sequence[tuple[int, Record]]], None]


def sweep(
    rounds: Rounds,
    settings: SweepSettings,
    cluster: Cluster,
    write: Write,
    source: PointSource | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Generator[Event]:
    """Run the trials that are left and yield an event for each step.

    A trial that is lost with its worker or node is retried once. After an exception, points still
    run until the caller closes the cluster.

    Args:
        cluster: its workers must be started.
        write: receives records in the caller's thread, before their events.
        source: adds points while the sweep runs.
        stopping: if it returns True, no further point starts.

    Raises:
        KeyboardInterrupt, GeneratorExit: points in flight are written as cancelled first.
        ClusterError: points in flight are written as lost first.
    """
    loop = _Loop(rounds, settings, cluster, write, source or PointSource(), stopping)
    try:
        yield from loop.events()
    except (KeyboardInterrupt, GeneratorExit):
        loop.write_in_flight(Cause.INTERRUPTED, "by the user")
        raise
    except ClusterError as error:
        loop.write_in_flight(Cause.CLUSTER_LOST, str(error))
        raise


@dataclass(eq=False)
class _Loop:
    """The state of a sweep; the fields are its arguments."""

    rounds: Rounds
    settings: SweepSettings
    cluster: Cluster
    write: Write
    source: PointSource
    stopping: Callable[[], bool]

    def __post_init__(self) -> None:
        # Number of the current round; 0 before the first.
        self._round = 0
        # Trial -> its last status, including earlier sweeps.
        self._statuses = dict(self.rounds.kept)
        # point_id -> number of attempts, including earlier sweeps.
        self._attempts = Counter(self.rounds.attempts_before)
        # Whether an attempt has run since the worker processes were started.
        self._has_used_workers = False
        # Whether all rounds have ended.
        self._has_ended = False
        self._schedule = Schedule(self.settings.isolation)
        # Skip batches that are larger than a batch that was out of memory in an earlier sweep.
        kept_statuses = status_by_point(self.rounds.kept)
        for point in self.rounds.plan.points:
            if kept_statuses.get(point.point_id) is Status.OOM:
                self._schedule.note_oom(point)
        self._in_flight = InFlight(self.cluster)
        # `Device.lasting_name` -> monotonic time at which its last ok point ended.
        self._last_ok_end_s: dict[str, float] = {}
        # Index of the next point that is added.
        self._next_index = len(self.rounds.plan.points)

    def events(self) -> Iterator[Event]:
        """Run points until all rounds have ended, or until `stopping` and no point runs."""
        # When all points have ended, the cluster may be gone: do not refresh it.
        while self._in_flight.running or not (self.stopping() or self._has_ended):
            if not self._in_flight.running and self._schedule.is_done:
                yield from self._next_round()
                continue
            self._refresh(0.0)
            yield from self._decide()
            if self._in_flight.running:
                # Look for new workers regularly, if workers may still join.
                wait_s = _REFRESH_S if self._schedule.pending else None
                ended = self._in_flight.next_finished(wait_s)
                yield from self._in_flight.take_hangs()
                yield from self._end(ended)
            elif not (self.stopping() or self._schedule.is_done):
                assert self._schedule.pending, "on an idle cluster points only wait for workers"
                self._refresh(_REFRESH_S)

    def write_in_flight(self, cause: Cause, reason: str) -> None:
        """Write a record for each point in flight."""
        batch = []
        for running in self._in_flight.running.values():
            duration_s = time.monotonic() - running.started_s
            record = make_unmeasured(running.attempt, cause, reason, running.started_at, duration_s)
            record = replace(record, neighbours=tuple(running.neighbours))
            batch.append((running.attempt.index, record))
        if batch:
            self.write(batch)

    def _next_round(self) -> Iterator[Event]:
        """Begin the next round, or end the sweep."""
        self._round += 1
        if self._round > self.rounds.count:
            yield from self._further_round()
            return
        attempts = self._trials_left(self._round)
        if self.rounds.count > 1:
            later_rounds = range(self._round + 1, self.rounds.count + 1)
            yield RoundStarted(
                round=self._round,
                rounds=self.rounds.count,
                trials=tuple(attempt.key for attempt in attempts),
                later=sum(len(self._trials_left(number)) for number in later_rounds),
            )
        if attempts and self._has_used_workers and self.rounds.in_fresh_workers:
            self.cluster.restart()
            self._has_used_workers = False
        for attempt in attempts:
            self._schedule.add(attempt)

    def _further_round(self) -> Iterator[Event]:
        """Begin a round with points of the source, or end the sweep if there are none."""
        points: Sequence[Point] = ()
        if not self._schedule.is_stopped:
            points = self.source.further_round(self._round)
        if not points:
            self._has_ended = True
            return
        self._next_index = max(self._next_index, self.rounds.first_free_index)
        yield RoundStarted(round=self._round, rounds=self._round, trials=(), later=0)
        yield from self._add(points, self._round)

    def _trials_left(self, round_number: int) -> list[Attempt]:
        """Return an attempt for each trial of a round that has to run."""
        if self._schedule.is_stopped:
            return []
        return self.rounds.remaining(round_number, self._statuses)

    def _refresh(self, timeout_s: float) -> None:
        """Update the schedule; wait up to `timeout_s` for a pending worker."""
        cluster = self.cluster
        cluster.refresh(timeout_s)
        self._schedule.update_cluster(
            cluster.devices, cluster.capacity, cluster.lost, cluster.pending
        )

    def _decide(self) -> Iterator[Event]:
        """Start the attempts that can begin now, and write skipped attempts."""
        while not self.stopping() and (decision := self._schedule.next()) is not None:
            point_id = decision.attempt.point.point_id
            self._attempts[point_id] += 1
            attempt = replace(decision.attempt, number=self._attempts[point_id])
            if isinstance(decision, Skip):
                now = datetime.now(UTC)
                skipped = make_unmeasured(attempt, decision.cause, decision.reason, now)
                yield from self._end([(attempt, skipped)])
            else:
                yield from self._start(replace(decision, attempt=attempt))

    def _start(self, decision: Assign) -> Iterator[Event]:
        """Yield `PointStarted`, then run the attempt in a thread; do not wait."""
        attempt, settings = decision.attempt, self.settings
        point = attempt.point
        devices = tuple(self.cluster.devices[worker_id] for worker_id in decision.worker_ids)
        measure = self.source.measure_of(point)
        if measure is None:
            measure = settings.measure
            # The first round has made the breakdown. A control repeats the baseline for its times.
            is_control = bool(attempt.control_of)
            if attempt.round > 1 or is_control:
                measure = measure.model_copy(update={"breakdown": False})
        if measure.heat_s and self._are_hot(devices):
            measure = measure.model_copy(update={"heat_s": 0.0})
        yield PointStarted(index=attempt.index, point=point, devices=devices, heat_s=measure.heat_s)
        task = Task(
            point=point,
            settings=measure,
            profile=point.point_id in settings.profiled,
            code=settings.code,
            precisions=settings.precisions,
        )
        self._has_used_workers = True
        self._in_flight.submit(attempt, task, decision.worker_ids, devices)

    def _are_hot(self, devices: Sequence[Device]) -> bool:
        """Return whether each device has ended an ok point less than 10 s ago."""
        earliest_s = time.monotonic() - _STAYS_HOT_S
        last_ends_s = [
            self._last_ok_end_s.get(device.lasting_name, -math.inf) for device in devices
        ]
        return min(last_ends_s) > earliest_s

    def _end(self, ended: Sequence[tuple[Attempt, Record]]) -> Iterator[Event]:
        """Free the workers, write the records, then retry or finish each trial."""
        for attempt, record in ended:
            self._schedule.free(attempt)
            # `_are_hot` needs the time: the devices of an ok point stay hot for some seconds.
            if record.status is Status.OK:
                names = [device.lasting_name for device in record.devices]
                self._last_ok_end_s |= dict.fromkeys(names, time.monotonic())
        if ended:
            self.write([(attempt.index, record) for attempt, record in ended])
        for attempt, record in ended:
            # Retry a lost trial once: its device is more often to blame than its point. A skipped
            # trial has no devices.
            has_lost_devices = record.status is Status.LOST and bool(record.devices)
            if has_lost_devices and attempt.tries == 1 and not self.stopping():
                self._schedule.add(replace(attempt, tries=attempt.tries + 1))
                yield PointRetried(index=attempt.index, record=record)
                continue
            self._statuses[attempt.key] = record.status
            if record.status is Status.OOM:
                self._schedule.note_oom(attempt.point)
            # Out of memory shows a batch search where to stop, so it is no failure there.
            is_expected = self.rounds.plan.batch_search and record.status is Status.OOM
            if self.settings.stop_on_error and record.status.is_failure and not is_expected:
                self._schedule.stop(attempt.point.point_id)
            yield PointFinished(index=attempt.index, record=record)
            # A stopping sweep adds points too, so that a resumed run knows them.
            if attempt.round == 1 and not attempt.control_of:
                yield from self._add(self.source.follow_ups(record), attempt.round)

    def _add(self, points: Sequence[Point], round_number: int) -> Iterator[Event]:
        """Add points to a round."""
        if points and self.rounds.chosen is not None:
            # Later rounds run only chosen points, so choose the new points too.
            chosen = {*self.rounds.chosen, *(point.point_id for point in points)}
            self.rounds = replace(self.rounds, chosen=chosen)
        for point in points:
            attempt = Attempt(index=self._next_index, point=point, number=1, round=round_number)
            self._next_index += 1
            self._schedule.add(attempt)
            yield PointAdded(index=attempt.index, point=point, round=round_number)


class InFlight:
    """Runs each attempt in a thread, so that the main thread can handle interrupts."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # Index -> attempt, in the order of their starts.
        self.running: dict[int, RunningAttempt] = {}
        # Node -> indices of its running attempts, as an ordered set.
        self._by_node: defaultdict[str, dict[int, None]] = defaultdict(dict)
        # None wakes up `next_finished` after a hang.
        self._finished: SimpleQueue[RunningAttempt | None] = SimpleQueue()
        self._hangs: SimpleQueue[PointHangs] = SimpleQueue()

    def submit(
        self, attempt: Attempt, task: Task, worker_ids: Sequence[int], devices: tuple[Device, ...]
    ) -> None:
        """Run the attempt in a thread; does not wait.

        Args:
            worker_ids: idle workers in rank order.
            devices: devices of the workers.
        """
        running = RunningAttempt(attempt=attempt, devices=devices, started_at=datetime.now(UTC))
        # Points on the same node are neighbours. Dicts without values are ordered sets here.
        for node_id in dict.fromkeys(device.node_id for device in devices):
            for index in self._by_node[node_id]:
                neighbour = self.running[index]
                neighbour.neighbours[attempt.point.point_id] = None
                running.neighbours[neighbour.attempt.point.point_id] = None
            self._by_node[node_id][attempt.index] = None
        self.running[attempt.index] = running

        def tell_hang(verdict: HangVerdict) -> None:
            self._hangs.put(PointHangs(index=attempt.index, point=attempt.point, verdict=verdict))
            self._finished.put(None)

        def run() -> None:
            try:
                other_users = self._cluster.watch_other_users(worker_ids)
                running.outcome = self._cluster.run(task, worker_ids, tell_hang)
                running.duration_s = time.monotonic() - running.started_s
                running.others = other_users()
            except BaseException as error:
                running.outcome = error  # raised again by `next_finished`
            self._finished.put(running)

        # A daemon thread lets the process exit while the cluster hangs.
        name = f"point {attempt.point.point_id}"
        threading.Thread(target=run, name=name, daemon=True).start()

    def take_hangs(self) -> Iterator[PointHangs]:
        """Yield the hangs that were found since the last call."""
        with suppress(Empty):
            while True:
                yield self._hangs.get_nowait()

    def next_finished(self, timeout_s: float | None) -> list[tuple[Attempt, Record]]:
        """Wait for an attempt to end or hang; return up to 64 attempts that have ended, in order.

        Args:
            timeout_s: return an empty list after this time; None waits for ever.

        Raises:
            BaseException: `Cluster.run` raised; attempts that ended before are returned first.
        """
        ended: list[tuple[Attempt, Record]] = []
        with suppress(Empty):
            while len(ended) < _MOST_AT_ONCE:
                # Wait for the first attempt; take more attempts only if they have ended already.
                running = self._finished.get(block=not ended, timeout=timeout_s)
                if running is None:  # a rank hangs
                    break
                if isinstance(running.outcome, BaseException):
                    if not ended:
                        raise running.outcome
                    # First return what has ended; the next call raises the error.
                    self._finished.put(running)
                    break
                del self.running[running.attempt.index]
                for device in running.devices:
                    self._by_node[device.node_id].pop(running.attempt.index, None)
                ended.append((running.attempt, make_record(running)))
        return ended
