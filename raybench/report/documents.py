"""A document: blocks (lines, listings, tables and their legend) that every format can show.

The report of a run, a comparison, a history and predictions are documents. To add a kind, inherit
from `Document` and give it to `format_document`, which writes it for a terminal, as Markdown or as
JSON. Blocks hold texts from the results unescaped: the functions that write a format, and the
templates of html/, escape them. Nothing here loads pandas.
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
Item = TypeVar("Item")

# Default width of a terminal in characters.
WIDTH = 80
# Characters that may be markup of Markdown or HTML.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!&@$])")
_BACKTICKS = re.compile(r"`+")
_MARKDOWN_TONES = {"strong": "**{}**", "good": "**{}**", "alarm": "> **{}**"}
# Heading of the column with the marks of doubts.
MARKS_TITLE = "!"
# Narrowest column of a setting on a terminal: `world_size` stays whole.
SETTING_CHARS = 10

Tone = Literal["plain", "strong", "aside", "advice", "alarm", "good"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A paragraph."""

    text: str
    tone: Tone = "plain"
    # Preceded by a blank line.
    is_apart: bool = False
    # Never folded, so that a path or a command can be copied.
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Names with a text for each, under a title."""

    # May be empty.
    title: str = ""
    lines: Sequence[tuple[str, str]]
    # The texts come from results: Markdown shows them as code, terminals align names to the left.
    is_quoted: bool = False
    # Text to show if `lines` is empty.
    otherwise: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of a table."""

    text: str
    # The value by which a page sorts; needed if the text is not a plain number.
    sort: str = ""
    # The tooltip on a page.
    hint: str = ""
    # Colour of the whole row on a terminal.
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownColumn:
    """A column of a table."""

    # The heading, with the unit if the title of the table does not name the unit.
    title: str
    # Sentences without the first capital and the last full stop, for legends and tooltips.
    meaning: str = ""
    # Aligned to the left.
    is_text: bool = False
    # A setting of the points: pages can filter by it, and it is shown even if it is empty.
    is_setting: bool = False
    # Width in characters to which a terminal may fold the column; None: never folded.
    min_chars: int | None = None
    # A table that is too wide loses the column with the lowest number first; None: never.
    drop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells; a cell with only a text may be a plain string."""

    columns: tuple[ShownColumn, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    # What all rows have in common, such as the workload of the points.
    subject: str = ""
    # What the table shows, and the unit of its columns.
    kind: str = ""
    # Sentences for the legend, after the meanings of the columns.
    note: str = ""
    # Replaces a table that does not fit the width of a terminal.
    narrower: Table | None = None
    # Headings of the columns that add up to the step.
    summands: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Return subject and kind, as in `mlp: where the step goes, ms`."""
        return ": ".join(filter(None, (self.subject, self.kind)))

    @property
    def titles(self) -> tuple[str, ...]:
        """Return the headings of the columns."""
        return tuple(column.title for column in self.columns)

    @property
    def texts(self) -> tuple[tuple[str, ...], ...]:
        """Return the texts of all cells, row by row."""
        return tuple(tuple(map(text_of, row)) for row in self.rows)

    def legend(self) -> list[tuple[str, str]]:
        """Return (heading, meaning) of the columns that have a meaning, then ("", note) if any."""
        entries = []
        for column in self.columns:
            if column.meaning:
                entries.append((column.title, sentence(column.meaning)))
        note = " ".join(filter(None, (self.note, self._sum_note())))
        if note:
            entries.append(("", note))
        return entries

    def _sum_note(self) -> str:
        """Return which columns add up to the step; "" if a column was left out."""
        if len(self.summands) < 2 or not set(self.summands) <= set(self.titles):
            return ""
        *others, last = self.summands
        return f"The columns {', '.join(others)} and {last} add up to the step."


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend:
    """Makes the tables before it explain their columns; terminals list columns left out here."""


Block = Line | Listing | Table | Legend
# A column, and the function that makes its cell from an item.
ColumnOf = tuple[ShownColumn, Callable[[T], str | Cell]]


def column(title: str, make_cell: Callable[[T], str | Cell], **fields: Any) -> ColumnOf[T]:
    """Return a column for `make_table`.

    Args:
        title: the heading.
        make_cell: makes the cell of an item.
        fields: other fields of `ShownColumn`.
    """
    return ShownColumn(title=title, **fields), make_cell


