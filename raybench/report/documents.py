"""A document: anything that is shown as text for a terminal, as Markdown and as JSON.

The report of a run, a comparison, a history and predictions are documents. To add a kind, write a
class with the members of `Document` and give it to `format_document`. Nothing here loads pandas.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any

from raybench.report import terminal
from raybench.report.blocks import (
    Block,
    Legend,
    Line,
    Listing,
    Table,
    Tone,
    legend_paragraphs,
    text_of,
)
from raybench.report.plain_text import plain
from raybench.results.columns import SCHEMA_VERSION
from raybench.results.tables import TABLES

if TYPE_CHECKING:
    import pandas as pd

# What Markdown or HTML could take for markup, anywhere in a line.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!&@$])")
_BACKTICKS = re.compile(r"`+")
_TONES = {"strong": "**{}**", "good": "**{}**", "alarm": "> **{}**"}
_INTEGERS = {
    column.name for columns in TABLES.values() for column in columns if column.kind == "int64"
}


class Document(ABC):
    """What can be shown in every format. To be inherited from."""

    @property
    def title(self) -> str:
        """Return the heading: the answer in a sentence, or what the document is about.

        Empty for a table that speaks for itself.
        """
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
        """Return the members of its JSON object."""


def format_document(
    document: Document, kind: str, *, width: int = terminal.WIDTH, color: bool = False
) -> str:
    """Return the document as text that ends in a line break.

    kind: "json", "md" or "terminal". width, color: of the terminal; other formats have neither.
    """
    if kind == "json":
        return format_object(**document.members())
    if kind == "md":
        return "\n\n".join([f"## {escape(document.title)}", *_markdown(document.blocks())]) + "\n"
    head = [Line(text=document.title, tone=document.tone)] if document.title else []
    return terminal.render([*head, *document.blocks()], width=width, color=color)


def _markdown(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield each block as paragraphs, a list or a table of GitHub-flavoured Markdown."""
    tables: list[Table] = []
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
                tables.append(block)
                if block.title:
                    yield "### " + escape(block.title)
                aligned = [":---" if column.is_text else "---:" for column in block.columns]
                head, *rows = (
                    [escape(text_of(cell)) for cell in row] for row in (block.titles, *block.rows)
                )
                yield "\n".join(f"| {' | '.join(row)} |" for row in (head, aligned, *rows))
            case Legend():
                yield from map(escape, legend_paragraphs(tables))


def escape(text: str) -> str:
    """Return the text such that Markdown shows it as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", plain(text))


def code(text: str) -> str:
    """Return the text as a code span, in which no mention or issue number becomes a link."""
    one_line = plain(text)
    longest = max((len(run) for run in _BACKTICKS.findall(one_line)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if one_line.startswith("`") or one_line.endswith("`") else ""
    return f"{fence}{pad}{one_line}{pad}{fence}"


def format_object(**members: Any) -> str:
    """Return a JSON object of the members and the schema version, for other programs.

    It has no NaN, times in ISO 8601 and no rounding. It is ASCII: nothing controls a terminal.
    """
    content = jsonable({"schema_version": SCHEMA_VERSION, **members})
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a dictionary for each row of a table, by column; None for NaN, NaT and NA.

    Integers are integers, also where pandas made floats of them because another row has none.
    """
    known = frame.astype(object).where(frame.notna(), None)
    return [
        {
            str(name): int(value) if name in _INTEGERS and isinstance(value, float) else value
            for name, value in row.items()
        }
        for row in known.to_dict("records")
    ]


def jsonable(value: Any) -> Any:
    """Return the value as JSON can hold it.

    NaN, NaT and infinities become None, times ISO 8601, arrays and tuples lists, members of an Enum
    their values.
    """
    if isinstance(value, Mapping):
        return {str(name): jsonable(item) for name, item in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if value != value or (isinstance(value, float) and math.isinf(value)):
        return None
    return value.isoformat() if isinstance(value, datetime) else value
