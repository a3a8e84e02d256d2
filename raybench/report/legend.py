"""What the columns of a report's tables mean, in a few sentences. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raybench.report import formatting
from raybench.report.tables import BURST, MARK_COLUMN, OF_GEMM, POINT_COLUMN, Table

_STEP = (
    "Step: the median over the iterations, ± half its 95 % interval; of ranks in lockstep their "
    "median, else the slowest one's. Rates follow the mean of the iterations."
)
# Before schema 5.
_STEP_OF_MAXIMA = (
    "Step: the slowest rank's time of each iteration, its median over the iterations, "
    "± half its 95 % interval."
)
_P99 = "P99: the 99th percentile of the iterations."
_RATES = {
    "algbw GB/s": "Algbw, busbw: bytes over step time, as nccl-tests counts them.",
    "busbw GB/s": "Algbw, busbw: bytes over step time, as nccl-tests counts them.",
    "memory GB/s": "Memory: bytes read and written over step time.",
    "TFLOP/s": "TFLOP/s: of one device.",
    BURST: "Burst: TFLOP/s in the first 30 ms of the warm-up, before a power limit acts.",
    "MFU": "MFU: TFLOP/s as a share of the datasheet's dense peak.",
    OF_GEMM: "%GEMM: TFLOP/s as a share of what large matrix products reach on this device.",
}
_PARTS = {
    "compute": "Compute: the device's forward and backward pass, with DDP's work on gradients.",
    "optim": "Optim: the optimizer.",
    "data": "Data: the host waits for the next batch.",
    "idle": "Idle: the device waits for the host.",
    "comm": "Comm: the step beyond the slowest rank's own, communication that nothing hides.",
    "late": "Late: how much longer the slowest rank's own step is than the others'; it is in the "
    "other parts.",
}
_PARTS_FROM = (
    "The parts are those of the slowest rank, from instrumented steps after the timed ones, so "
    "their sum may differ from the step."
)


def explain(
    tables: Sequence[Table],
    baseline: Mapping[str, Any],
    ranks: str,
    plus_minus: str,
    *,
    by_mean: bool,
) -> tuple[str, ...]:
    """A paragraph for the points, one for the parts of their steps and one for the marks.

    plus_minus: a sentence, what ± holds over.
    by_mean: whether rates follow the mean step, as they do from schema 5 on.
    What no table has is left out, and nothing is said twice.
    """
    # Besides the step there is nothing to explain in a table of failures.
    shown = {
        column
        for table in tables
        if len(table.columns) > table.settings + 1
        for column in table.columns
    }
    parts, rates = _meanings(_PARTS, shown), _meanings(_RATES, shown)
    step = f"{_STEP if by_mean else _STEP_OF_MAXIMA} {plus_minus}".rstrip()
    points = _meanings(_of_points(baseline, ranks, step), shown)
    paragraphs = [points, [*parts, *rates, _PARTS_FROM]] if parts else [[*points, *rates]]
    return tuple(filter(None, [*map(" ".join, paragraphs), _marks(tables)]))


def _of_points(baseline: Mapping[str, Any], ranks: str, step: str) -> dict[str, str]:
    return {
        **{f"step {unit.name}": step for unit in formatting.UNITS},
        "samples/s": f"Samples/s: all {ranks} together.",
        "speed-up": "Speed-up: samples/s over those of the baseline "
        f"({formatting.settings(baseline)}).",
        "efficiency": f"Efficiency: speed-up over the ratio of {ranks}.",
        "GiB": "GiB: peak memory allocated on one device.",
        **{f"p99 {unit.name}": _P99 for unit in formatting.UNITS},
        POINT_COLUMN: "Point: its id, for `raybench show RUN POINT`.",
    }


def _meanings(meanings: Mapping[str, str], shown: Collection[str]) -> list[str]:
    return list(dict.fromkeys(text for column, text in meanings.items() if column in shown))


def _marks(tables: Sequence[Table]) -> str:
    letters = {
        letter
        for table in tables
        if MARK_COLUMN in table.columns
        for row in table.rows
        for letter in row[table.columns.index(MARK_COLUMN)]
    }
    told = [f"{mark} {text}" for mark, text in formatting.MARKS.items() if mark in letters]
    return f"{MARK_COLUMN}: " + "; ".join(told) + "." if told else ""
