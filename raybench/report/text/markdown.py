"""Reports as GitHub-flavoured Markdown. Text from the results is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from raybench.report import formatting, plain_text
from raybench.report.document import Block, Line, Listing, Messages, Table

if TYPE_CHECKING:
    from raybench.report.summary import Summary

# What Markdown or HTML could take for markup, anywhere in a line.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!&@$])")
_BACKTICKS = re.compile(r"`+")
_TONES = {"strong": "**{}**", "alarm": "> **{}**"}


def format_report(summary: Summary) -> str:
    """Write the scaling report, to be read in a pull request."""
    run = summary.run
    lost, shared = formatting.some(summary.lost_nodes), formatting.settings(summary.shared)
    blocks = [
        f"## {escape(run.job_name)}",
        *([f"**{escape(formatting.sentence(summary.lead))}**"] if summary.lead else []),
        f"Run {code(run.run_id)}, {summary.course}; {summary.counts}.  \n"
        f"{escape(summary.machine)}.  \n{escape(formatting.versions(summary.versions))}",
        *([f"Nodes lost: {code(lost)}"] if lost else []),
        *([f"In all points: {code(shared)}"] if shared else []),
        *lay_out(summary.body(summary.all_tables)),
        *([escape(f"{summary.more_rounds.sentence}.")] if summary.more_rounds else []),
    ]
    return join(blocks)


def join(blocks: Iterable[str]) -> str:
    """Write blocks as one text."""
    return "\n\n".join(blocks) + "\n"


def lay_out(blocks: Iterable[Block]) -> Iterator[str]:
    """Write each block of a report."""
    for block in blocks:
        match block:
            case Line():
                yield _TONES.get(block.tone, "{}").format(escape(block.text))
            case Listing():
                quote = code if block.is_quoted else escape
                items = [f"* {escape(what)}: {quote(text)}" for what, text in block.lines]
                yield f"**{escape(block.title)}**"
                yield "\n".join(items) or escape(block.otherwise)
            case Messages():
                yield f"**{escape(block.title)}**"
                yield "\n".join(f"* {lead}{code(text)}" for lead, text in block.lines)
                yield from [block.rest] if block.rest else []
            case Table():
                yield from _table(block)


def escape(text: str) -> str:
    """Text that shows as it is."""
    return _SPECIAL.sub(r"\\\1", plain_text.plain(text))


def code(text: str) -> str:
    """Text as a code span: there, no mention or issue number turns into a link either."""
    one_line = plain_text.plain(text)
    longest = max((len(run) for run in _BACKTICKS.findall(one_line)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if one_line.startswith("`") or one_line.endswith("`") else ""
    return f"{fence}{pad}{one_line}{pad}{fence}"


def _table(table: Table) -> Iterator[str]:
    if table.workload or table.kind:
        yield "### " + ": ".join(filter(None, (escape(table.workload), escape(table.kind))))
    if table.params:
        yield code(table.params_words)
    aligned = [":---" if column in table.texts else "---:" for column in table.columns]
    rows = [_row(map(escape, row)) for row in (table.columns, *table.rows)]
    yield "\n".join([rows[0], _row(aligned), *rows[1:]])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
