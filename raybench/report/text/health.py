"""A health check as text, for a terminal and for a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from raybench.report import formatting
from raybench.report.export.as_json import format_object
from raybench.report.health import HealthReport
from raybench.report.health_comparison import HealthComparison, run_lines
from raybench.report.health_tables import blocks
from raybench.report.text import markdown
from raybench.report.text.terminal import WIDTH, lay_out, line, pairs, render

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
