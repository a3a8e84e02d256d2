"""Blocks as GitHub-flavoured Markdown. Text from the results is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from raybench.report.blocks import (
    Block,
    Legend,
    Line,
    Listing,
    Messages,
    Table,
    legend_paragraphs,
    text_of,
)
from raybench.report.plain_text import plain

# What Markdown or HTML could take for markup, anywhere in a line.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!&@$])")
_BACKTICKS = re.compile(r"`+")
_TONES = {"strong": "**{}**", "good": "**{}**", "alarm": "> **{}**"}


def render(title: str, blocks: Iterable[Block]) -> str:
    """Return the blocks below a heading."""
    return "\n\n".join([f"## {escape(title)}", *_parts(blocks)]) + "\n"


def _parts(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield a paragraph, a list or a table for each block."""
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
            case Messages():
                yield f"**{escape(block.title)}**"
                yield "\n".join(f"* {count}{code(text)}" for count, text in block.lines)
                yield from [block.rest] if block.rest else []
            case Table():
                tables.append(block)
                yield from _table(block)
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


def _table(table: Table) -> Iterator[str]:
    if table.subject or table.kind:
        yield "### " + ": ".join(filter(None, (escape(table.subject), escape(table.kind))))
    aligned = [":---" if column.is_text else "---:" for column in table.columns]
    rows = [_row(escape(text_of(cell)) for cell in row) for row in (table.titles, *table.rows)]
    yield "\n".join([rows[0], _row(aligned), *rows[1:]])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