def adapt_column(column_of_part: ColumnOf[T], part_of: Callable[[Item], T]) -> ColumnOf[Item]:
    """Return a column for larger items; its cells show `part_of(item)`."""
    shown_column, make_cell = column_of_part
    return shown_column, lambda item: make_cell(part_of(item))


def text_of(cell: str | Cell) -> str:
    """Return the text of a cell."""
    return cell if isinstance(cell, str) else cell.text


def make_table(
    items: Sequence[T],
    columns: Iterable[ColumnOf[T]],
    *,
    subject: str = "",
    kind: str = "",
    note: str = "",
) -> Table:
    """Return a table with a row for each item; empty columns are left out, except settings."""
    shown_columns = []
    cells_of_columns = []
    for column, make_cell in columns:
        cells = [make_cell(item) for item in items]
        is_empty = not any(map(text_of, cells))
        if column.is_setting or not is_empty:
            shown_columns.append(column)
            cells_of_columns.append(cells)
    return Table(
        columns=tuple(shown_columns),
        rows=tuple(zip(*cells_of_columns, strict=True)),
        subject=subject,
        kind=kind,
        note=note,
    )


def legends(tables: Iterable[Table]) -> Iterator[list[tuple[str, str]]]:
    """Yield the (heading, meaning) of each table, without the entries of earlier tables."""
    earlier: set[tuple[str, str]] = set()
    for table in tables:
        new = [entry for entry in table.legend() if entry not in earlier]
        earlier.update(new)
        yield new


def legend_paragraphs(tables: Iterable[Table]) -> Iterator[str]:
    """Yield the legends of tables as paragraphs, each entry once."""
    for legend in legends(tables):
        # The note of a table has no heading.
        entries = [f"{title}: {text}" if title else text for title, text in legend]
        if entries:
            yield " ".join(entries)


def metric_column(
    metric: Metric, unit: Unit, placeholders: dict[str, str], drop: int | None
) -> ShownColumn:
    """Return the column of a metric.

    Args:
        metric: the metric.
        unit: unit of times.
        placeholders: placeholder in the meaning of the metric -> text. "items", such as "samples",
            also gives the heading of the throughput, "samples/s".
        drop: a table that is too wide loses the lowest number first; None: never.
    """
    meaning = metric.meaning or metric.description
    for name, text in placeholders.items():
        meaning = meaning.replace(f"{{{name}}}", text)
    title = f"{metric.title} {unit.name}" if metric.format == "time" else metric.title
    if metric.name == "throughput" and "items" in placeholders:
        title = f"{placeholders['items']}/s"
    return ShownColumn(
        title=title,
        meaning=meaning.removesuffix("."),
        drop=drop,
    )


class Document(ABC):
    """A document that every format can show."""

    @property
    def title(self) -> str:
        """Return the heading, which may be empty."""
        return ""

    @property
    def tone(self) -> Tone:
        """Return how a terminal shows the title."""
        return "strong"

    @abstractmethod
    def blocks(self) -> Iterable[Block]:
        """Return the blocks below the title."""

    @abstractmethod
    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object."""


def format_document(
    document: Document, kind: str, *, width: int = WIDTH, color: bool = False
) -> str:
    """Return the document as text that ends in a line break.

    Args:
        document: the document.
        kind: "json", "md" or "terminal".
        width: width of the terminal in characters.
        color: whether the terminal shows colours.
    """
    if kind == "json":
        return format_object(**document.members())
    if kind == "md":
        heading = [f"## {escape(document.title)}"] if document.title else []
        return "\n\n".join([*heading, *_markdown(document.blocks())]) + "\n"
    title_lines = [Line(text=document.title, tone=document.tone)] if document.title else []
    return render_text([*title_lines, *document.blocks()], width=width, color=color)


def _markdown(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield each block as paragraphs, a list or a table of GitHub-flavoured Markdown."""
    blocks = list(blocks)
    # Tables with a legend come first, so each of them takes the next legend.
    table_legends = legends(_tables_before_legend(blocks))
    for block in blocks:
        match block:
            case Line():
                yield _MARKDOWN_TONES.get(block.tone, "{}").format(escape(block.text))
            case Listing():
                quote = code if block.is_quoted else escape
                if block.title:
                    yield f"**{escape(block.title)}**"
                items = [f"* {escape(name)}: {quote(text)}" for name, text in block.lines]
                yield "\n".join(items) or escape(block.otherwise)
            case Table():
                if block.title:
                    yield "### " + escape(block.title)
                yield "\n".join(markdown_rows(block))
                legend = next(table_legends, [])
                items = [f"* {escape(title)}: {escape(text)}" for title, text in legend if title]
                notes = [escape(text) for title, text in legend if not title]
                yield from filter(None, ["\n".join(items), *notes])


