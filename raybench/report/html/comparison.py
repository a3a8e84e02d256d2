"""A comparison as a page: its answer, sorted bars with intervals, and what changed around them."""

from __future__ import annotations

from raybench.analysis.compare import FASTER, SAME, SLOWER, UNCLEAR, ComparedPoint
from raybench.report.blocks import Line, Listing, Table
from raybench.report.charts.grammar import Figure, Mark, axis, bar_panels
from raybench.report.comparison import Comparison, percent
from raybench.report.html.page import render
from raybench.report.point_settings import distinguishing_settings, short_name
from raybench.version import __version__

_MOST_BARS = 36
# Of the axis, at the right of the longest bar.
_ROOM_FOR_TEXT = 0.25
_COLORS = {
    SLOWER: "var(--bad)",
    FASTER: "var(--s3)",
    UNCLEAR: "var(--s5)",
    SAME: "var(--axis)",
}


def format_comparison(comparison: Comparison) -> str:
    """Return the page of a comparison of two sides of runs as HTML."""
    found = list(comparison.blocks())
    lines = [one for one in found if isinstance(one, Line)]
    newest = comparison.new[-1]
    return render(
        "comparison.html",
        title=comparison.title,
        name=f"{newest.job_name}: compared",
        sides=f"{comparison.words[0]} → {comparison.words[1]}",
        lines=[line for line in lines if line.tone != "aside"],
        notes=[line for line in lines if line.tone == "aside"],
        listings=[one for one in found if isinstance(one, Listing)],
        tables=[one for one in found if isinstance(one, Table)],
        figures=_figures(comparison),
        version=__version__,
    )


def _figures(comparison: Comparison) -> list[Figure]:
    """Return the bars of the points that have a step time on both sides; [] where none has."""
    known = [row for row in comparison.compared if row.ratio is not None]
    if not known:
        return []
    # What changed most, whichever way, is drawn; of that the slowest comes first.
    rows = sorted(known, key=lambda row: -abs(_change(row)))[:_MOST_BARS]
    rows.sort(key=_change, reverse=True)
    present = {row.verdict for row in rows}
    colors = {name: color for name, color in _COLORS.items() if name in present}
    note = "Change of the median step, the slowest first."
    if any(row.ratio_low is not None for row in rows):
        note += " Thin lines are 90 % intervals."
    if len(known) > len(rows):
        note += f" The {len(rows)} largest changes of {len(known)} points; the table has more."
    settings = distinguishing_settings(rows)
    names = [short_name(row, settings, "ranks") for row in rows]
    ends = [end for row in rows for end in (row.ratio, row.ratio_low, row.ratio_high) if end]
    low, high = min(0.0, min(ends) - 1), max(0.0, max(ends) - 1)
    domain = [low, high + _ROOM_FOR_TEXT * (high - low)]
    panels = bar_panels(
        [("", name, [_mark(row, name)]) for row, name in zip(rows, names, strict=True)],
        axis("change of the step", format="+%", scale={"domain": domain}),
        series=list(colors),
        colors=list(colors.values()),
        is_stacked=True,
    )
    return [Figure(anchor="changes", title="Slower or faster", note=note, panels=panels)]


def _change(row: ComparedPoint) -> float:
    return (row.ratio or 1.0) - 1


def _mark(row: ComparedPoint, name: str) -> Mark:
    change, words = _change(row), percent(_change(row))
    # An interval of no width keeps the text beside its bar: the panels have one scale.
    low, high = change, change
    tip = f"{name}\n{words}: {row.verdict}"
    if row.ratio_low is not None and row.ratio_high is not None:
        low, high = row.ratio_low - 1, row.ratio_high - 1
        tip = f"{name}\n{words}, {percent(low)} to {percent(high)}: {row.verdict}"
    ends = {"low": low, "high": high}
    return {"x": change, "x2": 0.0, "line": row.verdict, "text": words, "tip": tip, **ends}
