"""The loop of a sweep: each trial of the plan becomes a record, whatever happens to it."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from queue import Empty, SimpleQueue

from raybench.cluster import Cluster
from raybench.cluster.point_end import cause_of
from raybench.errors import (
    DETAIL_CHARACTERS,
    MESSAGE_CHARACTERS,
    ClusterError,
    shorten,
    shorten_start,
)
from raybench.job.memory import estimate, explain_oom
from raybench.job.model import Measure
from raybench.job.point import Isolation, Point, Precision, Strategy
from raybench.job.problems import quote
from raybench.records.code import Code
from raybench.records.device import Device
from raybench.records.doubts import Doubt, DoubtKind, worst_of_each
from raybench.records.measurement import Failure, Measurement, RankAnswer, Samples
from raybench.records.record import OtherUsers, Record, TrialKey, by_point
from raybench.records.status import Cause, Status
from raybench.records.task import Task
from raybench.results.metrics import crowding
from raybench.sweep.scheduler import Attempt, Rounds, Schedule, Skip

# A clock that counts more nanoseconds, 104 days, is wrong; up to here integers are doubles too.
_MOST_NS = 2**53
# How long to wait for workers that are coming before the loop looks at the cluster again.
_LOOK_AROUND_S = 1.0
# More of them in one part would make readers wait for the first, and take memory together.
_MOST_AT_ONCE = 64
# A device that was idle for longer is cold again. Between two rounds the processes of two H200s are
# replaced in 4.5 s.
_STAYS_HOT_S = 10.0
_LAST_LINES = 10
# Of a line in a message.
_LINE_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """How every point of the run is placed and measured.

    measure: later rounds and controls make no breakdown. strategy: as of `Cluster.start`; a point
    has its own. stop_on_error: a point that fails has all that wait skipped; in a batch search, not
    one that is out of memory. isolation: as of a `Schedule`. profiled: ids of points that are
    profiled too. code: source files that every worker must have; None: any will do. precisions: as
    of a `Task`. measure_of: returns a point's own settings for all rounds; None: it has `measure`.
    """

    measure: Measure
    strategy: Strategy
    stop_on_error: bool
    isolation: Isolation = "cluster"
    profiled: frozenset[str] = frozenset()
    code: Code | None = None
    precisions: tuple[Precision, ...] | None = ()
    measure_of: Callable[[Point], Measure | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PointStarted:
    """The point is about to be sent to the workers of `devices`, which are in rank order."""

    index: int
    point: Point
    devices: tuple[Device, ...]
    # Seconds of steps before its warm-up, which heat the devices.
    heat_s: float = 0.0


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
    """A point was added to a round, and waits for its turn; it may be one of the plan."""

    index: int
    point: Point
    round: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStarted:
    """Round `round` of `rounds` begins. The only round of a plan has no such event.

    trials: those of this round that the sweep will run, but for points that a `PointAdded` tells
    of. later: how many it will run in later rounds, as far as that is known.
    """

    round: int
    rounds: int
    trials: tuple[TrialKey, ...]
    later: int


Event = PointStarted | PointFinished | PointRetried | PointAdded | RoundStarted


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierSweeps:
    """What earlier sweeps of a run have done, and which points this one may run.

    kept: how the trials ended that are not run again. attempts: point_id -> attempts so far.
    chosen: ids of the points that this sweep may run, beside those it adds; None for all.
    """

    kept: Mapping[TrialKey, Status] = field(default_factory=dict)
    attempts: Mapping[str, int] = field(default_factory=dict)
    chosen: Collection[str] | None = None

    def left(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Return those attempts of one round that this sweep has to run, in the same order.

        A control is also dropped if no other attempt of its block is left: repeating the baseline
        alone compares nothing.
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
    have ended; the others are not called then. follow_ups: gets the last record of each point of
    the first round, but no controls; returns points to add to it. further_round: gets the number of
    one more round when all are over; returns its points. Called until it returns none, or a failure
    stops the sweep.
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
    """Run the trials on the cluster, whose workers are started, and yield an event for each step.

    A trial lost on its devices is tried once more, unless `stopping`. write: gets (index, record)
    of attempts that end or are skipped at the same time, before the events of their end; index: as
    of an `Attempt`. earlier: None runs all trials. callbacks: None stops and adds nothing.

    An interrupt, or closing the generator, writes the points in flight as cancelled, a ClusterError
    as lost. Another error leaves them without a record. All are raised again. Workers still run
    these points until the caller closes the cluster. Events and writes come on the caller's thread;
    each point has one of its own, so that an interrupt does not wait for a stuck cluster.
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


