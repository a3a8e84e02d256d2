"""What reports are made of: lines, listings, tables and their legend, in any format.

Producers put text from the results into blocks as it is. Each renderer (terminal.py,
documents.py, the templates of html/) makes it harmless in one place. Nothing here loads pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from raybench.records import Metric
    from raybench.report.formatting import Unit


T = TypeVar("T")

# The command that adds rounds to a run.
HOW_TO_ADD_ROUNDS = "sweep JOB --resume RUN --set measure.rounds=3"
MARKS_TITLE = "!"
# Terminals do not fold cells of settings below this: `world_size` stays whole.
SETTING_CHARS = 10

Tone = Literal["plain", "strong", "aside", "advice", "alarm", "good"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A paragraph.

    is_apart: a blank line comes before it. is_whole: it is never folded, so that a path or a
    command in it can be copied. is_indented: its leading blanks stay, as in a traceback.
    """

    text: str
    tone: Tone = "plain"
    is_apart: bool = False
    is_whole: bool = False
    is_indented: bool = False


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
class Column:
    """A column of a table.

    title: its head, with the unit where the title of the table does not name it. unit: the end of
    the title that is a unit, which the legend leaves out.
    meaning: a sentence without capital and full stop, for legends and for the hint of the head.
    is_text: aligned to the left. is_setting: it tells which point a row is about; pages can filter
    by it, and it stays where no row has a value.
    min_chars: terminals may fold its cells to this width; None: they are never folded.
    drop: where a table is too wide, the column with the lowest number is left out first; None:
    never.
    """

    title: str
    unit: str = ""
    meaning: str = ""
    is_text: bool = False
    is_setting: bool = False
    min_chars: int | None = None
    drop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells; a cell without sort value and hint may be a plain string.

    subject: the workload of its points, or what else all rows are about. kind: what the table
    shows, and the unit of its columns.
    note: sentences that a reader needs beside the meanings of the columns.
    narrower: the table to show instead where this one does not fit the width.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    subject: str = ""
    kind: str = ""
    note: str = ""
    narrower: Table | None = None

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

    def legend(self) -> list[str]:
        """Return a sentence for each column that has a meaning, then the note."""
        sentences = []
        for column in self.columns:
            name = column.title.removesuffix(f" {column.unit}")
            if column.meaning:
                sentences.append(f"{name[:1].upper()}{name[1:]}: {column.meaning}.")
        return [*sentences, *filter(None, [self.note])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend:
    """The place where a text explains the columns of all tables before it, each sentence once.

    The renderer knows which columns it left out; these are not explained.
    """


Block = Line | Listing | Table | Legend
# A column, and the function that writes the cell of an item in it.
ColumnOf = tuple[Column, Callable[[T], str | Cell]]


def column(title: str, cell: Callable[[T], str | Cell], **facts: Any) -> ColumnOf[T]:
    """Return (column, cell) for `make_table`. cell: returns the cell of a row. facts: of Column."""
    return Column(title=title, **facts), cell


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

    Columns whose cells are all empty are left out, except those that are settings.
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


def legend_paragraphs(tables: Iterable[Table]) -> Iterator[str]:
    """Yield for each table a paragraph of the sentences in its legend that no earlier one has."""
    said: set[str] = set()
    for table in tables:
        new = [sentence for sentence in table.legend() if sentence not in said]
        said.update(new)
        if new:
            yield " ".join(new)


def metric_column(metric: Metric, unit: Unit, words: dict[str, str], drop: int | None) -> Column:
    """Return the column of a metric. unit: of times. drop: as of `Column`.

    words: values for {ranks} and {baseline} in its meaning; "items": what a step finishes.
    """
    meaning = metric.meaning or metric.description
    for name, word in words.items():
        meaning = meaning.replace(f"{{{name}}}", word)
    is_rate = metric.name == "throughput" and "items" in words
    heading = f"{metric.title} {unit.name}" if metric.format == "time" else metric.title
    return Column(
        title=f"{words['items']}/s" if is_rate else heading,
        unit=unit.name if metric.format == "time" else metric.unit,
        meaning=meaning.removesuffix("."),
        drop=drop,
    )
