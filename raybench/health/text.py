"""A health check as text, for a terminal and for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import RenderableType

from raybench.health.comparison import (
    HealthComparison,
    relative_change,
    run_lines,
    urgency,
    word,
)
from raybench.health.history import FigureTrend
from raybench.health.report import HealthReport
from raybench.health.tables import blocks
from raybench.records.health import figure
from raybench.report import formatting
from raybench.report.comparison import percent
from raybench.report.export.as_json import format_object
from raybench.report.plain_text import counted
from raybench.report.text import markdown
from raybench.report.text.history import sparkline
from raybench.report.text.terminal import (
    SETTING_CHARS,
    WIDTH,
    Column,
    grid,
    lay_out,
    line,
    pairs,
    render,
)

_MOST_FIGURES = 40
_STYLES = {0: "bold green", 1: "bold red", 3: "bold yellow"}


def format_text(report: HealthReport, *, width: int = WIDTH, color: bool = False) -> str:
    """Write the verdict, each case and the tables."""
    return render(_parts(report, width), width, color)


def _parts(report: HealthReport, width: int) -> Iterator[RenderableType]:
    yield line(report.headline, _STYLES[report.exit_code])
    yield line(report.machine)
    yield line(f"{formatting.course(report.run)}; run {report.run.run_id}")
    yield from lay_out(blocks(report, width))


def format_markdown(report: HealthReport) -> str:
    """Write the same for a pull request."""
    return markdown.join(
        [
            f"## {markdown.escape(report.headline)}",
            f"{markdown.escape(report.machine)}; {formatting.course(report.run)}; "
            f"run {markdown.code(report.run.run_id)}.",
            *markdown.lay_out(blocks(report, None)),
        ]
    )


def format_comparison(comparison: HealthComparison, *, width: int, color: bool) -> str:
    """Write two checks beside each other, for a terminal."""
    head = [pairs(run_lines(comparison)), line("")]
    return render([*head, *lay_out(comparison.blocks())], width, color)


def format_comparison_markdown(comparison: HealthComparison) -> str:
    """Write the same for a pull request."""
    ids = [markdown.code(one.run.run_id) for one in (comparison.new, comparison.base)]
    return markdown.join([f"## {' against '.join(ids)}", *markdown.lay_out(comparison.blocks())])


def format_comparison_json(comparison: HealthComparison) -> str:
    """Write the same for other programs."""
    return format_object(**comparison.as_dict())


def format_trends(
    trends: Sequence[FigureTrend], check_count: int, *, width: int, color: bool
) -> str:
    """Write how figures went over several checks, for a terminal."""
    slower = sum(one.last.is_slower for one in trends)
    verdict = f"{slower or 'none'} slower in the last one than before, by more than days differ."
    if not trends:
        verdict = "nothing to compare; it takes two checks of the same devices."
    headline = f"{counted(len(trends), 'figure')} over {counted(check_count, 'check')}: {verdict}"
    ordered = sorted(trends, key=lambda one: urgency(one.last))
    parts: list[RenderableType] = [line(headline, "bold")]
    if ordered:
        parts += [line(""), _trend_table(ordered[:_MOST_FIGURES])]
    if (hidden := len(ordered) - _MOST_FIGURES) > 0:
        parts += [line(""), line(f"{hidden} more have a history; --json has all")]
    return render(parts, width, color)


def _trend_table(trends: Sequence[FigureTrend]) -> RenderableType:
    columns = [
        Column("test", folds_to=SETTING_CHARS),
        Column("of", folds_to=SETTING_CHARS),
        Column("unit"),
        *(Column(name, side="right") for name in ("checks", "last", "change")),
        Column("by check"),
        Column("verdict"),
    ]
    cells = [
        [
            one.last.new.test,
            one.last.new.subject.name,
            one.last.new.unit,
            str(len(one.values)),
            figure(one.values[-1]),
            percent(relative_change(one.last)),
            sparkline(one.values),
            word(one.last),
        ]
        for one in trends
    ]
    return grid(columns, cells)


def format_trends_json(trends: Sequence[FigureTrend], run_ids: Sequence[str]) -> str:
    """Write the same for other programs."""
    figures = [
        {
            "test": one.last.new.test,
            "subject": asdict(one.last.new.subject),
            "unit": one.last.new.unit,
            "values": one.values,
            "ratio": one.last.ratio,
            "limit": one.last.limit,
            "verdict": word(one.last),
        }
        for one in trends
    ]
    return format_object(checks=list(run_ids), figures=figures)