@dataclass(eq=False)
class _Loop:
    """The state of one sweep. The fields are the parameters of `sweep`, in the same order."""

    rounds: Rounds
    settings: SweepSettings
    cluster: Cluster
    write: Callable[[Sequence[tuple[int, Record]]], None]
    earlier: EarlierSweeps
    callbacks: LoopCallbacks

    def __post_init__(self) -> None:
        self._round = 0
        self._statuses = dict(self.earlier.kept)
        self._attempts = Counter(self.earlier.attempts)
        self._has_used_workers = self._has_ended = False
        kept = by_point(self.earlier.kept)
        self._schedule = Schedule(self.settings.isolation)
        for point in self.rounds.plan.points:
            if kept.get(point.point_id) is Status.OOM:
                self._schedule.note_oom(point)
        self._in_flight = InFlight(self.cluster)
        # Lasting name of a device -> when it last ended an ok point, by the monotonic clock.
        self._busy_until_s: dict[str, float] = {}
        self._next_index = len(self.rounds.plan.points)

    def events(self) -> Iterator[Event]:
        """Run all rounds, and yield an event for each step, as `sweep` does."""
        stopping = self.callbacks.stopping
        # At the end the cluster is not asked any more: it may be gone when all is measured.
        while self._in_flight.running or not (stopping() or self._has_ended):
            if not self._in_flight.running and self._schedule.is_done:
                yield from self._next_round()
                continue
            self._refresh(0.0)
            yield from self._decide()
            if self._in_flight.running:
                wait_s = _LOOK_AROUND_S if self._schedule.pending else None
                yield from self._end(self._in_flight.next_finished(wait_s))
            elif not (stopping() or self._schedule.is_done):
                assert self._schedule.pending, "on an idle cluster points only wait for workers"
                self._refresh(_LOOK_AROUND_S)

    def write_in_flight(self, cause: Cause, reason: str) -> None:
        """Write a record of each point in flight: `reason`, with the status of `cause`."""
        batch = []
        for one in self._in_flight.running.values():
            record = replace(
                _make_unmeasured(one.attempt, cause, reason, one.started_at),
                duration_s=time.monotonic() - one.started_s,
                neighbours=tuple(one.neighbours),
            )
            batch.append((one.attempt.index, record))
        if batch:
            self.write(batch)

    def _next_round(self) -> Iterator[Event]:
        """Begin the next round, in fresh workers where the rounds ask for them; or end the sweep.

        After the rounds of the plan, callbacks may give points of further ones.
        """
        self._round += 1
        if self._round > self.rounds.count:
            stopped = self._schedule.is_stopped
            points = () if stopped else self.callbacks.further_round(self._round)
            if not points:
                self._has_ended = True
                return
            self._next_index = max(self._next_index, self.rounds.first_free_index)
            yield RoundStarted(round=self._round, rounds=self._round, trials=(), later=0)
            yield from self._add(points, self._round)
            return
        attempts = self._trials_left(self._round)
        if self.rounds.count > 1:
            later = range(self._round + 1, self.rounds.count + 1)
            yield RoundStarted(
                round=self._round,
                rounds=self.rounds.count,
                trials=tuple(attempt.key for attempt in attempts),
                later=sum(len(self._trials_left(number)) for number in later),
            )
        if attempts and self._has_used_workers and self.rounds.in_fresh_workers:
            self.cluster.restart()
            self._has_used_workers = False
        for attempt in attempts:
            self._schedule.add(attempt)

    def _trials_left(self, number: int) -> list[Attempt]:
        """Return the attempts of this round that are to be run, in order; [] once stopped."""
        if self._schedule.is_stopped:
            return []
        return self.earlier.left(self.rounds.attempts(number, self._statuses))

    def _refresh(self, timeout_s: float) -> None:
        """Take in the state of the cluster; wait at most so long for a worker that is coming."""
        cluster = self.cluster
        cluster.refresh(timeout_s)
        self._schedule.update_cluster(
            cluster.devices, cluster.capacity, cluster.lost, cluster.pending
        )

    def _decide(self) -> Iterator[Event]:
        """Start the attempts that can begin now, and write records of those that are skipped."""
        settings = self.settings
        while not self.callbacks.stopping() and (decision := self._schedule.next()) is not None:
            point_id = decision.attempt.point.point_id
            self._attempts[point_id] += 1  # over all rounds
            attempt = replace(decision.attempt, number=self._attempts[point_id])
            if isinstance(decision, Skip):
                now = datetime.now(UTC)
                skipped = _make_unmeasured(attempt, decision.cause, decision.reason, now)
                yield from self._end([(attempt, skipped)])
                continue
            devices = tuple(self.cluster.devices[worker_id] for worker_id in decision.worker_ids)
            own = settings.measure_of(attempt.point) if settings.measure_of else None
            usual = settings.measure
            if attempt.round > 1 or attempt.control_of:  # the first round has made the breakdown
                usual = usual.model_copy(update={"breakdown": False})
            measure = own or usual
            if measure.heat_s and self._are_hot(devices):
                measure = measure.model_copy(update={"heat_s": 0.0})
            yield PointStarted(
                index=attempt.index,
                point=attempt.point,
                devices=devices,
                heat_s=measure.heat_s,
            )
            task = Task(
                point=attempt.point,
                settings=measure,
                profile=point_id in settings.profiled,
                code=settings.code,
                precisions=settings.precisions,
            )
            self._has_used_workers = True
            self._in_flight.submit(attempt, task, decision.worker_ids, devices)

    def _are_hot(self, devices: Sequence[Device]) -> bool:
        """Return whether each of these devices was measured in the last 10 s."""
        since_s = time.monotonic() - _STAYS_HOT_S
        ends_s = [self._busy_until_s.get(device.lasting_name, -math.inf) for device in devices]
        return min(ends_s) > since_s

    def _end(self, ended: Sequence[tuple[Attempt, Record]]) -> Iterator[Event]:
        """Free the workers of these attempts and write their records.

        Then try the trial of each again, or note how it ended and add the points that follow.
        """
        for attempt, record in ended:
            self._schedule.free(attempt)
            if record.status is Status.OK:
                names = [device.lasting_name for device in record.devices]
                self._busy_until_s |= dict.fromkeys(names, time.monotonic())
        if ended:
            self.write([(attempt.index, record) for attempt, record in ended])
        for attempt, record in ended:
            # A trial that was lost on devices: they are to blame more often than the point.
            is_lost = record.status is Status.LOST and record.devices
            if is_lost and attempt.tries == 1 and not self.callbacks.stopping():
                self._schedule.add(replace(attempt, tries=attempt.tries + 1))
                yield PointRetried(index=attempt.index, record=record)
                continue
            self._statuses[attempt.key] = record.status
            if record.status is Status.OOM:
                self._schedule.note_oom(attempt.point)
            # A batch that does not fit is what a search looks for.
            is_searched = self.rounds.plan.batch_search and record.status is Status.OOM
            if self.settings.stop_on_error and record.status.is_failure and not is_searched:
                self._schedule.stop(attempt.point.point_id)
            yield PointFinished(index=attempt.index, record=record)
            if not self.callbacks.stopping() and attempt.round == 1 and not attempt.control_of:
                yield from self._add(self.callbacks.follow_ups(record), attempt.round)

    def _add(self, points: Sequence[Point], number: int) -> Iterator[Event]:
        """Add points to the round of this number; later rounds may measure them too."""
        if points and (chosen := self.earlier.chosen) is not None:
            chosen = {*chosen, *(point.point_id for point in points)}
            self.earlier = replace(self.earlier, chosen=chosen)
        for point in points:
            attempt = Attempt(index=self._next_index, point=point, number=1, round=number)
            self._next_index += 1
            self._schedule.add(attempt)
            yield PointAdded(index=attempt.index, point=point, round=number)


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    """An attempt that runs now, or has just ended.

    neighbours: point_ids on its nodes; a dict keeps their order. outcome: its ranks' answers, or
    what `Cluster.run` raised. others: who used the nodes besides, other than points of this run.
    """

    attempt: Attempt
    devices: tuple[Device, ...]
    started_at: datetime
    # Start by the monotonic clock: the wall clock may be set back meanwhile.
    started_s: float = field(default_factory=time.monotonic)
    neighbours: dict[str, None] = field(default_factory=dict)
    outcome: tuple[RankAnswer, ...] | BaseException = ()
    duration_s: float = 0.0
    others: OtherUsers = field(default_factory=OtherUsers)


