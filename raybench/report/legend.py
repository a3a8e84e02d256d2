"""What the columns of a report's tables mean, in a few sentences. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raybench.records.metric import Metric
from raybench.report import formatting
from raybench.report.tables import MARK_COLUMN, POINT_COLUMN, REGION_SHARE, Table
from raybench.results.metrics import BY_NAME, PARTS, RATES, SCALING

_STEP = (
    "Step: the median over the iterations, ± half its 95 % interval; of ranks in lockstep their "
    "median, else the slowest one's. Rates follow the mean of the iterations."
)
# Before schema 5.
_STEP_OF_MAXIMA = (
    "Step: the slowest rank's time of each iteration, its median over the iterations, "
    "± half its 95 % interval."
)
_REGIONS = (
    "Regions: parts that the step names itself, each on the rank where it takes longest, and their "
    "share of the instrumented step in which they were timed."
)
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
    """Write a paragraph for the points, one for the parts of their steps and one for the marks.

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
    step = f"{_STEP if by_mean else _STEP_OF_MAXIMA} {plus_minus}".rstrip()
    words = {"ranks": ranks, "baseline": formatting.settings(baseline)}
    own = dict.fromkeys(metric for table in tables for metric in table.own)
    points, rates, parts = (
        _meanings(metrics, shown, words)
        for metrics in (
            [*SCALING.metrics, *own, BY_NAME["step_ms_p99"]],
            RATES.metrics,
            [metric for metric in PARTS.metrics if metric not in RATES.metrics],
        )
    )
    if any(f"step {unit.name}" in shown for unit in formatting.UNITS):
        points.insert(0, step)
    if POINT_COLUMN in shown:
        points.append("Point: its id, for `raybench show RUN POINT`.")
    paragraphs = [points, [*parts, *rates, _PARTS_FROM]] if parts else [[*points, *rates]]
    if REGION_SHARE in shown:
        paragraphs.append([_REGIONS])
    return tuple(filter(None, [*map(" ".join, paragraphs), _marks(tables)]))


def _meanings(
    metrics: Sequence[Metric], shown: Collection[str], words: Mapping[str, str]
) -> list[str]:
    """Write a sentence for each of the metrics that a table has."""
    return [
        f"{_name(metric)}: {meaning(metric, words)}."
        for metric in metrics
        if any(formatting.metric_heading(metric, unit) in shown for unit in formatting.UNITS)
    ]


def meaning(metric: Metric, words: Mapping[str, str]) -> str:
    """Say what a metric is, without a full stop.

    words: `ranks`, what a rank runs on, and `baseline`, its settings.
    """
    told = metric.meaning.format(**words) if metric.meaning else metric.description
    return formatting.plain(told).removesuffix(".")


def _name(metric: Metric) -> str:
    """Write the head of its column as a sentence begins, without the unit behind it."""
    name = formatting.plain(metric.title).removesuffix(f" {metric.unit}")
    return name[:1].upper() + name[1:]


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
