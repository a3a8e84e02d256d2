"""Reports as text for a terminal. What comes from the results is never taken for markup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rich.console import RenderableType

from raybench.report.document import (
    MARK_COLUMN,
    WHERE_IT_GOES,
    Block,
    Line,
    Listing,
    Messages,
    Table,
)
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

if TYPE_CHECKING:
    from raybench.report.summary import Summary

_HOW_TO_ADD_ROUNDS = "sweep JOB --resume RUN --set measure.rounds=3"
_TONES = {"plain": "", "strong": "bold", "aside": "dim", "advice": "yellow", "alarm": "bold red"}
# Of the rows of a table, by what stands in its column of verdicts.
_VERDICTS = {"slower": "bold red", "faster": "bold green", "unclear": "yellow"}


def format_report(summary: Summary, *, width: int = WIDTH, color: bool = False) -> str:
    """Write the scaling report."""
    report = summary.report
    fitted = [_narrow(table, width) for table in report.tables]
    joined = [_widen(table, width) for table in _join(fitted, width)]
    lines = [
        *([line(report.lead, "bold"), line("")] if report.lead else []),
        line(report.machine),
        line(f"{report.course}; {report.counts}"),
        *([line(f"nodes lost: {report.lost_nodes}")] if report.lost_nodes else []),
        line(report.versions),
        *([line(f"in all points: {report.shared}")] if report.shared else []),
    ]
    body = report.body(joined, _omissions(report.tables, fitted, width))
    if report.more_rounds:
        more = f"{report.more_rounds}: {_HOW_TO_ADD_ROUNDS}"
        body.append(Line(text=more, tone="aside", is_apart=True))
    return render([line(report.title, "bold"), *lines, *lay_out(body)], width, color)


def lay_out(blocks: Iterable[Block]) -> Iterator[RenderableType]:
    """Make the parts of a text of each block of a report."""
    for block in blocks:
        if not isinstance(block, Line) or block.is_apart:
            yield line("")
        match block:
            case Line():
                yield line(block.text, _TONES[block.tone])
            case Listing():
                side: Literal["left", "right"] = "left" if block.is_quoted else "right"
                yield line(block.title, "bold")
                yield pairs(block.lines, side) if block.lines else line(block.otherwise)
            case Messages():
                yield line(block.title, "bold")
                yield from [hanging(lead, text) for lead, text in block.lines]
                yield from [line(block.rest)] if block.rest else []
            case Table():
                if block.title:
                    yield line(block.title, "bold")
                styles = [_VERDICTS.get(row[-1], "") for row in block.rows]
                is_judged = block.columns[-1] == "verdict"
                yield grid(table_columns(block), block.rows, styles if is_judged else ())


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
