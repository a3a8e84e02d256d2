"""Check the answers of the ranks of a point, and make its record."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from raybench.cluster.point_end import cause_of
from raybench.errors import DETAIL_CHARACTERS, MESSAGE_CHARACTERS, shorten, shorten_start
from raybench.job.memory import estimate, explain_oom
from raybench.job.problems import quote
from raybench.records.device import Device
from raybench.records.doubts import Doubt, DoubtKind, worst_of_each
from raybench.records.measurement import Failure, Measurement, RankAnswer, Samples
from raybench.records.record import OtherUsers, Record
from raybench.records.status import Cause, Status
from raybench.results.metrics import crowding
from raybench.sweep.rounds import Attempt

# Upper bound of durations: 104 days, which are still exact as a double.
_MOST_NS = 2**53
# Number of output lines of a failed rank that its record has.
_LAST_LINES = 10
_LINE_CHARACTERS = 500


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    """An attempt that runs now, or has just ended."""

    attempt: Attempt
    devices: tuple[Device, ...]
    started_at: datetime
    # Monotonic, because the wall clock may be set back.
    started_s: float = field(default_factory=time.monotonic)
    # Ordered set of ids of points that ran on the same nodes at the same time.
    neighbours: dict[str, None] = field(default_factory=dict)
    # What `Cluster.run` returned or raised.
    outcome: tuple[RankAnswer, ...] | BaseException = ()
    duration_s: float = 0.0
    # Programs outside of this run that used the nodes.
    others: OtherUsers = field(default_factory=OtherUsers)


def make_unmeasured(
    attempt: Attempt, cause: Cause, reason: str, started_at: datetime, duration_s: float = 0.0
) -> Record:
    """Return the record of an attempt without answers; `reason` is its error message."""
    return Record(
        point=attempt.point,
        attempt=attempt.number,
        round=attempt.round,
        control_of=attempt.control_of,
        status=cause.status,
        started_at=started_at,
        duration_s=duration_s,
        error_type=cause,
        error_message=reason,
    )


def make_record(running: RunningAttempt) -> Record:
    """Return the record of an attempt whose ranks have answered."""
    assert not isinstance(running.outcome, BaseException)
    attempt, devices = running.attempt, running.devices
    outputs = tuple(answer.output for answer in running.outcome)
    answers = check_answers(running.outcome)
    # The memory estimate is valid for CUDA devices only.
    is_cuda = all(device.kind == "cuda" for device in devices)
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
        other_programs=running.others.programs,
        mem_estimate_bytes=estimate(attempt.point) if is_cuda else None,
    )
    failure = cause_of(answers)
    if failure is not None:
        # Drop all measurements, because the failure may have disturbed the other ranks.
        return _failed(record, failure, outputs[failure.rank])
    measurements = tuple(answer for answer in answers if isinstance(answer, Measurement))
    doubts = [doubt for measurement in measurements for doubt in measurement.doubts]
    doubts += [*crowding(devices), *_doubts_about_users(running)]
    return replace(record, measurements=measurements, doubts=worst_of_each(doubts))


def _failed(record: Record, failure: Failure, output: str) -> Record:
    """Return the record with a failure and the last output of the rank that failed."""
    device, estimate_bytes = record.devices[failure.rank], record.mem_estimate_bytes
    message, detail = failure.message, failure.detail
    last_lines = output.splitlines()[-_LAST_LINES:]
    if failure.error_type == Cause.SCRIPT_EXIT and last_lines:
        # Scripts usually print the reason in their last line.
        message += f"; its last line: {shorten(last_lines[-1], _LINE_CHARACTERS)}"
    elif failure.status is Status.OOM and estimate_bytes and device.memory_bytes:
        message += f"; {explain_oom(record.point, estimate_bytes, device.memory_bytes)}"
    if last_lines and last_lines[-1] not in detail:
        lines = "\n".join([f"the last lines that rank {failure.rank} wrote:", *last_lines])
        detail = f"{detail.rstrip()}\n\n{lines}" if detail else lines
    # In a hang without a rank, no rank is to blame.
    has_culprit = failure.hang is None or failure.hang.rank is not None
    return replace(
        record,
        status=failure.status,
        error_type=failure.error_type,
        error_message=message,
        error_rank=failure.rank if has_culprit else None,
        error_detail=shorten_start(detail, DETAIL_CHARACTERS) or None,
        hang=failure.hang,
    )


def _doubts_about_users(running: RunningAttempt) -> Iterator[Doubt]:
    """Yield a doubt for each other user of the nodes: programs, and points of this run."""
    others = running.others
    for load in others.loads:
        yield Doubt(
            kind=DoubtKind.BUSY_CORES, value=load.busy_cores, limit=load.cores, subject=load.host
        )
    for host in others.silent_hosts:
        yield Doubt(kind=DoubtKind.UNKNOWN_USERS, subject=host)
    for user in others.on_devices:
        yield Doubt(kind=DoubtKind.NOT_ALONE, subject=user)
    for point_id in running.neighbours:
        yield Doubt(kind=DoubtKind.SHARED_NODE, subject=f"point {point_id}")
    for user in others.on_nodes:
        yield Doubt(kind=DoubtKind.SHARED_NODE, subject=user)


def check_answers(answers: Sequence[RankAnswer]) -> tuple[RankAnswer, ...]:
    """Return the answers in order; each invalid measurement is replaced by a Failure."""
    measurements = [answer for answer in answers if isinstance(answer, Measurement)]
    reasons: dict[int, str] = {}
    for measurement in measurements:
        first_problem = next(_problems(measurement), None)
        if first_problem is not None:
            reasons[measurement.rank] = first_problem
    if len(measurements) == len(answers) and not reasons:
        # Each measurement is valid by itself: compare the ranks.
        reason = _common_problem(measurements)
        if reason is not None:
            reasons = {measurement.rank: reason for measurement in measurements}
    checked: list[RankAnswer] = []
    for answer in answers:
        if isinstance(answer, Measurement) and answer.rank in reasons:
            answer = Failure.of(
                Cause.INVALID_MEASUREMENT,
                rank=answer.rank,
                message=shorten(reasons[answer.rank], MESSAGE_CHARACTERS),
                worker_reusable=answer.worker_reusable,
            )
        checked.append(answer)
    return tuple(checked)


def _problems(measurement: Measurement) -> Iterator[str]:
    """Yield why one measurement is invalid."""
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
    """Yield why the durations of the steps or of their parts are invalid."""
    durations = {"start": samples.start_ns, "step": samples.step_ns, "host": samples.host_ns}
    for part, spent_ns in samples.part_ns.items():
        if not isinstance(part, str):
            yield f"the name of a part must be a text, given {quote(part)}"
        durations[f"part {part}"] = spent_ns
    for name, spent_ns in durations.items():
        if len(spent_ns) != len(samples.step_ns):
            yield f"{len(spent_ns)} times of {name} for {len(samples.step_ns)} steps"
        if spent_ns and not (min(spent_ns) >= 0 and max(spent_ns) < _MOST_NS):
            wrong_ns = next(ns for ns in spent_ns if not 0 <= ns < _MOST_NS)
            yield f"the clock of this rank gave {quote(wrong_ns)} ns for {shorten(name, 60)}"


def _common_problem(measurements: Sequence[Measurement]) -> str | None:
    """Return why the measurements of all ranks together are invalid, or None."""
    # Rank -> number of timed steps of each repetition, as "8 + 8".
    steps = {}
    for measurement in measurements:
        counts = [str(len(repetition.timed.step_ns)) for repetition in measurement.repetitions]
        steps[measurement.rank] = " + ".join(counts)
    if len(set(steps.values())) > 1:
        texts = [f"rank {rank} timed {count}" for rank, count in steps.items()]
        return f"the ranks have not run the same steps: {', '.join(texts)}"
    # The slowest rank decides how long a step takes.
    durations_of_ranks = zip(*(measurement.step_ns for measurement in measurements), strict=True)
    longest_ns = [max(durations_ns) for durations_ns in durations_of_ranks]
    if statistics.median(longest_ns) == 0:
        return "the clock stood still: the timed steps took 0 ns"
    return None
