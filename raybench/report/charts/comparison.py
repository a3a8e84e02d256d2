"""The change of each compared point as a bar with its interval, coloured by verdict."""

from __future__ import annotations

from raybench.analysis.compare import FASTER, SAME, SLOWER, UNCLEAR, ComparedPoint
from raybench.report.charts.grammar import Bar, BarLayout, Figure, Mark, axis, bar_panels
from raybench.report.comparison import Comparison, change_percent
from raybench.report.words.compare import VERDICT_WORDS, undecided

_MOST_BARS = 36
# Entries of the legend, without the threshold: large undecided changes have their own colour.
_LARGE, _SMALL = "undecided, over {}", "undecided, up to {}"
# Verdict, or one of these entries, -> colour.
_COLORS = {
    SLOWER: "var(--bad)",
    _LARGE: "var(--s5)",
    _SMALL: "var(--s6)",
    SAME: "var(--axis)",
    FASTER: "var(--s3)",
}


def change_figures(comparison: Comparison) -> list[Figure]:
    """Return a figure with the largest changes; [] if no point has a rate on both sides."""
    # (change of the rate, point)
    changes = [(row.ratio - 1, row) for row in comparison.compared if row.ratio is not None]
    if not changes:
        return []
    largest_first = sorted(changes, key=lambda change: abs(change[0]), reverse=True)
    # The slowest point comes first.
    drawn = sorted(largest_first[:_MOST_BARS], key=lambda change: change[0])
    threshold = f"{100 * comparison.threshold:g} %"
    entries = [_legend_entry(row, comparison.threshold) for _, row in drawn]
    # Only entries of undecided changes have {}, which `format` replaces with the threshold.
    color_of_entry = {}
    for entry, color in _COLORS.items():
        if entry in entries:
            color_of_entry[entry.format(threshold)] = color
    bars = []
    for (change, row), entry in zip(drawn, entries, strict=True):
        mark = _mark(change, row, comparison.name(row))
        mark["line"] = entry.format(threshold)
        bars.append(Bar(panel="", name=comparison.name(row), marks=[mark]))
    note = f"Bars: the change of {comparison.unit}, the slowest first. Colours: the verdict."
    if any(row.interval_low is not None for _, row in drawn):
        note += " Thin lines: 95 % intervals between runs."
    if len(changes) > len(drawn):
        note += f" {len(drawn)} of {len(changes)} points are drawn; the table has more."
    x = axis(f"change of {comparison.unit}", format="+%")
    layout = BarLayout(
        x=x, series=[*color_of_entry], colors=[*color_of_entry.values()], is_stacked=True
    )
    panels = bar_panels(bars, layout)
    return [Figure(anchor="changes", title="Slower or faster", note=note, panels=panels)]


def _legend_entry(row: ComparedPoint, threshold: float) -> str:
    """Return the key of _COLORS for a compared point: its verdict, or how large its change is."""
    if row.verdict in _COLORS:
        return str(row.verdict)
    # Undecided.
    change = (row.ratio or 1.0) - 1
    return _LARGE if abs(change) > threshold else _SMALL


def _mark(change: float, row: ComparedPoint, name: str) -> Mark:
    """Return the mark of a bar from 0 to `change`, with its interval."""
    # An interval of no width keeps the text beside the bar.
    low, high, interval_line = change, change, ""
    if row.interval_low is not None and row.interval_high is not None:
        # The row has the interval of the ratio of the sides; a ratio of 1 is no change.
        low, high = row.interval_low - 1, row.interval_high - 1
        interval_line = f"\n95 % interval: {change_percent(low)} to {change_percent(high)}"
    if row.verdict == UNCLEAR:
        verdict = undecided(change)
    else:
        verdict = f"{VERDICT_WORDS[row.verdict or UNCLEAR]}, {change_percent(change)}"
    mark: Mark = {"x": change, "x2": 0.0, "low": low, "high": high}
    return {**mark, "text": change_percent(change), "tip": f"{name}\n{verdict}{interval_line}"}
