"""A comparison of two runs as text: for a terminal, as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from raybench.report import comparison as words
from raybench.report import formatting
from raybench.report.comparison import Comparison
from raybench.report.document import Block, Line, Listing, Table
from raybench.report.export import as_json
from raybench.report.text import markdown, terminal
from raybench.report.text.markdown import code, escape
from raybench.report.text.terminal import WIDTH, line, pairs, render
from raybench.results.run import Run

NOT_COMPARABLE = "NOT COMPARABLE"


def format_terminal(comparison: Comparison, *, width: int = WIDTH, color: bool = False) -> str:
    """Write the comparison: the answer, the runs, what changed around, then point by point."""
    answer, *rest = (
        terminal.narrow(block, width) if isinstance(block, Table) else block
        for block in _blocks(comparison)
    )
    runs = pairs([("base", _runs(comparison.base)), ("new", _runs(comparison.new))])
    parts = [*terminal.lay_out([answer]), runs, line(""), *terminal.lay_out(rest)]
    return render(parts, width, color)


def format_markdown(comparison: Comparison) -> str:
    """Write the comparison, to be read in a pull request."""
    title = (
        f"## {escape(comparison.new[-1].job_name)}: {code(comparison.new[-1].run_id)} against "
        f"{code(comparison.base[-1].run_id)}"
    )
    return markdown.join([title, *markdown.lay_out(_blocks(comparison))])


def _blocks(comparison: Comparison) -> Iterator[Block]:
    yield Line(text=words.headline(comparison), tone="strong")
    for text in (words.sensitivity(comparison), words.one_sided(comparison)):
        yield from [Line(text=text)] if text else []
    yield from (Line(text=text, tone="advice") for text in words.advice(comparison))
    for why in comparison.obstacles:
        text = f"{NOT_COMPARABLE}: {why}. The changes below tell of that, not of the software."
        yield Line(text=text, tone="alarm")
    yield _list("What changed around the points", words.environment(comparison), words.SAME_AROUND)
    if comparison.compared:
        yield words.table(comparison)
        _, hidden = words.shown(comparison)
        if hidden:
            yield words.hidden_line(hidden)
    for listing in (
        _list("What changed beside, or is missing for a verdict", words.beside(comparison)),
        _list("Failed in one of the runs", words.unpaired(comparison)),
    ):
        yield from [listing] if listing.lines else []
    for text in words.explanation(comparison):
        yield Line(text=text, tone="aside", is_apart=True)


def _list(title: str, lines: Sequence[tuple[str, str]], otherwise: str = "") -> Listing:
    return Listing(title=title, lines=lines, is_quoted=True, otherwise=otherwise)


def _runs(runs: Sequence[Run]) -> str:
    newest = f"{formatting.title(runs[-1])}, {formatting.when(runs[-1].started_at)}"
    return newest if len(runs) == 1 else f"mean of {len(runs)} runs, the newest {newest}"


def format_json(comparison: Comparison) -> str:
    """Write the comparison for other programs.

    Members: base, new (lists of runs, the newest last), threshold, comparable (false, and why
    not), changes, verdicts, points (all columns of `raybench.analysis.compare.compare`, and what
    else changed there).
    """
    points = [vars(point) for point in comparison.points]
    for row in points:
        row["beside"] = [asdict(one) for one in comparison.beside.get(row["point_id"], ())]
    return as_json.format_object(
        base=[asdict(run) for run in comparison.base],
        new=[asdict(run) for run in comparison.new],
        threshold=comparison.threshold,
        left_out=[asdict(one) for one in comparison.left_out],
        comparable=not comparison.obstacles,
        obstacles=list(comparison.obstacles),
        changes=[asdict(one) for one in comparison.changes],
        verdicts=dict(comparison.verdicts),
        points=points,
    )