class InFlight:
    """Runs attempts on a cluster, each on a thread of its own, and gives back their records.

    running: attempts by index, in the order of their starts, until `next_finished` returns them.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.running: dict[int, RunningAttempt] = {}
        self._by_node: defaultdict[str, dict[int, None]] = defaultdict(dict)
        self._finished: SimpleQueue[RunningAttempt] = SimpleQueue()

    def submit(
        self, attempt: Attempt, task: Task, worker_ids: Sequence[int], devices: tuple[Device, ...]
    ) -> None:
        """Run the attempt on the workers with these ids, in a thread; does not wait.

        worker_ids, devices: in rank order. No attempt in `running` may have the index or a worker.
        """
        running = RunningAttempt(attempt=attempt, devices=devices, started_at=datetime.now(UTC))
        for node_id in dict.fromkeys(device.node_id for device in devices):
            for index in self._by_node[node_id]:
                other = self.running[index]
                other.neighbours[attempt.point.point_id] = None
                running.neighbours[other.attempt.point.point_id] = None
            self._by_node[node_id][attempt.index] = None
        self.running[attempt.index] = running

        def run() -> None:
            try:
                seen = self._cluster.watch_other_users(worker_ids)
                running.outcome = self._cluster.run(task, worker_ids)
                running.duration_s = time.monotonic() - running.started_s
                running.others = seen()
            except BaseException as error:
                running.outcome = error  # it is raised again on the thread that waits
            self._finished.put(running)

        # A daemon: a cluster that is stuck must not keep the process from ending.
        name = f"point {attempt.point.point_id}"
        threading.Thread(target=run, name=name, daemon=True).start()

    def next_finished(self, timeout_s: float | None) -> list[tuple[Attempt, Record]]:
        """Wait until an attempt ends; return all that have ended, at most 64, in that order.

        Empty if none ends in `timeout_s`; None waits for ever, also where none runs. Raises what
        `Cluster.run` raised, after those that ended well before; that attempt stays in `running`.
        """
        ended: list[tuple[Attempt, Record]] = []
        with suppress(Empty):
            while len(ended) < _MOST_AT_ONCE:
                running = self._finished.get(block=not ended, timeout=timeout_s)
                if isinstance(running.outcome, BaseException):
                    if not ended:
                        raise running.outcome
                    self._finished.put(running)  # what has ended well comes first
                    break
                del self.running[running.attempt.index]
                for device in running.devices:
                    self._by_node[device.node_id].pop(running.attempt.index, None)
                ended.append((running.attempt, make_record_of(running)))
        return ended


def _make_unmeasured(attempt: Attempt, cause: Cause, reason: str, started_at: datetime) -> Record:
    """Return the record of an attempt without answers: status of `cause`, message `reason`."""
    return Record(
        point=attempt.point,
        attempt=attempt.number,
        round=attempt.round,
        control_of=attempt.control_of,
        status=cause.status,
        started_at=started_at,
        duration_s=0.0,
        error_type=cause,
        error_message=reason,
    )


def make_record_of(running: RunningAttempt) -> Record:
    """Return the record of an attempt whose ranks have answered; `outcome` must be their answers.

    It has the measurements of all ranks, or none: a rank whose peer failed may have measured
    garbage. Its error is the failure that `cause_of` takes. The message names the
    reason, after `oom` what would fit, if estimated; the detail has the rank's last output, if any.
    """
    assert not isinstance(running.outcome, BaseException)
    attempt, devices = running.attempt, running.devices
    outputs = tuple(answer.output for answer in running.outcome)
    answers = check_answers(running.outcome)
    # The formulas are those of CUDA devices.
    is_cuda = all(device.kind == "cuda" for device in devices)
    estimate_bytes = estimate(attempt.point) if is_cuda else None
    busy_hosts = [f"other processes on {load.host}" for load in running.others.loads]
    record = Record(
        point=attempt.point,
        attempt=attempt.number,
        round=attempt.round,
        control_of=attempt.control_of,
        status=Status.OK,
        started_at=running.started_at,
        duration_s=running.duration_s,
        devices=devices,
        outputs=outputs if any(outputs) else (),
        neighbours=(*running.neighbours, *running.others.on_devices, *busy_hosts),
        node_neighbours=running.others.on_nodes,
        mem_estimate_bytes=estimate_bytes,
    )
    failure = cause_of(answers)
    if failure is None:
        measurements = tuple(answer for answer in answers if isinstance(answer, Measurement))
        doubts = [doubt for measurement in measurements for doubt in measurement.doubts]
        doubts += [*crowding(devices), *_doubts_of_hosts(running.others)]
        points = [f"point {point_id}" for point_id in running.neighbours]
        for kind, others in (
            (DoubtKind.NOT_ALONE, running.others.on_devices),
            (DoubtKind.SHARED_NODE, (*points, *running.others.on_nodes)),
        ):
            doubts += [Doubt(kind=kind, subject=other) for other in others]
        return replace(record, measurements=measurements, doubts=worst_of_each(doubts))
    rank, device, output = failure.rank, devices[failure.rank], outputs[failure.rank]
    message = failure.message
    last = output.splitlines()[-_LAST_LINES:]
    if failure.error_type == Cause.SCRIPT_EXIT and last:
        # A script that ended itself says why in the last line of its output.
        message += f"; its last line: {shorten(last[-1], _LINE_CHARACTERS)}"
    elif failure.status is Status.OOM and estimate_bytes and device.memory_bytes:
        message += f"; {explain_oom(attempt.point, estimate_bytes, device.memory_bytes)}"
    detail = failure.detail
    if last and last[-1] not in detail:
        told = "\n".join([f"the last lines that rank {rank} wrote:", *last])
        detail = f"{detail.rstrip()}\n\n{told}" if detail else told
    return replace(
        record,
        status=failure.status,
        error_type=failure.error_type,
        error_message=message,
        error_rank=rank,
        error_detail=shorten_start(detail, DETAIL_CHARACTERS) or None,
    )


def _doubts_of_hosts(others: OtherUsers) -> Iterator[Doubt]:
    """Yield a doubt for each host whose cores others used, or whose users are not known."""
    for load in others.loads:
        yield Doubt(
            kind=DoubtKind.BUSY_CORES, value=load.busy_cores, limit=load.cores, subject=load.host
        )
    for host in others.silent_hosts:
        yield Doubt(kind=DoubtKind.UNKNOWN_USERS, subject=host)


def check_answers(answers: Sequence[RankAnswer]) -> tuple[RankAnswer, ...]:
    """Return the answers of a point's ranks in their order, a Failure for one that cannot be kept.

    If none is a Failure so far, all become one where ranks timed unequal numbers of steps, or most
    steps took 0 ns on all ranks. Such a Failure lacks the rank's output. answers: one at least.
    """
    measurements = [answer for answer in answers if isinstance(answer, Measurement)]
    reasons = {one.rank: reason for one in measurements if (reason := next(_problems(one), ""))}
    if len(measurements) == len(answers) and not reasons:
        reason = _why_not_together(measurements)
        reasons = {one.rank: reason for one in measurements if reason}
    return tuple(
        Failure.of(
            Cause.INVALID_MEASUREMENT,
            rank=answer.rank,
            message=shorten(reasons[answer.rank], MESSAGE_CHARACTERS),
            worker_reusable=answer.worker_reusable,
        )
        if isinstance(answer, Measurement) and answer.rank in reasons
        else answer
        for answer in answers
    )


def _problems(measurement: Measurement) -> Iterator[str]:
    """Yield the reasons why a measurement cannot be kept."""
    if not measurement.repetitions:
        yield "nothing was measured"
    for repetition in measurement.repetitions:
        if not repetition.timed.step_ns:
            yield "nothing was timed"
        for samples in (repetition.warmup, repetition.timed):
            yield from _sample_problems(samples)
    for region in measurement.breakdown.regions if measurement.breakdown else ():
        if not isinstance(region.name, str):
            yield f"the name of a region must be a text, given {quote(region.name)}"


def _sample_problems(samples: Samples) -> Iterator[str]:
    """Yield what is wrong with the lengths, the times and the names of the parts of samples."""
    durations = {"start": samples.start_ns, "step": samples.step_ns, "host": samples.host_ns}
    for part, spent_ns in samples.part_ns.items():
        if not isinstance(part, str):
            yield f"the name of a part must be a text, given {quote(part)}"
        durations[f"part {part}"] = spent_ns
    for what, spent_ns in durations.items():
        if len(spent_ns) != len(samples.step_ns):
            yield f"{len(spent_ns)} times of {what} for {len(samples.step_ns)} steps"
        if spent_ns and not (min(spent_ns) >= 0 and max(spent_ns) < _MOST_NS):
            wrong = next(ns for ns in spent_ns if not 0 <= ns < _MOST_NS)
            yield f"the clock of this rank gave {quote(wrong)} ns for {shorten(what, 60)}"


def _why_not_together(measurements: Sequence[Measurement]) -> str:
    """Return why these ranks' measurements cannot be kept together; "" where they can.

    Reasons: the ranks timed different numbers of steps, or the clock stood still.
    """
    timed = {
        one.rank: " + ".join(str(len(repetition.timed.step_ns)) for repetition in one.repetitions)
        for one in measurements
    }
    if len(set(timed.values())) > 1:
        told = ", ".join(f"rank {rank} timed {steps}" for rank, steps in timed.items())
        return f"the ranks have not run the same steps: {told}"
    step_ns = zip(*(measurement.step_ns for measurement in measurements), strict=True)
    if statistics.median(map(max, step_ns)) == 0:
        return "the clock stood still: the timed steps took 0 ns"
    return ""
