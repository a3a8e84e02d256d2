"""What ranks answer, as the driver takes it in: plain values within bounds, or a Failure.

A workload's code runs in the process that answers, and declares some of its numbers. What is not
what `records.Measurement` says ends here, as the row of its point, and not in the tables.
"""

from __future__ import annotations

import math
import numbers
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from raybench.errors import UsageError
from raybench.records import Answer, Cause, Failure, Measurement, RankMetrics, Samples
from raybench.records.failure_text import MESSAGE_CHARACTERS, shorten
from raybench.records.metric import Metric

# What a workload may declare, of one step on one rank.
DECLARED = (
    "items_per_step",
    "message_bytes",
    "busbw_factor",
    "memory_bytes",
    "flops_per_step",
    "model_flops_per_step",
)
_COMBINED = tuple(field.name for field in fields(RankMetrics))
# Beyond what any step does; over the shortest step it is still a double.
MOST = 1e30
_WHOLE = ("items_per_step", "message_bytes", "memory_bytes")
# Integers up to here are doubles too; in nanoseconds, 104 days.
_MOST_EXACT = 2**53
_SHOWN_CHARACTERS = 60


def check_declared(owner: str, name: str, value: object) -> int | float | None:
    """Return a declared number as int or float. Raises UsageError for another type or size."""
    if value is None:
        return None
    number = _plain(value)
    if number is None or not 0 <= number <= MOST:
        raise UsageError(
            f"{owner}: {name} must be a number from 0 to {MOST:g}, given {_quote(value)}"
        )
    return float(number) if name not in _WHOLE or number > _MOST_EXACT else number


def check_metric(owner: str, metric: Metric, value: object) -> float:
    """Return the value of a workload's own metric as a float. Raises as `check_declared`."""
    number = _plain(value)
    if number is None or abs(number) > MOST:
        raise UsageError(
            f"{owner}: {metric.name} must be a number from -{MOST:g} to {MOST:g}, "
            f"given {_quote(value)}"
        )
    return float(number)


def check_answers(answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """Return the answers of a point's ranks with plain numbers.

    A Failure stands for an answer with a number out of bounds, and for all where the ranks have
    not timed the same steps.
    """
    each = [_check(answer) for answer in answers]
    measurements = [answer for answer in each if isinstance(answer, Measurement)]
    if len(measurements) == len(each) and (reason := _why_not_together(measurements)):
        return tuple(_invalid(measurement, reason) for measurement in measurements)
    return tuple(each)


def _check(answer: Answer) -> Answer:
    if isinstance(answer, Failure):
        return replace(answer, message=shorten(answer.message, MESSAGE_CHARACTERS))
    try:
        texts: dict[str, Any] = {
            name: _limit(getattr(answer, name))
            for name in ("warnings", "transports", "nccl_choices")
        }
        plain = replace(answer, **_plain_numbers(answer), **texts)
    except UsageError as error:
        return _invalid(answer, str(error))
    reason = next(_problems(plain), None)
    return plain if reason is None else _invalid(answer, reason)


def _plain_numbers(measurement: Measurement) -> dict[str, Any]:
    owner, own = "the workload", measurement.workload_metrics
    return {
        **{name: check_declared(owner, name, getattr(measurement, name)) for name in DECLARED},
        "workload_metrics": {one: check_metric(owner, one, value) for one, value in own.items()},
    }


def _limit(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(shorten(str(warning), MESSAGE_CHARACTERS) for warning in texts)


def _invalid(measurement: Measurement, reason: str) -> Failure:
    return Failure.of(
        Cause.INVALID_MEASUREMENT,
        rank=measurement.rank,
        message=shorten(reason, MESSAGE_CHARACTERS),
        worker_reusable=measurement.worker_reusable,
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
    yield from _amount_problems(
        gemm_tflops=measurement.gemm_tflops,
        **{name: getattr(measurement, name) for name in _COMBINED if name not in DECLARED},
    )
    for region in measurement.breakdown.regions if measurement.breakdown else ():
        if not isinstance(region.name, str):
            yield f"the name of a region must be a text, given {_quote(region.name)}"


def _sample_problems(samples: Samples) -> Iterator[str]:
    durations = {"step": samples.step_ns, "host": samples.host_ns}
    for part, spent_ns in samples.part_ns.items():
        if not isinstance(part, str):
            yield f"the name of a part must be a text, given {_quote(part)}"
        durations[f"part {part}"] = spent_ns
    for what, spent_ns in {"start": samples.start_ns, **durations}.items():
        if len(spent_ns) != len(samples.step_ns):
            yield f"{len(spent_ns)} times of {what} for {len(samples.step_ns)} steps"
        if not _are_times(spent_ns):
            wrong = next(ns for ns in spent_ns if not _are_times([ns]))
            yield f"the clock of this rank gave {_quote(wrong)} ns for {shorten(what, 60)}"


def _are_times(spent_ns: Sequence[int]) -> bool:
    if not spent_ns:
        return True
    are_whole = set(map(type, spent_ns)) == {int}
    return are_whole and min(spent_ns) >= 0 and max(spent_ns) < _MOST_EXACT


def _amount_problems(**amounts: object) -> Iterator[str]:
    for name, value in amounts.items():
        number = None if value is None else _plain(value)
        if value is not None and (number is None or not 0 <= number < _MOST_EXACT):
            yield f"{name} is {_quote(value)}"


def _why_not_together(measurements: Sequence[Measurement]) -> str | None:
    """Return why these ranks have not measured one point together; None where they have."""
    shapes = {measurement.rank: _shape(measurement) for measurement in measurements}
    if len(set(shapes.values())) > 1:
        return "the ranks have not run the same steps: " + _list(
            {rank: " + ".join(map(str, shape)) for rank, shape in shapes.items()}
        )
    step_ns = zip(*(measurement.step_ns for measurement in measurements), strict=True)
    if statistics.median(map(max, step_ns)) == 0:
        return "the clock stood still: the timed steps took 0 ns"
    return None


def _shape(measurement: Measurement) -> tuple[int, ...]:
    return tuple(len(repetition.timed.step_ns) for repetition in measurement.repetitions)


def _list(by_rank: Mapping[int, str]) -> str:
    return ", ".join(f"rank {rank} timed {text}" for rank, text in by_rank.items())


def _plain(value: object) -> int | float | None:
    """Return a number of any class as int or float; None for NaN, infinity and other objects."""
    if type(value) is float:  # as nearly all are: what follows takes ten times as long
        return value if math.isfinite(value) else None
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        return number if isinstance(number, int) or math.isfinite(number) else None
    except (ArithmeticError, TypeError, ValueError):
        return None


def _quote(value: object) -> str:
    """On one line, and short: the digits of an integer may be too many to be written."""
    try:
        text = repr(value)
    except Exception:
        text = f"what cannot be written, of type {type(value).__name__}"
    return shorten(" ".join(text.split()), _SHOWN_CHARACTERS)
