"""Results as text for a terminal. What comes from the results is never taken for markup."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table as RichTable

from raybench.report import best, largest_batches, wording
from raybench.report.console import (
    SETTING_CHARS,
    WIDTH,
    Column,
    grid,
    hanging,
    line,
    pairs,
    rendered,
)
from raybench.report.said import Said, in_short, some
from raybench.report.summary import OVER_FP32, Summary
from raybench.report.tables import Table


def format_report(summary: Summary, *, width: int = WIDTH, color: bool = False) -> str:
    """The scaling report."""
    run = summary.run
    parts: list[RenderableType] = [
        line(wording.title(run), "bold"),
        *([line(wording.sentence(summary.lead), "bold"), line("")] if summary.lead else []),
        line(summary.machine),
        line(f"{wording.when(run.started_at)}, {wording.course(run)}; {summary.counts}"),
        *([line(f"nodes lost: {some(summary.lost_nodes)}")] if summary.lost_nodes else []),
        line(wording.versions(summary.versions)),
        *([line(f"in all points: {wording.settings(summary.shared)}")] if summary.shared else []),
    ]
    parts += _findings(summary)
    for table in summary.tables:
        parts += [line(""), *_series_table(table, width)]
    if not summary.tables:
        parts += [line(""), line("No point has been finished yet.")]
    for paragraph in summary.explanation:
        parts += [line(""), line(paragraph, "dim")]
    parts += _said("Failed and skipped points", summary.failures)
    parts += _said("Without speed-up", summary.without_speed_up)
    parts += _said("Warnings", summary.warnings)
    return rendered(parts, width, color)


def _findings(summary: Summary) -> list[RenderableType]:
    baseline = summary.run.baseline
    found = (
        (largest_batches.TITLE, largest_batches.said(summary.largest_batches, summary.ranks)),
        (wording.over(baseline), summary.findings),
        (wording.lost(baseline), summary.losses),
        (best.TITLE, summary.best),
        (wording.over(OVER_FP32), summary.precision),
    )
    parts: list[RenderableType] = []
    for title, lines in found:
        if lines:
            parts += [line(""), line(title, "bold"), pairs(lines, side="right")]
    return parts


def _series_table(table: Table, width: int) -> list[RenderableType]:
    places = list(range(len(table.columns)))
    shown = _places(table, places)
    for name in table.optional:
        if name in table.columns and (shown.min_width or 0) > width:
            places.remove(table.columns.index(name))
            shown = _places(table, places)
    what = f"{table.workload} {wording.settings(table.params)}".strip()
    return [line(": ".join(filter(None, (what, table.kind))), "bold"), shown]


def _places(table: Table, places: Sequence[int]) -> RichTable:
    """Some columns of a table."""
    columns = [
        Column(
            table.columns[place],
            folds_to=SETTING_CHARS if place < table.settings else None,
            side="left" if table.columns[place] in table.texts else "right",
        )
        for place in places
    ]
    return grid(columns, [[row[place] for place in places] for row in table.rows])


def _said(title: str, all_said: Sequence[Said]) -> list[RenderableType]:
    if not all_said:
        return []
    told, more = in_short(all_said)
    lines: list[RenderableType] = [hanging(lead, text) for lead, text in told]
    lines += [line(more)] if more else []
    return [line(""), line(title, "bold"), *lines]
