"""The section of all points: tables of what was measured, where the step goes, and memory. Pure.

A table begins with the settings that tell the points apart, and its points stand case by case, the
best first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from raybench.analysis import rows as metrics
from raybench.analysis.rows import ScaledRow, setting, value_of, workload_metrics
from raybench.records import Metric
from raybench.report import formatting
from raybench.report.answers import find_metric, rows_compared
from raybench.report.blocks import (
    MARKS_TITLE,
    Column,
    ColumnOf,
    Table,
    make_table,
    metric_column,
)
from raybench.report.messages import marks
from raybench.report.point_settings import DEGREES, setting_columns, short_name
from raybench.report.sections import Section

if TYPE_CHECKING:
    from raybench.report.summary import Summary

T = TypeVar("T")

# A short report shows so many points.
MOST_ROWS = 16
STEP_MEANING = (
    "the median over the iterations; of ranks in lockstep their median, else the slowest one's"
)
_PARTS_NOTE = (
    "The parts are those of the slowest rank, from instrumented steps after the timed ones, so "
    "their sum may differ from the step."
)
_MEMORY_NOTE = (
    "Memory: by torch's allocator in a step that was watched, on the device that needs most."
)


def table_of_points(
    summary: Summary,
    lines: Sequence[tuple[ScaledRow, T]],
    columns: Iterable[ColumnOf[T]],
    *,
    kind: str,
    note: str = "",
) -> Table:
    """Return a table with a row for each line: the settings of its point, then `columns`.

    lines: points with what `columns` write. kind: what the table shows, and the unit of its times.
    """
    names = summary.table_settings
    if any(name in DEGREES for name in names):
        words = Column(title="layout", is_text=True, is_setting=True, min_chars=20)
        settings: list[ColumnOf[ScaledRow]] = [
            (words, lambda row: short_name(row, names, summary.ranks))
        ]
    else:
        settings = setting_columns(summary.rows, names, summary.ranks)
    shown: list[ColumnOf[tuple[ScaledRow, T]]] = [
        *((column, lambda line, cell=cell: cell(line[0])) for column, cell in settings),
        *((column, lambda line, cell=cell: cell(line[1])) for column, cell in columns),
    ]
    subject = ", ".join(dict.fromkeys(row.workload for row in summary.rows))
    return make_table(lines, shown, subject=subject, kind=kind, note=note)


def answer_table(summary: Summary, limit: int | None = None) -> Table:
    """Return the table of the points with their steps, the answer of the run, and other rates.

    limit: of more points, only so many of those that finished on the most devices: the best of each
    case, then the second of each, and so on.
    """
    rows, unit = summary.ordered, summary.unit
    if limit is not None and len(rows) > limit:
        finished = [row for row in rows if row.status == "ok"] or rows
        most = max(row.world_size for row in finished)
        rows = _first_of_each_case(
            [row for row in finished if row.world_size == most], summary.case_settings, limit
        )
    meaning = f"{STEP_MEANING}. Rates follow the mean of the iterations. {summary.plus_minus}"
    explained = meaning.rstrip(". ") if any(row.status == "ok" for row in rows) else ""
    columns: list[ColumnOf[ScaledRow]] = [
        (
            Column(title=f"step {unit.name}", unit=unit.name, meaning=explained),
            lambda row: step_cell(row, unit),
        ),
        (Column(title=MARKS_TITLE, meaning=summary.marks_meaning, is_text=True), marks),
        *_rate_columns(summary),
    ]
    return table_of_points(summary, [(row, row) for row in rows], columns, kind=summary.alike)


def _first_of_each_case(
    rows: Sequence[ScaledRow], cases: Sequence[str], limit: int
) -> list[ScaledRow]:
    """Return `limit` of the rows in their order: the first of each case before any second one."""
    met: Counter[tuple[str, ...]] = Counter()
    places = []
    for index, row in enumerate(rows):
        case = tuple(str(setting(row, name)) for name in cases)
        places.append((met[case], index))
        met[case] += 1
    return [rows[index] for index in sorted(index for _, index in sorted(places)[:limit])]


def step_cell(row: ScaledRow, unit: formatting.Unit) -> str:
    """Write the step time with its ±, or how a point without one ended."""
    is_ok = row.status == "ok"
    return formatting.step_in(unit, row) if is_ok else formatting.STATUS_WORDS[row.status]


def _rate_columns(summary: Summary) -> Iterator[ColumnOf[ScaledRow]]:
    """Yield the columns of the answer, of what steps reach, and of the workload's own metrics.

    The answer is never left out for room, and throughput last.
    """
    rows, shows = summary.rows, metrics.SCALING if summary.has_throughput else metrics.RATES
    own, answer = workload_metrics(rows), find_metric(rows, summary.answer.metric)
    # Baseline points alone have a speed-up of 1, which says nothing.
    hidden = {"step_ms_p50", *(() if rows_compared(rows) else ("speed_up", "efficiency"))}
    # A search is answered by a setting, which has its column already.
    hidden |= {"batch_size", "global_batch_size"}
    shown = [*([answer] if answer else []), *shows.metrics, *own]
    first_dropped = [
        *(one for one in shows.optional if one.name != "throughput"),
        *reversed(own),
        metrics.BY_NAME["throughput"],
    ]
    for metric in dict.fromkeys(one for one in shown if one.name not in hidden):
        is_kept = metric == answer or metric not in first_dropped
        yield _metric_column(summary, metric, None if is_kept else first_dropped.index(metric))


def _metric_column(
    summary: Summary, metric: Metric, drop: int | None = None
) -> ColumnOf[ScaledRow]:
    unit = summary.unit
    return (
        metric_column(metric, unit, summary.words, drop),
        lambda row: formatting.metric(metric, value_of(row, metric), unit),
    )


_BROKEN_DOWN = ("compute_ms", "optimizer_ms", "comm_exposed_ms", "achieved_tflops_per_device")


def point_tables(summary: Summary) -> Iterator[Table]:
    """Yield the tables of all points: what was measured, where steps go, and their memory."""
    yield answer_table(summary)
    if not summary.has_throughput:
        return
    unit = summary.unit
    apart = [
        row
        for row in summary.ordered
        if row.why_no_breakdown or any(getattr(row, name) is not None for name in _BROKEN_DOWN)
    ]
    parts: list[ColumnOf[ScaledRow]] = [
        (
            Column(title=MARKS_TITLE, is_text=True),
            lambda row: "b" if row.why_no_breakdown else "",
        ),
        (Column(title="step"), lambda row: formatting.time_in(unit, row.step_ms_p50)),
    ]
    watched = [row for row in summary.ordered if row.mem_parameters_bytes is not None]
    for kind, rows, shows, first, note in (
        (f"where the step goes, {unit.name}", apart, metrics.PARTS, parts, _PARTS_NOTE),
        ("memory at its peak, GiB", watched, metrics.MEMORY, [], _MEMORY_NOTE),
    ):
        # Where there is no room, the optional ones are left out first.
        order = list(dict.fromkeys([*shows.optional, *shows.metrics]))
        columns = [
            *first,
            *(_metric_column(summary, metric, order.index(metric)) for metric in shows.metrics),
        ]
        if rows:
            lines = [(row, row) for row in rows]
            yield table_of_points(summary, lines, columns, kind=kind, note=note)


SECTION = Section(
    anchor="points",
    title="All points",
    order=20,
    applies=lambda report: bool(report.rows),
    blocks=point_tables,
)
