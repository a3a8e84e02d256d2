"""A run as ten lines of Markdown, to paste into the thread of an issue."""

from __future__ import annotations

from dataclasses import replace

from raybench.report import formatting
from raybench.report.documents import Table, code, escape, markdown_rows
from raybench.report.run_report import RunReport
from raybench.report.words import run as run_words

# Lines with text. The blank lines around the table, without which GitHub shows no table, come on
# top.
MOST_LINES = 10
# Question, run, versions, the two lines above the rows, and what follows from the table.
_OTHER_LINES = 6


def format_issue(report: RunReport) -> str:
    """Return question, machine, versions, answer and caveat of a run as Markdown."""
    data = report.data
    facts = [run_words.facts_of_first_screen(data)]
    if data.run.cpu_section:
        facts.append(run_words.CPU_SECTION)
    first_lines = [
        f"**{escape(report.title)}**",
        f"{escape(', '.join(facts))}, run {code(data.run.run_id)}",
        escape(formatting.versions(data.versions)),
    ]
    sentences = list(report.findings)
    if report.answer_table is None:
        sentences.insert(0, report.headline)
        table_lines = []
    else:
        table, left_out = report.answer_table.table, report.answer_table.left_out
        shown = table.rows[: MOST_LINES - _OTHER_LINES]
        left_out += len(table.rows) - len(shown)
        if left_out:
            sentences.insert(0, f"{formatting.counted(left_out, 'more value')}: full report.")
        table_lines = ["", *markdown_rows(_with_heading(replace(table, rows=shown))), ""]
    # Only the first caveat has room.
    for who, text in report.caveats.messages[:1]:
        sentences.append(f"{who}: {text}" if who else text)
    return "\n".join([*first_lines, *table_lines, escape(" ".join(sentences))]) + "\n"


def _with_heading(table: Table) -> Table:
    """Return the table with its title as heading of its first column."""
    first, *others = table.columns
    title = f"{table.title} ({first.title})" if first.title else table.title
    return replace(table, columns=(replace(first, title=title), *others))
