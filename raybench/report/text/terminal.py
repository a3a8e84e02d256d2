"""Text for a terminal: its parts, and reports laid out of them.

What comes from the results is never taken for markup, and no character of it controls the terminal.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from raybench.report import formatting
from raybench.report.document import (
    HOW_TO_ADD_ROUNDS,
    Block,
    Line,
    Listing,
    Messages,
    Table,
)
from raybench.report.plain_text import printable

if TYPE_CHECKING:
    from raybench.report.summary import Summary

WIDTH = 80
# Longer lines of a text are hard to read; tables may be wider.
_PROSE = 100
# Names that take more of the width than this stand above what is said of them.
_WIDEST_NAMES = 0.45
# Settings are not folded below this: `world_size` stays whole.
SETTING_CHARS = 10


@dataclass(frozen=True, slots=True)
class Column:
    """folds_to: how narrow its text may be folded where the table is too wide; None: not at all."""

    name: str
    folds_to: int | None = None
    side: Literal["left", "right"] = "left"


def line(text: str, style: str = "") -> Text:
    """Make a paragraph of a text."""
    return Text(printable(text), style=style)


def whole(text: str, style: str = "") -> Text:
    """Make a line that is never folded, so that a path or a command can be copied."""
    return Text(printable(text), style=style, no_wrap=True)


def grid(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
) -> RichTable:
    """Make a table whose figures are never cut: its `min_width` is what it must have.

    styles: of each row; none where they are all plain.
    """
    least = _least(columns, rows)
    table = RichTable(
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        header_style="bold",
        min_width=sum(least) + 2 * (len(least) - 1),
    )
    for column, size in zip(columns, least, strict=True):
        name = printable(column.name)
        table.add_column(
            Text(name) if column.folds_to is None else _Head(name),
            justify=column.side,
            overflow="fold",
            no_wrap=column.folds_to is None,
            min_width=size,
        )
    lines = [[printable(cell) for cell in row] for row in rows]
    for style, block in _in_blocks(lines, styles or [""] * len(lines), least):
        table.add_row(*(Text("\n".join(cells)) for cells in zip(*block, strict=True)), style=style)
    return table


def min_width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """How wide a table is at least."""
    return sum(_least(columns, rows)) + 2 * (len(columns) - 1)


def _least(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """How wide each column is at least."""
    longest = [max(map(len, cells)) for cells in zip([c.name for c in columns], *rows, strict=True)]
    return [
        size
        if column.folds_to is None
        else min(size, max(column.folds_to, *map(len, _parts(column.name))))
        for column, size in zip(columns, longest, strict=True)
    ]


def _parts(name: str) -> list[str]:
    """`activation_checkpointing` as `activation_`, `checkpointing`."""
    return re.findall(r"[^_\s]*_+|[^_\s]+", name) or [name]


@dataclass(frozen=True, slots=True)
class _Head:
    """The head of a column that may be folded: between its words, never within one."""

    name: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, _parts(self.name))), len(self.name))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for part in re.findall(r"[^_\s]*_+|[^_\s]+\s*|\s+", self.name):
            if lines[-1] and len(lines[-1]) + len(part.rstrip()) > options.max_width:
                lines.append("")
            lines[-1] += part
        yield Text("\n".join(text.rstrip() for text in lines))


def _in_blocks(
    lines: Sequence[list[str]], styles: Sequence[str], least: Sequence[int]
) -> Iterator[tuple[str, list[list[str]]]]:
    """(style, lines): those that follow each other in one style and are never folded, together.

    As one row of the table they look the same, and are drawn several times as fast.
    """

    def kind(styled: tuple[str, list[str]]) -> tuple[str, bool]:
        fits = (cell_len(cell) <= size for cell, size in zip(styled[1], least, strict=True))
        return styled[0], all(fits)

    for (style, is_whole), found in groupby(zip(styles, lines, strict=True), kind):
        block = [line for _, line in found]
        yield from [(style, block)] if is_whole else [(style, [line]) for line in block]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Names and what is said of each: folded beside the name, or below it where names are long."""

    lines: Sequence[tuple[str, str]]
    side: Literal["left", "right"]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        longest = max((cell_len(name) for name, _ in self.lines), default=0)
        if longest > _WIDEST_NAMES * options.max_width:
            for name, text in self.lines:
                yield Text(name)
                yield Padding(Text(text, overflow="fold"), (0, 0, 0, 2))
            return
        table = RichTable.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, justify=self.side)
        table.add_column(overflow="fold")
        for name, text in self.lines:
            table.add_row(Text(name), Text(text))
        yield table