def markdown_rows(table: Table) -> Iterator[str]:
    """Yield the lines of a table of GitHub-flavoured Markdown, without its title."""
    alignments = [":---" if column.is_text else "---:" for column in table.columns]
    yield f"| {' | '.join(map(escape, table.titles))} |"
    yield f"| {' | '.join(alignments)} |"
    for row in table.texts:
        yield f"| {' | '.join(map(escape, row))} |"


def _tables_before_legend(blocks: Sequence[Block]) -> list[Table]:
    """Return the tables before the last `Legend` block; only their columns are explained."""
    legend_indexes = [index for index, block in enumerate(blocks) if isinstance(block, Legend)]
    end = max(legend_indexes, default=0)
    return [block for block in blocks[:end] if isinstance(block, Table)]


def escape(text: str) -> str:
    """Return the text on one line, escaped for Markdown."""
    return _SPECIAL.sub(r"\\\1", plain(text))


def code(text: str) -> str:
    """Return the text on one line as a code span of Markdown; in tables, | would end the cell."""
    line = plain(text)
    # A fence must be longer than each run of backticks in the text.
    longest_run = max((len(run) for run in _BACKTICKS.findall(line)), default=0)
    fence = "`" * (longest_run + 1)
    # A blank separates the fence from a backtick at an end of the text.
    touches_fence = not line or line != line.strip("`")
    pad = " " if touches_fence else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def format_object(**members: Any) -> str:
    """Return a JSON object of `schema_version` and the members, in ASCII with a line break.

    Raises:
        TypeError: JSON cannot hold a value, such as a set.
    """
    content = jsonable({"schema_version": SCHEMA_VERSION, **members})
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return column -> value for each row of a frame, with None for NaN, NaT and NA.

    Integer columns of `TABLES` stay integers, although pandas stores nulls as floats.
    """
    from raybench.results.tables import TABLES  # loads numpy, which no table of text needs

    integers = {column.name for column in chain(*TABLES.values()) if column.kind == "int64"}
    values = frame.astype(object).where(frame.notna(), None)
    rows: list[dict[Any, Any]] = values.rename(columns=str).to_dict("records")
    for row in rows:
        for name in integers.intersection(row):
            if isinstance(row[name], float):
                row[name] = int(row[name])
    return rows


def jsonable(value: Any) -> Any:
    """Return the value as JSON can hold it, such as lists for tuples, and None for NaN and NaT.

    Raises:
        TypeError: the value contains NA of pandas; `records` removes it.
    """
    if isinstance(value, str | bool | int) or value is None:
        return value.value if isinstance(value, Enum) else value  # members of StrEnum and IntEnum
    if isinstance(value, Mapping):
        return {str(name): jsonable(item) for name, item in value.items()}
    if is_dataclass(value):
        return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    is_nan = value != value  # also finds NaT
    if is_nan or (isinstance(value, float) and math.isinf(value)):
        return None
    return value.isoformat() if isinstance(value, datetime) else value


# Longer lines of prose are hard to read; tables may be wider.
_PROSE_WIDTH = 100
# A listing whose names are wider than this share of the width has its texts below the names.
_WIDEST_NAMES_SHARE = 0.45
# Blanks between columns.
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
    """Return the blocks as text; paragraphs are folded to `width`, and to 100 characters.

    Without colour there are no escape sequences.
    """
    return render_parts(_renderables(blocks, width), width, color)


def render_parts(parts: Iterable[RenderableType], width: int, color: bool) -> str:
    """Return the output of rich as text that ends in a line break.

    Args:
        parts: pass Text of `one_line`: rich reads a str as markup and keeps escape sequences.
        width: in characters; only Text with `no_wrap` and tables with `min_width` exceed 100.
        color: whether there are escape sequences.
    """
    target = io.StringIO()
    console = Console(
        file=target,
        width=width,
        force_terminal=color,
        force_jupyter=False,  # in a notebook rich would display the text instead
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        is_unfolded = isinstance(part, Text) and bool(part.no_wrap)
        is_table = isinstance(part, RichTable) and part.min_width is not None
        most_chars = None if is_table or is_unfolded else min(width, _PROSE_WIDTH)
        console.print(part, width=most_chars, crop=False, soft_wrap=is_unfolded)
    text = target.getvalue().replace(_FIXED_BLANK, " ")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


# The blank between a number and its unit, where a line is never folded.
_UNIT = re.compile(r"(?<=[\d.]) (?=(%|ms|µs|s|GiB|MiB|GB/s|x)(?![\w/]))")
# A private character replaces such a blank, because rich folds at every blank of Unicode.
_FIXED_BLANK = "\ue000"


def _fix_units(text: str) -> str:
    """Return a text on one line; rich then does not fold between a number and its unit."""
    return _UNIT.sub(_FIXED_BLANK, one_line(text))


def _renderables(blocks: Iterable[Block], width: int) -> Iterator[RenderableType]:
    """Yield what rich draws for each block, with blank lines between the blocks.

    The columns of a table are explained below the table. The block `Legend` lists only the columns
    that did not fit.
    """
    blocks = list(blocks)
    # (table, titles of columns left out) of the tables before the last `Legend` block.
    fitted_with_legend = [fit(table, width) for table in _tables_before_legend(blocks)]
    fitted_tables = [table for table, _ in fitted_with_legend]
    # These tables are the first tables among the blocks; later tables have no legend.
    tables_and_legends = zip(fitted_tables, legends(fitted_tables), strict=True)
    for index, block in enumerate(blocks):
        # Only a `Line` can follow without a blank line. A `Legend` makes its own blank line.
        is_apart = getattr(block, "is_apart", True)
        if index and not isinstance(block, Legend) and is_apart:
            yield Text("")
        match block:
            case Line():
                text = one_line(block.text) if block.is_whole else _fix_units(block.text)
                yield Text(text, style=_STYLES[block.tone], no_wrap=block.is_whole or None)
            case Listing():
                yield from _listing_renderables(block, width)
            case Table():
                fitted, legend = next(tables_and_legends, (None, []))
                if fitted is None:
                    fitted, _ = fit(block, width)
                yield from _title_lines(fitted.title)
                yield _grid(fitted, width)
                if legend:
                    yield from (Text(""), *_legend_renderables(legend))
            case Legend():
                left_out: dict[str, None] = {}  # titles, each once
                for _, titles in fitted_with_legend:
                    left_out |= dict.fromkeys(titles)
                if left_out:
                    text = (
                        f"Left out to fit {width} columns: {', '.join(left_out)}. A wider terminal "
                        "or `--format md` shows them."
                    )
                    yield from (Text(""), Text(_fix_units(text), style="dim"))


def _legend_renderables(legend: Sequence[tuple[str, str]]) -> Iterator[RenderableType]:
    """Yield the headings of columns beside their meanings, then the note."""
    grid = RichTable.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in legend:
        if title:
            grid.add_row(Text(one_line(title), style="dim"), Text(_fix_units(text), style="dim"))
    if grid.row_count:
        yield grid
    yield from (Text(_fix_units(text), style="dim") for title, text in legend if not title)


def _title_lines(title: str) -> list[Text]:
    return [Text(_fix_units(title), style="bold")] if title else []


def _listing_renderables(block: Listing, width: int) -> Iterator[RenderableType]:
    """Yield the title, then texts beside their names, or below long names."""
    yield from _title_lines(block.title)
    lines = [(one_line(name), _fix_units(text)) for name, text in block.lines]
    longest_name = max((cell_len(name) for name, _ in lines), default=0)
    if not lines:
        yield Text(one_line(block.otherwise))
    elif longest_name > _WIDEST_NAMES_SHARE * min(width, _PROSE_WIDTH):
        for name, text in lines:
            yield Text(name)
            yield Padding(Text(text, overflow="fold"), (0, 0, 0, 2))  # top, right, bottom, left
    else:
        table = RichTable.grid(padding=(0, _GAP, 0, 0))
        table.add_column(no_wrap=True, justify="left" if block.is_quoted else "right")
        table.add_column(overflow="fold")
        for name, text in lines:
            table.add_row(Text(name), Text(text))
        yield table


def fit(table: Table, width: int) -> tuple[Table, list[str]]:
    """Return a table that fits `width`, and the titles of the columns left out.

    Columns with the lowest `drop` are left out first; a table that is still too wide is replaced
    by its `narrower`. The result may still be too wide.
    """
    left_out = []
    droppable = [column for column in table.columns if column.drop is not None]
    for column in sorted(droppable, key=lambda column: column.drop or 0):
        if _min_table_chars(table) <= width:
            break
        index = table.columns.index(column)
        columns = (*table.columns[:index], *table.columns[index + 1 :])
        rows = tuple((*row[:index], *row[index + 1 :]) for row in table.rows)
        table = replace(table, columns=columns, rows=rows)
        left_out.append(column.title)
    if table.narrower is not None and _min_table_chars(table) > width:
        return fit(table.narrower, width)
    return table, left_out


def _min_table_chars(table: Table) -> int:
    """Return the least width of a table in characters, with its gaps."""
    return sum(_min_column_chars(table)) + _GAP * (len(table.columns) - 1)


def _min_column_chars(table: Table) -> list[int]:
    """Return the least width of each column: its longest cell, or less if cells may fold."""
    widths = []
    texts_of_rows = table.texts
    for index, column in enumerate(table.columns):
        texts = [row[index] for row in texts_of_rows]
        heading = max(map(len, _heading_lines(column, texts)))
        longest = max((cell_len(text) for text in texts), default=0)
        # Cells of a column with `min_chars` may fold.
        least = longest if column.min_chars is None else min(longest, column.min_chars)
        widths.append(max(heading, least))
    return widths


def _heading_lines(column: ShownColumn, texts: Iterable[str]) -> list[str]:
    """Return the lines of a heading, split between words if the column may be folded."""
    title = one_line(column.title)
    if column.min_chars is None:
        return [title]
    most_chars = max((column.min_chars, *map(len, texts)))
    lines = [""]
    # `world_size` has the words `world_` and `size`.
    for word in re.findall(r"[^_\s]*_+|[^_\s]+\s*|\s+", title):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > most_chars:
            lines.append("")
        lines[-1] += word
    return [text.rstrip() for text in lines]


def _grid(table: Table, width: int) -> RichTable:
    """Return the table of rich; a table that is too wide has narrow gaps and is not cut."""
    widths = _min_column_chars(table)
    gap = _GAP if _min_table_chars(table) <= width else 1
    min_width = sum(widths) + gap * (len(widths) - 1)
    grid = RichTable(
        box=None,
        padding=(0, gap, 0, 0),
        pad_edge=False,
        header_style="bold",
        min_width=min_width,
        width=min_width if min_width > width else None,
        show_header=any(table.titles),
    )
    texts_of_rows = table.texts
    for index, (column, chars) in enumerate(zip(table.columns, widths, strict=True)):
        texts = [row[index] for row in texts_of_rows]
        grid.add_column(
            Text("\n".join(_heading_lines(column, texts))),
            justify="left" if column.is_text else "right",
            overflow="fold",
            no_wrap=column.min_chars is None,
            min_width=chars,
        )

    def style_and_fit(row: tuple[str | Cell, ...]) -> tuple[str, bool]:
        """Return the style of a row, and whether its cells need no folding."""
        tone: Tone = "plain"
        fits = True
        for cell, chars in zip(row, widths, strict=True):
            # The first cell with a tone colours the row.
            if isinstance(cell, Cell) and tone == "plain":
                tone = cell.tone
            fits = fits and cell_len(text_of(cell)) <= chars
        return _STYLES[tone], fits

    for (style, fits), group in groupby(table.rows, style_and_fit):
        rows = list(group)
        # Rows that need no folding are drawn as one row, which looks the same and is much faster.
        blocks_of_rows = [rows] if fits else [[row] for row in rows]
        for block in blocks_of_rows:
            cells = [Text("\n".join(texts)) for texts in _texts_by_column(block)]
            grid.add_row(*cells, style=style)
    return grid


def _texts_by_column(rows: Sequence[tuple[str | Cell, ...]]) -> list[list[str]]:
    """Return the texts of each column."""
    texts_of_columns: list[list[str]] = [[] for _ in rows[0]]
    for row in rows:
        for texts, cell in zip(texts_of_columns, row, strict=True):
            texts.append(one_line(text_of(cell)))
    return texts_of_columns
