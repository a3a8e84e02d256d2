"""A document: blocks (lines, listings, tables and their legend) that every format can show.

The report of a run, a comparison, a history and predictions are documents. To add a kind, inherit
from `Document` and give it to `format_document`, which writes it for a terminal, as Markdown or as
JSON. Blocks hold text from the results as it is: the functions here that write a format, and the
templates of html/, make it harmless. Nothing here loads pandas.
"""

from __future__ import annotations

import io
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import datetime
from enum import Enum
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from raybench.report.formatting import one_line, plain, sentence
from raybench.results.columns import SCHEMA_VERSION

if TYPE_CHECKING:
    import pandas as pd

    from raybench.records.metrics import Metric
    from raybench.report.formatting import Unit

T = TypeVar("T")

WIDTH = 80
# What Markdown or HTML could take for markup, anywhere in a line.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!&@$])")
_BACKTICKS = re.compile(r"`+")
_TONES = {"strong": "**{}**", "good": "**{}**", "alarm": "> **{}**"}
MARKS_TITLE = "!"
# Terminals do not fold cells of settings below this: `world_size` stays whole.
SETTING_CHARS = 10

Tone = Literal["plain", "strong", "aside", "advice", "alarm", "good"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A paragraph.

    is_apart: a blank line comes before it. is_whole: it is never folded, so that a path or a
    command in it can be copied. Blanks of its text are kept, but not in Markdown.
    """

    text: str
    tone: Tone = "plain"
    is_apart: bool = False
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Names with a text for each, under a title (which may be empty).

    is_quoted: the texts come from results, so Markdown shows them as code; a terminal aligns the
    names to the left. otherwise: what is shown where there are no lines.
    """

    title: str = ""
    lines: Sequence[tuple[str, str]]
    is_quoted: bool = False
    otherwise: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of a table.

    text: as it is shown. sort: the value that a page sorts by, where the text is no plain number.
    hint: what a page shows when the cell is pointed at. tone: other than plain, the colour of its
    row on a terminal.
    """

    text: str
    sort: str = ""
    hint: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """A column of a table.

    title: its head, with the unit where the title of the table does not name it. meaning: sentences
    without the first capital and the last full stop, for legends and for the hint of the head.
    is_text: aligned to the left. is_setting: it tells
    which point a row is about; pages can filter by it, and it stays where no row has a value.
    min_chars: terminals may fold its cells to this width; None: they are never folded. drop: where
    a table is too wide, the column with the lowest number is left out first; None: never.
    """

    title: str
    meaning: str = ""
    is_text: bool = False
    is_setting: bool = False
    min_chars: int | None = None
    drop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells; a cell that is nothing but a text may be a plain string.

    subject: the workload of its points, or what else all rows are about. kind: what the table
    shows, and the unit of its columns. note: sentences that a reader needs beside the meanings of
    the columns. narrower: what a terminal shows instead if this table does not fit its width.
    summands: heads of the columns that add up to the step.
    """

    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    subject: str = ""
    kind: str = ""
    note: str = ""
    narrower: Table | None = None
    summands: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Return subject and kind: `mlp: where the step goes, ms`; "" if both are empty."""
        return ": ".join(filter(None, (self.subject, self.kind)))

    @property
    def titles(self) -> tuple[str, ...]:
        """Return the heads of the columns."""
        return tuple(column.title for column in self.columns)

    @property
    def texts(self) -> tuple[tuple[str, ...], ...]:
        """Return the texts of all cells, row by row."""
        return tuple(tuple(map(text_of, row)) for row in self.rows)

    def legend(self) -> list[tuple[str, str]]:
        """Return each column that has a meaning with it, then ("", note) if there is a note."""
        meanings = [(one.title, sentence(one.meaning)) for one in self.columns if one.meaning]
        note = " ".join(filter(None, (self.note, self._sum_note())))
        return [*meanings, *([("", note)] if note else [])]

    def _sum_note(self) -> str:
        """Return which columns add up to the step; "" if a terminal left one of them out."""
        if len(self.summands) < 2 or not set(self.summands) <= set(self.titles):
            return ""
        *others, last = self.summands
        return f"The columns {', '.join(others)} and {last} add up to the step."


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend:
    """Explains the columns of all tables before it, below each table, and each column once.

    A terminal names here the columns that it left out; these are not explained.
    """


Block = Line | Listing | Table | Legend
# A column, and the function that writes the cell of an item in it.
ColumnOf = tuple[TableColumn, Callable[[T], str | Cell]]


def column(title: str, cell: Callable[[T], str | Cell], **facts: Any) -> ColumnOf[T]:
    """Return (Column, cell) for `make_table`. cell: makes a row's cell. facts: fields of Column."""
    return TableColumn(title=title, **facts), cell


def text_of(cell: str | Cell) -> str:
    """Return the text of a cell."""
    return cell if isinstance(cell, str) else cell.text


def make_table(
    rows: Sequence[T],
    columns: Iterable[ColumnOf[T]],
    *,
    subject: str = "",
    kind: str = "",
    note: str = "",
) -> Table:
    """Return a table: one row for each of `rows`, a column for each of `columns` (see `column`).

    Columns without a filled cell are left out, but for settings; without columns it has no rows.
    """
    filled = [(column, [cell(row) for row in rows]) for column, cell in columns]
    kept = [
        (column, cells) for column, cells in filled if column.is_setting or any(map(text_of, cells))
    ]
    return Table(
        columns=tuple(column for column, _ in kept),
        rows=tuple(zip(*(cells for _, cells in kept), strict=True)),
        subject=subject,
        kind=kind,
        note=note,
    )


def legends(tables: Iterable[Table]) -> Iterator[list[tuple[str, str]]]:
    """Yield the legend of each table, without what an earlier legend has."""
    said: set[tuple[str, str]] = set()
    for table in tables:
        new = [entry for entry in table.legend() if entry not in said]
        said.update(new)
        yield new


def legend_paragraphs(tables: Iterable[Table]) -> Iterator[str]:
    """Yield each of `legends` as a paragraph, in which each text follows its head and a colon."""
    for legend in filter(None, legends(tables)):
        yield " ".join(": ".join(filter(None, entry)) for entry in legend)


def metric_column(
    metric: Metric, unit: Unit, words: dict[str, str], drop: int | None
) -> TableColumn:
    """Return the column of a metric. unit: of times. drop: as of `TableColumn`.

    words: name -> text that replaces {name} in its meaning; a {name} without a text stays there.
    With a text for "items", as "samples", the column of the throughput has the title "samples/s".
    """
    meaning = metric.meaning or metric.description
    for name, word in words.items():
        meaning = meaning.replace(f"{{{name}}}", word)
    is_rate = metric.name == "throughput" and "items" in words
    heading = f"{metric.title} {unit.name}" if metric.format == "time" else metric.title
    return TableColumn(
        title=f"{words['items']}/s" if is_rate else heading,
        meaning=meaning.removesuffix("."),
        drop=drop,
    )


class Document(ABC):
    """What can be shown in every format. To be inherited from."""

    @property
    def title(self) -> str:
        """Return the heading: the answer, or what the document is about; "" where it has none."""
        return ""

    @property
    def tone(self) -> Tone:
        """Return how a terminal shows the title."""
        return "strong"

    @abstractmethod
    def blocks(self) -> Iterable[Block]:
        """Return what follows the title, in order."""

    @abstractmethod
    def members(self) -> Mapping[str, Any]:
        """Return the members of its JSON object, as `format_object` takes them."""


def format_document(
    document: Document, kind: str, *, width: int = WIDTH, color: bool = False
) -> str:
    """Return the document as text that ends in a line break.

    kind: "json", "md" or "terminal". width, color: as of `render_text`, for "terminal" alone.
    """
    if kind == "json":
        return format_object(**document.members())
    if kind == "md":
        heading = [f"## {escape(document.title)}"] if document.title else []
        return "\n\n".join([*heading, *_markdown(document.blocks())]) + "\n"
    head = [Line(text=document.title, tone=document.tone)] if document.title else []
    return render_text([*head, *document.blocks()], width=width, color=color)


def _markdown(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield each block as paragraphs, a list or a table of GitHub-flavoured Markdown."""
    blocks = list(blocks)
    of_tables = legends(_explained(blocks))
    for block in blocks:
        match block:
            case Line():
                yield _TONES.get(block.tone, "{}").format(escape(block.text))
            case Listing():
                quote = code if block.is_quoted else escape
                if block.title:
                    yield f"**{escape(block.title)}**"
                items = [f"* {escape(name)}: {quote(text)}" for name, text in block.lines]
                yield "\n".join(items) or escape(block.otherwise)
            case Table():
                if block.title:
                    yield "### " + escape(block.title)
                aligned = [":---" if column.is_text else "---:" for column in block.columns]
                head, *rows = (
                    [escape(text_of(cell)) for cell in row] for row in (block.titles, *block.rows)
                )
                yield "\n".join(f"| {' | '.join(row)} |" for row in (head, aligned, *rows))
                legend = next(of_tables, [])
                items = [f"* {escape(head)}: {escape(text)}" for head, text in legend if head]
                notes = [escape(text) for head, text in legend if not head]
                yield from filter(None, ["\n".join(items), *notes])


def _explained(blocks: Sequence[Block]) -> list[Table]:
    """Return the tables that a `Legend` follows."""
    last = max((at for at, block in enumerate(blocks) if isinstance(block, Legend)), default=0)
    return [block for block in blocks[:last] if isinstance(block, Table)]


def escape(text: str) -> str:
    """Return the text on one line (see `plain`), escaped for the inside of a line of Markdown."""
    return _SPECIAL.sub(r"\\\1", plain(text))


def code(text: str) -> str:
    """Return the text on one line as a code span of Markdown; not for tables: | ends a cell."""
    one_line = plain(text)
    longest = max((len(run) for run in _BACKTICKS.findall(one_line)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if not one_line or one_line != one_line.strip("`") else ""
    return f"{fence}{pad}{one_line}{pad}{fence}"


def format_object(**members: Any) -> str:
    """Return a JSON object of `schema_version` and the members, as text that ends in a line break.

    Values are as of `jsonable`, not rounded; TypeError for one that JSON cannot hold, as a set. It
    is ASCII: nothing controls a terminal.
    """
    content = jsonable({"schema_version": SCHEMA_VERSION, **members})
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return column -> value for each row of a table, with None for cells of NaN, NaT and NA.

    Columns of the name of an integer column of `TABLES` have integers, also if nulls made floats.
    """
    from raybench.results.tables import TABLES  # loads numpy, which no table of text needs

    integers = {one.name for one in chain(*TABLES.values()) if one.kind == "int64"}
    known = frame.astype(object).where(frame.notna(), None)
    return [
        {
            str(name): int(value) if name in integers and isinstance(value, float) else value
            for name, value in row.items()
        }
        for row in known.to_dict("records")
    ]


def jsonable(value: Any) -> Any:
    """Return the value as JSON can hold it.

    NaN, NaT and infinities become None, datetimes (not numpy's) ISO 8601, arrays and tuples lists,
    numbers of numpy plain ones, keys text, a StrEnum or IntEnum its value, a dataclass an object of
    its fields. All else stays as it is, but NA of pandas raises TypeError (see `records`).
    """
    if isinstance(value, str | bool | int) or value is None:
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Mapping):
        return {str(name): jsonable(item) for name, item in value.items()}
    if is_dataclass(value):
        return {one.name: jsonable(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if value != value or (isinstance(value, float) and math.isinf(value)):
        return None
    return value.isoformat() if isinstance(value, datetime) else value


# Longer lines of prose are hard to read; tables may be wider.
_PROSE_WIDTH = 100
# Where names take more than this share of the width, their texts stand below them.
_WIDEST_NAMES = 0.45
_GAP = 2
_STYLES: dict[Tone, str] = {
    "plain": "",
    "strong": "bold",
    "aside": "dim",
    "advice": "yellow",
    "alarm": "bold red",
    "good": "bold green",
}


def render_text(blocks: Iterable[Block], *, width: int = WIDTH, color: bool = False) -> str:
    """Return the blocks as text that ends in a line break, folded to `width`, or 100 if less.

    Without colour it has no escape sequence. Lines with `is_whole` and tables may be wider.
    """
    return render_parts(_parts(blocks, width), width, color)


def render_parts(parts: Iterable[RenderableType], width: int, color: bool) -> str:
    """Return what rich draws, ending in a line break; without colour no line ends in blanks.

    All but a Text with `no_wrap` and a table with `min_width` is at most `width` and 100 wide.
    parts: rich reads a str as its markup and keeps escape sequences: give Text of `one_line`.
    """
    target = io.StringIO()
    console = Console(
        file=target,
        width=width,
        force_terminal=color,
        force_jupyter=False,  # in a notebook it would show the text, and leave none to return
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        is_whole = isinstance(part, Text) and bool(part.no_wrap)
        is_table = isinstance(part, RichTable) and part.min_width is not None
        most = None if is_table or is_whole else min(width, _PROSE_WIDTH)
        console.print(part, width=most, crop=False, soft_wrap=is_whole)
    text = target.getvalue().replace(_BOUND, " ")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


# A number is never folded from its unit.
_UNIT = re.compile(r"(?<=[\d.]) (?=(%|ms|µs|s|GiB|MiB|GB/s|x)(?![\w/]))")
# A character without a meaning, in place of such a blank: rich folds at every blank of Unicode.
_BOUND = "\ue000"


def _prose(text: str) -> str:
    """Return a text on one line in which numbers are bound to their units."""
    return _UNIT.sub(_BOUND, one_line(text))


def _parts(blocks: Iterable[Block], width: int) -> Iterator[RenderableType]:
    """Yield what rich draws of each block, and blank lines between them."""
    blocks = list(blocks)
    explained = [fit(table, width) for table in _explained(blocks)]
    of_tables = legends(fitted for fitted, _ in explained)
    pending = iter(explained)
    for place, block in enumerate(blocks):
        if place and not isinstance(block, Legend) and getattr(block, "is_apart", True):
            yield Text("")
        match block:
            case Line():
                style, whole = _STYLES[block.tone], block.is_whole or None
                text = one_line(block.text) if block.is_whole else _prose(block.text)
                yield Text(text, style=style, no_wrap=whole)
            case Listing():
                yield from _listing(block, width)
            case Table():
                fitted, _ = next(pending, None) or fit(block, width)
                yield from _titled(fitted.title)
                yield _grid(fitted, width)
                if legend := next(of_tables, []):
                    yield from (Text(""), *_legend(legend))
            case Legend():
                every = (title for _, titles in explained for title in titles)
                if hidden := dict.fromkeys(every):
                    left_out = (
                        f"Left out to fit {width} columns: {', '.join(hidden)}. A wider terminal "
                        "or `--format md` shows them."
                    )
                    yield from (Text(""), Text(_prose(left_out), style="dim"))


def _legend(legend: Sequence[tuple[str, str]]) -> Iterator[RenderableType]:
    """Yield the heads of columns beside their meanings, then the note below them."""
    heads = RichTable.grid(padding=(0, _GAP, 0, 0))
    heads.add_column(no_wrap=True)
    heads.add_column(overflow="fold")
    for head, text in legend:
        if head:
            heads.add_row(Text(one_line(head), style="dim"), Text(_prose(text), style="dim"))
    if heads.row_count:
        yield heads
    yield from (Text(_prose(text), style="dim") for head, text in legend if not head)


def _titled(title: str) -> list[Text]:
    return [Text(_prose(title), style="bold")] if title else []


def _listing(block: Listing, width: int) -> Iterator[RenderableType]:
    """Yield the title, then texts beside their names, or below them where names are long."""
    yield from _titled(block.title)
    lines = [(one_line(name), _prose(text)) for name, text in block.lines]
    longest = max((cell_len(name) for name, _ in lines), default=0)
    if not lines:
        yield Text(one_line(block.otherwise))
    elif longest > _WIDEST_NAMES * min(width, _PROSE_WIDTH):
        for name, text in lines:
            yield Text(name)
            yield Padding(Text(text, overflow="fold"), (0, 0, 0, 2))
    else:
        table = RichTable.grid(padding=(0, _GAP, 0, 0))
        table.add_column(no_wrap=True, justify="left" if block.is_quoted else "right")
        table.add_column(overflow="fold")
        for name, text in lines:
            table.add_row(Text(name), Text(text))
        yield table


def fit(table: Table, width: int) -> tuple[Table, list[str]]:
    """Return the table made to fit `width`, and the titles of the columns left out.

    Columns with a `drop` are left out, the lowest first; if that is not enough, `narrower` is made
    to fit instead, and the titles are of its columns alone. The result may still be too wide.
    """
    left_out = []
    droppable = [one for one in table.columns if one.drop is not None]
    for column in sorted(droppable, key=lambda one: one.drop or 0):
        if _min_width(table) <= width:
            break
        at = table.columns.index(column)
        rows = tuple((*row[:at], *row[at + 1 :]) for row in table.rows)
        table = replace(table, columns=(*table.columns[:at], *table.columns[at + 1 :]), rows=rows)
        left_out.append(column.title)
    if table.narrower is not None and _min_width(table) > width:
        return fit(table.narrower, width)
    return table, left_out


def _min_width(table: Table) -> int:
    """Return the least width of a table in columns of the terminal, with its gaps."""
    return sum(_min_widths(table)) + _GAP * (len(table.columns) - 1)


def _min_widths(table: Table) -> list[int]:
    """Return the least width of each column: its longest cell, or less where it may be folded."""
    cells = zip(*table.texts, strict=True) if table.rows else [()] * len(table.columns)
    widths = []
    for column, texts in zip(table.columns, cells, strict=True):
        head = max(map(len, _head(column, texts)))
        longest = max((cell_len(text) for text in texts), default=0)
        least = longest if column.min_chars is None else min(longest, column.min_chars)
        widths.append(max(head, least))
    return widths


def _head(column: TableColumn, texts: Iterable[str]) -> list[str]:
    """Return the lines of a column's head.

    The head of a setting is folded between its words, `activation_` and `checkpointing`, where it
    is wider than all cells.
    """
    title = one_line(column.title)
    if column.min_chars is None:
        return [title]
    most = max((column.min_chars, *map(len, texts)))
    lines = [""]
    for part in re.findall(r"[^_\s]*_+|[^_\s]+\s*|\s+", title):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > most:
            lines.append("")
        lines[-1] += part
    return [text.rstrip() for text in lines]


def _grid(table: Table, width: int) -> RichTable:
    """Return rich's table; where it is too wide for `width`, with one blank between its columns.

    Where that cannot fit either, the terminal wraps its lines and cuts no figure.
    """
    least = _min_widths(table)
    gap = _GAP if _min_width(table) <= width else 1
    min_width = sum(least) + gap * (len(least) - 1)
    grid = RichTable(
        box=None,
        padding=(0, gap, 0, 0),
        pad_edge=False,
        header_style="bold",
        min_width=min_width,
        width=min_width if min_width > width else None,
        show_header=any(table.titles),
    )
    cells = list(zip(*table.texts, strict=True)) or [()] * len(least)
    for column, size, texts in zip(table.columns, least, cells, strict=True):
        grid.add_column(
            Text("\n".join(_head(column, texts))),
            justify="left" if column.is_text else "right",
            overflow="fold",
            no_wrap=column.min_chars is None,
            min_width=size,
        )

    # Rows that are never folded are drawn as one: it looks the same and is several times as fast.
    def look(row: tuple[str | Cell, ...]) -> tuple[str, bool]:
        tones = (cell.tone for cell in row if isinstance(cell, Cell) and cell.tone != "plain")
        fits = all(cell_len(text_of(c)) <= size for c, size in zip(row, least, strict=True))
        return _STYLES[next(tones, "plain")], fits

    for (style, is_short), rows in groupby(table.rows, look):
        for block in [list(rows)] if is_short else [[row] for row in rows]:
            lines = zip(*([one_line(text_of(cell)) for cell in row] for row in block), strict=True)
            grid.add_row(*(Text("\n".join(texts)) for texts in lines), style=style)
    return grid
