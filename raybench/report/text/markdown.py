"""The scaling report as GitHub-flavoured Markdown. Text from the results is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from raybench.report import formatting, plain_text
from raybench.report.summary import MessageGroup, Summary, first_messages, some
from raybench.report.tables import Table

# What Markdown or HTML could take for markup, anywhere in a line.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!&@$])")
_BACKTICKS = re.compile(r"`+")


def format_report(summary: Summary) -> str:
    """Write the scaling report, to be read in a pull request."""
    run = summary.run
    blocks = [
        f"## {escape(run.job_name)}",
        *([f"**{escape(formatting.sentence(summary.lead))}**"] if summary.lead else []),
        f"Run {code(run.run_id)}, {formatting.when(run.started_at)}, {formatting.course(run)}; "
        f"{summary.counts}.  \n{escape(summary.machine)}.  \n"
        + escape(formatting.versions(summary.versions)),
        *([f"Nodes lost: {code(some(summary.lost_nodes))}"] if summary.lost_nodes else []),
        *(
            [f"In all points: {code(formatting.settings(summary.shared))}"]
            if summary.shared
            else []
        ),
        *_findings(summary),
        *(block for table in (*summary.tables, *summary.region_tables) for block in _table(table)),
        *_explain(summary),
        *_group_lines("Failed and skipped points", summary.failures),
        *_group_lines("Without speed-up", summary.without_speed_up),
        *_group_lines("Warnings", summary.warnings),
        *([escape(f"{summary.more_rounds.sentence}.")] if summary.more_rounds else []),
    ]
    return "\n\n".join(blocks) + "\n"


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


def format_table(table: Table) -> str:
    """Write the cells of a table."""
    aligned = [":---" if column in table.texts else "---:" for column in table.columns]
    lines = [_row(map(escape, table.columns)), _row(aligned)]
    return "\n".join([*lines, *(_row(map(escape, row)) for row in table.rows)])


def _table(table: Table) -> list[str]:
    title = "### " + ": ".join(filter(None, (escape(table.workload), escape(table.kind))))
    params = [code(formatting.settings(table.params))] if table.params else []
    return [title, *params, format_table(table)]


def _findings(summary: Summary) -> Iterator[str]:
    for title, lines in summary.sections:
        yield f"**{escape(title)}**"
        yield "\n".join(f"* {escape(what)}: {escape(found)}" for what, found in lines)


def _explain(summary: Summary) -> list[str]:
    if not summary.tables:
        return ["No point has been finished yet."]
    return [escape(paragraph) for paragraph in summary.explanation]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _group_lines(title: str, groups: Sequence[MessageGroup]) -> list[str]:
    if not groups:
        return []
    phrases, more = first_messages(groups)
    lines = [f"* {lead}{code(text)}" for lead, text in phrases]
    return [f"**{title}**", "\n".join(lines), *([more] if more else [])]