def pairs(
    lines: Iterable[tuple[str, str]], side: Literal["left", "right"] = "left"
) -> RenderableType:
    """Names and what is said of each."""
    return _Pairs([(printable(name), printable(text)) for name, text in lines], side)


def hanging(lead: str, text: str) -> RichTable:
    """Text that is folded beside what leads it."""
    table = RichTable.grid()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(lead), Text(printable(text)))
    return table


def render(parts: Iterable[RenderableType], width: int, color: bool) -> str:
    """Without colour no escape sequence at all; blanks at the ends of lines are dropped."""
    target = io.StringIO()
    console = Console(
        file=target,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        if isinstance(part, RichTable) and (part.min_width or 0) > width:
            # Lines that the terminal wraps are read more easily than figures that are cut.
            part.width = part.min_width
        is_whole = isinstance(part, Text) and bool(part.no_wrap)
        # Of the tables, those of `hanging` are a text.
        is_wide = isinstance(part, RichTable) and part.min_width is not None
        most = None if is_wide or is_whole else min(width, _PROSE)
        console.print(part, width=most, crop=False, soft_wrap=is_whole)
    return "\n".join(text.rstrip() for text in target.getvalue().splitlines()) + "\n"


_TONES = {"plain": "", "strong": "bold", "aside": "dim", "advice": "yellow", "alarm": "bold red"}
# Of the rows of a table, by what stands in its column of verdicts.
_VERDICTS = {"slower": "bold red", "faster": "bold green", "unclear": "yellow"}


def format_report(summary: Summary, *, width: int = WIDTH, color: bool = False) -> str:
    """Write the scaling report."""
    tables = summary.all_tables
    fitted = [narrow(table, width) for table in tables]
    lost, shared = formatting.some(summary.lost_nodes), formatting.settings(summary.shared)
    head = [
        line(formatting.title(summary.run), "bold"),
        *([line(formatting.sentence(summary.lead), "bold"), line("")] if summary.lead else []),
        line(summary.machine),
        line(f"{summary.course}; {summary.counts}"),
        *([line(f"nodes lost: {lost}")] if lost else []),
        line(formatting.versions(summary.versions)),
        *([line(f"in all points: {shared}")] if shared else []),
    ]
    body = summary.body(fitted, _omissions(tables, fitted, width))
    if summary.more_rounds:
        more = f"{summary.more_rounds.sentence}: {HOW_TO_ADD_ROUNDS}"
        body.append(Line(text=more, tone="aside", is_apart=True))
    return render([*head, *lay_out(body)], width, color)


def lay_out(blocks: Iterable[Block]) -> Iterator[RenderableType]:
    """Make the parts of a text of each block of a report."""
    for block in blocks:
        if not isinstance(block, Line) or block.is_apart:
            yield line("")
        match block:
            case Line():
                tone = _TONES[block.tone]
                yield whole(block.text, tone) if block.is_whole else line(block.text, tone)
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


def narrow(table: Table, width: int) -> Table:
    """Leave out of the table what it can do without, as far as it needs."""
    for name in table.optional:
        if min_width(table_columns(table), table.rows) <= width:
            break
        if name in table.columns:
            table = table.without(name)
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
