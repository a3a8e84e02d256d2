"""A comparison of two runs as text: for a terminal, as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import RenderableType

from raybench.report import comparison as words
from raybench.report import formatting
from raybench.report.comparison import Comparison
from raybench.report.export import as_json
from raybench.report.text.console import WIDTH, grid, line, pairs, render
from raybench.report.text.markdown import code, escape, format_table
from raybench.report.text.terminal import table_columns
from raybench.results.run import Run

NOT_COMPARABLE = "NOT COMPARABLE"
_STYLES = {"slower": "bold red", "faster": "bold green", "unclear": "yellow"}


def format_terminal(comparison: Comparison, *, width: int = WIDTH, color: bool = False) -> str:
    """Write the comparison: the answer, what changed around it, then point by point."""
    parts: list[RenderableType] = [
        pairs([("base", _run(comparison.base)), ("new", _run(comparison.new))]),
        line(""),
        line(words.headline(comparison), "bold"),
        *(line(text) for text in _sentences(comparison)),
        *(line(text, "yellow") for text in words.advice(comparison)),
        *(line(_loud(why), "bold red") for why in comparison.obstacles),
    ]
    parts += _pairs("What changed around the points", words.environment(comparison), _SAME_AROUND)
    if comparison.compared:
        table = words.table(comparison)
        styles = [_STYLES.get(row[-1], "") for row in table.rows]
        parts += [line(""), grid(table_columns(table), table.rows, styles)]
        parts += [line(left_out) for left_out in _omissions(comparison)]
    parts += _pairs("What changed beside, or is missing for a verdict", words.beside(comparison))
    parts += _pairs("Failed in one of the runs", words.unpaired(comparison))
    for paragraph in words.explanation(comparison):
        parts += [line(""), line(paragraph, "dim")]
    return render(parts, width, color)


def _sentences(comparison: Comparison) -> list[str]:
    """Write the sentences that follow the answer."""
    return [text for text in (words.sensitivity(comparison), words.one_sided(comparison)) if text]


_SAME_AROUND = "nothing that the tables tell: devices, driver, versions, variables, commit"


def _run(run: Run) -> str:
    return f"{formatting.title(run)}, {formatting.when(run.started_at)}"


def _loud(why: str) -> str:
    return f"{NOT_COMPARABLE}: {why}. The changes below tell of that, not of the software."


def _pairs(
    title: str, lines: Sequence[tuple[str, str]], otherwise: str = ""
) -> list[RenderableType]:
    if not lines and not otherwise:
        return []
    return [line(""), line(title, "bold"), pairs(lines) if lines else line(otherwise)]


def _omissions(comparison: Comparison) -> list[str]:
    _, hidden = words.shown(comparison)
    return [f"and {hidden} more that are the same; `--format json` has all"] if hidden else []


def format_markdown(comparison: Comparison) -> str:
    """Write the comparison, to be read in a pull request."""
    blocks = [
        f"## {escape(comparison.new.job_name)}: {code(comparison.new.run_id)} against "
        f"{code(comparison.base.run_id)}",
        f"**{escape(words.headline(comparison))}**",
        *map(escape, (*_sentences(comparison), *words.advice(comparison))),
        *(f"> **{escape(_loud(why))}**" for why in comparison.obstacles),
        *_list("What changed around the points", words.environment(comparison), _SAME_AROUND),
    ]
    if comparison.compared:
        blocks += [format_table(words.table(comparison)), *_omissions(comparison)]
    blocks += [
        *_list("What changed beside, or is missing for a verdict", words.beside(comparison)),
        *_list("Failed in one of the runs", words.unpaired(comparison)),
        *(escape(paragraph) for paragraph in words.explanation(comparison)),
    ]
    return "\n\n".join(blocks) + "\n"


def _list(title: str, lines: Sequence[tuple[str, str]], otherwise: str = "") -> list[str]:
    if not lines and not otherwise:
        return []
    items = [f"* {escape(what)}: {code(text)}" for what, text in lines] or [escape(otherwise)]
    return [f"**{escape(title)}**", "\n".join(items)]


def format_json(comparison: Comparison) -> str:
    """Write the comparison for other programs.

    Members: base, new (runs), threshold, comparable (false, and why not), changes, verdicts, points
    (all columns of `raybench.analysis.compare.compare`, and what else changed there).
    """
    points = as_json.records(comparison.frame)
    for row in points:
        row["beside"] = [asdict(one) for one in comparison.beside.get(row["point_id"], ())]
    return as_json.format_object(
        base=asdict(comparison.base),
        new=asdict(comparison.new),
        threshold=comparison.threshold,
        left_out=[asdict(one) for one in comparison.left_out],
        comparable=not comparison.obstacles,
        obstacles=list(comparison.obstacles),
        changes=[asdict(one) for one in comparison.changes],
        verdicts=dict(comparison.verdicts),
        points=points,
    )
