"""What the columns of a report's tables mean, in a few sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raybench.report import wording
from raybench.report.tables import MARK_COLUMN, WHERE_IT_GOES, Table

_STEP = "median over iterations of the slowest rank's time, ± half its 95 % interval."
_RATES = {
    "algbw GB/s": "Algbw, busbw: bytes over step time, as nccl-tests counts them.",
    "memory GB/s": "Memory: bytes read and written over step time.",
    "TFLOP/s": "TFLOP/s: of one device.",
    "MFU": "MFU: TFLOP/s over the datasheet's dense peak.",
    "GEMM": "GEMM: TFLOP/s over those of large matrix products on the same device.",
}
_PARTS = {
    "compute": "Compute: the device's work, DDP's on the gradients included, the optimizer apart.",
    "optim": "Optim: the optimizer.",
    "data": "Data: the host waits for the next batch.",
    "gap": "Gap: the device is idle, waiting for the host.",
    "comm": "Comm: communication that computing does not hide.",
    "wait": "Wait: the longest that any rank waits for the slowest one.",
}
_PARTS_FROM = (
    "The parts come from instrumented steps after the timed ones, each from the rank where it is "
    "longest, so they need not add up exactly."
)


def explain(tables: Sequence[Table], baseline: Mapping[str, Any], ranks: str) -> tuple[str, ...]:
    """A paragraph for each kind of table and one for the marks; what no table has is left out."""
    parts = [table for table in tables if table.kind == WHERE_IT_GOES]
    others = [table for table in tables if table.kind != WHERE_IT_GOES]
    paragraphs = (
        _meanings(_step_meanings(baseline, ranks), others),
        _told_of_parts(parts),
        _marks(tables),
    )
    return tuple(filter(None, paragraphs))


def _told_of_parts(tables: Sequence[Table]) -> str:
    told = _meanings(_PARTS, tables)
    # Without a breakdown there are rates alone, which come from the timed steps.
    return " ".join(filter(None, (told, _meanings(_RATES, tables), _PARTS_FROM if told else "")))


def _step_meanings(baseline: Mapping[str, Any], ranks: str) -> dict[str, str]:
    return {
        "step ms": f"Step ms: {_STEP}",
        "step": f"Step: {_STEP}",
        "samples/s": f"Samples/s: all {ranks} together.",
        "speed-up": "Speed-up: samples/s over those of the baseline "
        f"({wording.settings(baseline)}), ± half its 95 % interval within this run.",
        "efficiency": f"Efficiency: speed-up over the ratio of {ranks}.",
        "GiB": "GiB: peak memory allocated on one device.",
        **_RATES,
    }


def _meanings(meanings: Mapping[str, str], tables: Sequence[Table]) -> str:
    # Besides the step there is nothing to explain in a table of failures.
    shown = {
        column
        for table in tables
        if len(table.columns) > table.settings + 1
        for column in table.columns
    }
    return " ".join(text for column, text in meanings.items() if column in shown)


def _marks(tables: Sequence[Table]) -> str:
    letters = {
        letter
        for table in tables
        if MARK_COLUMN in table.columns
        for row in table.rows
        for letter in row[table.columns.index(MARK_COLUMN)]
    }
    told = [f"{mark} {text}" for mark, text in wording.MARKS.items() if mark in letters]
    return f"{MARK_COLUMN}: " + "; ".join(told) + "." if told else ""
