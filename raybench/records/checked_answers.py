"""Checks of what a workload declares, and of what its ranks answer.

A workload's code runs in the process that answers. A number, a name or a time that the tables
cannot hold ends here, as the row of its point.
"""

from __future__ import annotations

import math
import numbers
import statistics
from collections.abc import Iterator, Sequence

from raybench.errors import MESSAGE_CHARACTERS, UsageError, shorten
from raybench.records import Answer, Cause, Failure, Measurement, Metric, Samples

# What a workload may declare, of one step on one rank.
DECLARED = (
    "items_per_step",
    "message_bytes",
    "busbw_factor",
    "memory_bytes",
    "flops_per_step",
    "model_flops_per_step",
)
# Beyond what any step does; over the shortest step it is still a double.
MOST = 1e30
_WHOLE = ("items_per_step", "message_bytes", "memory_bytes")
# Integers up to here are doubles too; in nanoseconds, 104 days.
_MOST_EXACT = 2**53
_SHOWN_CHARACTERS = 60


def check_declared(owner: str, name: str, value: object) -> int | float | None:
    """Return a number that a workload declares as a plain int or float; None for None.

    owner: the workload, for messages. Raises UsageError for no number, below 0 or above MOST.
    """
    if value is None:
        return None
    number = _plain(value)
    if number is None or not 0 <= number <= MOST:
        raise UsageError(
            f"{owner}: {name} must be a number from 0 to {MOST:g}, given {_quote(value)}"
        )
    return float(number) if name not in _WHOLE or number > _MOST_EXACT else number


def check_metric(owner: str, metric: Metric, value: object) -> float:
    """Return the value of a workload's own metric as a float.

    owner: the workload, for messages. Raises UsageError for None, no number, and beyond ±MOST.
    """
    number = _plain(value)
    if number is None or abs(number) > MOST:
        raise UsageError(
            f"{owner}: {metric.name} must be a number from -{MOST:g} to {MOST:g}, "
            f"given {_quote(value)}"
        )
    return float(number)


def check_answers(answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """Return the answers of a point's ranks; a Failure in place of one that cannot be kept.

    All become Failures if the ranks have not timed the same steps, or their clocks stood still.
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
            yield f"the name of a region must be a text, given {_quote(region.name)}"


def _sample_problems(samples: Samples) -> Iterator[str]:
    """Yield what is wrong with the lengths, the times and the names of the parts of samples."""
    durations = {"start": samples.start_ns, "step": samples.step_ns, "host": samples.host_ns}
    for part, spent_ns in samples.part_ns.items():
        if not isinstance(part, str):
            yield f"the name of a part must be a text, given {_quote(part)}"
        durations[f"part {part}"] = spent_ns
    for what, spent_ns in durations.items():
        if len(spent_ns) != len(samples.step_ns):
            yield f"{len(spent_ns)} times of {what} for {len(samples.step_ns)} steps"
        if spent_ns and not (min(spent_ns) >= 0 and max(spent_ns) < _MOST_EXACT):
            wrong = next(ns for ns in spent_ns if not 0 <= ns < _MOST_EXACT)
            yield f"the clock of this rank gave {_quote(wrong)} ns for {shorten(what, 60)}"


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


def _plain(value: object) -> int | float | None:
    """Return a number of any class as int or float; None for NaN, infinity and other objects."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        return number if isinstance(number, int) or math.isfinite(number) else None
    except (ArithmeticError, TypeError, ValueError):
        return None


def _quote(value: object) -> str:
    """Return the object on one short line; the digits of an integer may be too many to write."""
    try:
        text = repr(value)
    except Exception:
        text = f"what cannot be written, of type {type(value).__name__}"
    return shorten(" ".join(text.split()), _SHOWN_CHARACTERS)
