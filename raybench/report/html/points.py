"""The table of all points, which the page sorts and filters."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.analysis.rows import RATES, SCALING, ScaledRow, value_of, workload_metrics
from raybench.analysis.settings import is_numeric, setting, varying
from raybench.records.metric import Metric
from raybench.report import formatting
from raybench.report.blocks import (
    MARKS_TITLE,
    Cell,
    Column,
    ColumnOf,
    Table,
    make_table,
    metric_column,
)
from raybench.report.charts.data import in_order
from raybench.report.charts.scaling import speed_up_words
from raybench.report.messages import MARKS, marks
from raybench.report.plain_text import shorten
from raybench.report.sections.points import STEP_MEANING
from raybench.report.summary import Summary

_HINT_CHARS = 300
_EMPTY = Cell(text="")


def point_table(rows: Sequence[ScaledRow], summary: Summary) -> Table:
    """Return a line per point, with hints and values to sort by."""
    own = in_order(rows)
    names = varying(own)
    metrics = tuple(dict.fromkeys((*SCALING.metrics, *RATES.metrics, *workload_metrics(own))))
    columns: list[ColumnOf[ScaledRow]] = [
        (
            Column(title="point", is_text=True, meaning="for `raybench show RUN POINT`"),
            lambda row: str(row.point_id),
        ),
        *(
            _setting_column(own, name, summary.ranks)
            for name in sorted(names, key=lambda name: is_numeric(own, name))
        ),
        (Column(title="step", meaning=STEP_MEANING), _step),
        (
            Column(
                title="±",
                meaning="half of the 95 % interval of the step time, relative to it. "
                + summary.plus_minus.removesuffix("."),
            ),
            _half_width,
        ),
        (
            Column(
                title=MARKS_TITLE,
                is_text=False,
                meaning="what makes the number doubtful: " + summary.marks_meaning,
            ),
            _marks,
        ),
        *(_metric_column(metric, summary.words) for metric in metrics),
    ]
    return make_table(own, columns)


def _setting_column(rows: Sequence[ScaledRow], name: str, ranks: str) -> ColumnOf[ScaledRow]:
    column = Column(
        title=ranks if name == "world_size" else formatting.heading(name),
        is_text=not is_numeric(rows, name),
        is_setting=True,
    )

    def cell(row: ScaledRow) -> Cell:
        value = setting(row, name)
        text = "" if value is None else formatting.setting(name, value)
        return Cell(text=text, sort=str(value) if name.endswith("_bytes") else "")

    return column, cell


def _step(row: ScaledRow) -> Cell:
    if row.status != "ok":
        reason = row.error_message
        hint = shorten(str(reason), _HINT_CHARS) if reason is not None else ""
        return Cell(text=formatting.STATUS_WORDS[row.status], hint=hint)
    time_ms = row.step_ms_p50
    if time_ms is None:
        return _EMPTY
    return Cell(text=formatting.duration(time_ms), sort=f"{time_ms:.6g}")


def _half_width(row: ScaledRow) -> Cell:
    share = formatting.step_uncertainty(row)
    if share is None:
        return _EMPTY
    return Cell(text=formatting.half_width(share), sort=f"{share:.4g}")


def _marks(row: ScaledRow) -> Cell:
    found = marks(row)
    return Cell(text=found, hint="; ".join(MARKS[mark] for mark in found))


def _metric_column(metric: Metric, words: dict[str, str]) -> ColumnOf[ScaledRow]:
    """Return the column of a metric; a share is sorted by more digits than it shows."""
    whole = {"share": 1.0, "percent": 100.0}.get(metric.format)

    def cell(row: ScaledRow) -> Cell:
        value = value_of(row, metric)
        text = formatting.metric(metric, value)
        return Cell(text=text, sort=f"{value / whole:.5g}" if text and whole else "")

    is_speed_up = metric.name == "speed_up"
    column = metric_column(metric, formatting.MILLISECONDS, words, None)
    return column, _speed_up if is_speed_up else cell


def _speed_up(row: ScaledRow) -> Cell:
    if row.speed_up is None:
        reason = str(row.why) if row.why is not None else ""
        return Cell(text="–" if reason else "", hint=reason)
    return Cell(text=speed_up_words(row), sort=f"{row.speed_up:.6g}")
