"""Results as text for a terminal. What comes from the results is never taken for markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import RenderableType

from raybench.report import formatting
from raybench.report.summary import MessageGroup, Summary, first_messages, some
from raybench.report.tables import MARK_COLUMN, WHERE_IT_GOES, Table, explain
from raybench.report.text.console import (
    SETTING_CHARS,
    WIDTH,
    Column,
    grid,
    hanging,
    line,
    min_width,
    pairs,
    render,
)

_HOW_TO_ADD_ROUNDS = "sweep JOB --resume RUN --set measure.rounds=3"


def format_report(summary: Summary, *, width: int = WIDTH, color: bool = False) -> str:
    """Write the scaling report."""
    run = summary.run
    parts: list[RenderableType] = [
        line(formatting.title(run), "bold"),
        *([line(formatting.sentence(summary.lead), "bold"), line("")] if summary.lead else []),
        line(summary.machine),
        line(f"{formatting.when(run.started_at)}, {formatting.course(run)}; {summary.counts}"),
        *([line(f"nodes lost: {some(summary.lost_nodes)}")] if summary.lost_nodes else []),
        line(formatting.versions(summary.versions)),
        *(
            [line(f"in all points: {formatting.settings(summary.shared)}")]
            if summary.shared
            else []
        ),
    ]
    parts += [*_findings(summary), *_tables(summary, width)]
    parts += _group_lines("Failed and skipped points", summary.failures)
    parts += _group_lines("Without speed-up", summary.without_speed_up)
    parts += _group_lines("Warnings", summary.warnings)
    if summary.more_rounds is not None:
        parts += [line(""), line(f"{summary.more_rounds.sentence}: {_HOW_TO_ADD_ROUNDS}", "dim")]
    return render(parts, width, color)


def _findings(summary: Summary) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for title, lines in summary.sections:
        parts += [line(""), line(title, "bold"), pairs(lines, side="right")]
    return parts


def _tables(summary: Summary, width: int) -> list[RenderableType]:
    """Make the tables as they fit, and say what their columns mean."""
    if not summary.tables:
        return [line(""), line("No point has been finished yet.")]
    tables = (*summary.tables, *summary.region_tables)
    fitted = [_narrow(table, width) for table in tables]
    joined = [_widen(table, width) for table in _join(fitted, width)]
    parts: list[RenderableType] = []
    for table in joined:
        what = f"{table.workload} {formatting.settings(table.params)}".strip()
        parts += [line(""), line(": ".join(filter(None, (what, table.kind))), "bold")]
        parts += [grid(table_columns(table), table.rows)]
    notes = explain(
        joined, summary.run.baseline, summary.ranks, summary.plus_minus, by_mean=summary.by_mean
    )
    for paragraph in (*notes, *_omissions(tables, fitted, width)):
        parts += [line(""), line(paragraph, "dim")]
    return parts


def _narrow(table: Table, width: int) -> Table:
    """Leave out of the table what it can do without, as far as it needs."""
    for name in table.optional:
        if min_width(table_columns(table), table.rows) <= width:
            break
        if name in table.columns:
            table = table.without(name)
    return table


def _join(tables: Sequence[Table], width: int) -> list[Table]:
    """Where the steps go beside the points, where both fit and are of the same points."""
    joined: list[Table] = []
    for table in tables:
        wide = _side_by_side(joined[-1], table) if joined else None
        if wide is not None and min_width(table_columns(wide), wide.rows) <= width:
            joined[-1] = wide
        else:
            joined.append(table)
    return joined


def _side_by_side(points: Table, parts: Table) -> Table | None:
    own = [row[: points.settings] for row in points.rows]
    if not parts.kind.startswith(WHERE_IT_GOES) or own != [r[: parts.settings] for r in parts.rows]:
        return None
    wide = replace(points, kind="; ".join(filter(None, (points.kind, parts.kind))))
    for place, name in enumerate(parts.columns):
        if place >= parts.settings and name not in (MARK_COLUMN, "step"):
            wide = wide.with_column(name, [row[place] for row in parts.rows])
    return wide


def _widen(table: Table, width: int) -> Table:
    """Add columns to the table where there is room beside all of its own."""
    for name, cells in table.extras.items():
        wider = table.with_column(name, cells)
        if min_width(table_columns(wider), wider.rows) > width:
            break
        table = wider
    return table


def _omissions(tables: Sequence[Table], fitted: Sequence[Table], width: int) -> list[str]:
    """Which columns had no room, and where they are."""
    pairs_of = zip(tables, fitted, strict=True)
    gone = dict.fromkeys(
        n for all_, some in pairs_of for n in all_.columns if n not in some.columns
    )
    if not gone:
        return []
    return [
        f"Left out to fit {width} columns: {', '.join(gone)}. A wider terminal, COLUMNS=120 or "
        "`--format md` shows them."
    ]


def table_columns(table: Table) -> list[Column]:
    """List the columns of a table: settings may be folded, texts stand to the left."""
    return [
        Column(
            name,
            folds_to=SETTING_CHARS if place < table.settings else None,
            side="left" if name in table.texts else "right",
        )
        for place, name in enumerate(table.columns)
    ]


def _group_lines(title: str, groups: Sequence[MessageGroup]) -> list[RenderableType]:
    if not groups:
        return []
    phrases, more = first_messages(groups)
    lines: list[RenderableType] = [hanging(lead, text) for lead, text in phrases]
    lines += [line(more)] if more else []
    return [line(""), line(title, "bold"), *lines]
