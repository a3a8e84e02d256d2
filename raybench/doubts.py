"""What makes the number of a point doubtful, one sentence each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raybench.measure import steady

if TYPE_CHECKING:
    from raybench.job import Measure
    from raybench.records import Record

Row = Mapping[str, Any]

# A rank that makes the others wait for a larger share of the step is worth a look at its device.
SLOW_RANK_SHARE = 0.05
_TRENDS = {
    steady.DRIFTING: "step time drifts: later steps differ from earlier ones",
    steady.STEPPED: "step time changes its level while it is measured",
}


def doubts(row: Row, record: Record, measure: Measure) -> Iterator[str]:
    """What the reader of an ok point's row must know.

    row: its numbers. measure: what the job asked for, to tell where the measurement falls short.
    """
    yield from _shortfalls(row, measure)
    yield from _unsteady(row, record)
    yield from _held_back(row, record)
    if row["mfu_pct"] is not None and row["mfu_pct"] > 100:
        yield (
            f"{row['mfu_pct']:.0f}% of the device's peak is impossible: the operations or the "
            "peak are counted wrong, or the precision is not what was asked for"
        )


def is_slowed_by_one_rank(row: Row) -> bool:
    """Whether the other ranks wait long for the slowest one."""
    wait_ms, step_ms = row["wait_ms"], row["step_ms_p50"]
    # Also false for NaN, which pandas makes of null.
    return bool(wait_ms is not None and step_ms and wait_ms > SLOW_RANK_SHARE * step_ms)


def _shortfalls(row: Row, measure: Measure) -> Iterator[str]:
    """What the job asked for and the measurement did not reach."""
    wanted = measure.iterations.min * measure.repeats
    if row["iterations"] < wanted:
        yield f"time budget: {row['iterations']} of {wanted} iterations"
    if row["step_ms_ci_low"] is None:
        return
    half_width = (row["step_ms_ci_high"] - row["step_ms_ci_low"]) / 2 / row["step_ms_p50"]
    if half_width > measure.target_ci:
        yield (
            f"step time is known to ±{half_width:.1%} only; "
            f"the job asks for ±{measure.target_ci:.1%}"
        )


def _unsteady(row: Row, record: Record) -> Iterator[str]:
    repetitions = [r for m in record.measurements for r in m.repetitions]
    if any(repetition.settled is False for repetition in repetitions):
        longest = max(len(repetition.warmup.step_ns) for repetition in repetitions)
        yield f"step time was not steady after {longest} iterations of warm-up"
    if row["trend"] in _TRENDS:
        yield _TRENDS[row["trend"]]


def _held_back(row: Row, record: Record) -> Iterator[str]:
    """What made the step slower than the devices can be."""
    step_ms = row["step_ms_p50"]
    if row["host_bound"]:
        yield f"host-bound: the device idles for {row['host_gap_ms']:.3g} ms of {step_ms:.3g} ms"
    if row["throttled"]:
        timed = [r.timed.throttled for m in record.measurements for r in m.repetitions]
        marks = [mark for marks in timed for mark in marks]
        reasons = ", ".join(row["throttle_reasons"]) or "reason unknown"
        yield f"clocks were held down in {sum(marks) / len(marks):.0%} of the samples: {reasons}"
    if is_slowed_by_one_rank(row):
        yield (
            f"rank {row['slowest_rank']} is slower: the others wait {row['wait_ms']:.3g} ms "
            f"of {step_ms:.3g} ms"
        )
