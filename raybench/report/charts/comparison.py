"""The change of each point of two sides, as bars with intervals, coloured by verdict."""

from __future__ import annotations

from raybench.analysis.compare import FASTER, SAME, SLOWER, UNCLEAR, ComparedPoint
from raybench.report.charts.grammar import Bar, BarLayout, Figure, Mark, axis, bar_panels
from raybench.report.comparison import Comparison, change_percent
from raybench.report.words.compare import VERDICT_WORDS, undecided

_MOST_BARS = 36
# An undecided change beyond the threshold stands out from smaller ones.
_LARGE, _SMALL = "undecided, over {}", "undecided, up to {}"
_COLORS = {
    SLOWER: "var(--bad)",
    _LARGE: "var(--s5)",
    _SMALL: "var(--s6)",
    SAME: "var(--axis)",
    FASTER: "var(--s3)",
}


def change_figures(comparison: Comparison) -> list[Figure]:
    """Return the bars of the points that have a rate on both sides; [] without such points."""
    changes = [(row.ratio - 1, row) for row in comparison.compared if row.ratio is not None]
    if not changes:
        return []
    # The largest changes in either direction are drawn, the slowest first.
    drawn = sorted(changes, key=lambda item: -abs(item[0]))[:_MOST_BARS]
    drawn.sort(key=lambda item: item[0])
    threshold = f"{100 * comparison.threshold:g} %"
    classes = [_class_of(row, comparison.threshold) for _, row in drawn]
    colors = {name.format(threshold): _COLORS[name] for name in _COLORS if name in classes}
    bars = []
    for (change, row), name in zip(drawn, classes, strict=True):
        mark = _mark(change, row, comparison.name(row))
        mark["line"] = name.format(threshold)
        bars.append(Bar(panel="", name=comparison.name(row), marks=[mark]))
    note = f"Bars: the change of {comparison.unit}, the slowest first. Colours: the verdict."
    if any(row.interval_low is not None for _, row in drawn):
        note += " Thin lines: 95 % intervals between runs."
    if len(changes) > len(drawn):
        note += f" {len(drawn)} of {len(changes)} points are drawn; the table has more."
    x = axis(f"change of {comparison.unit}", format="+%")
    layout = BarLayout(x=x, series=[*colors], colors=[*colors.values()], is_stacked=True)
    panels = bar_panels(bars, layout)
    return [Figure(anchor="changes", title="Slower or faster", note=note, panels=panels)]


def _class_of(row: ComparedPoint, threshold: float) -> str:
    """Return the key of _COLORS for a compared point."""
    if row.verdict in _COLORS:
        return str(row.verdict)
    return _LARGE if abs((row.ratio or 1.0) - 1) > threshold else _SMALL


def _mark(change: float, row: ComparedPoint, name: str) -> Mark:
    """Return the mark of a bar from 0 to `change`, with its interval."""
    # Without an interval, an interval of no width keeps the text beside its bar.
    low, high, interval = change, change, ""
    if row.interval_low is not None and row.interval_high is not None:
        low, high = row.interval_low - 1, row.interval_high - 1
        interval = f"\n95 % interval: {change_percent(low)} to {change_percent(high)}"
    if row.verdict == UNCLEAR:
        verdict = undecided(change)
    else:
        verdict = f"{VERDICT_WORDS[row.verdict or UNCLEAR]}, {change_percent(change)}"
    mark: Mark = {"x": change, "x2": 0.0, "low": low, "high": high}
    return {**mark, "text": change_percent(change), "tip": f"{name}\n{verdict}{interval}"}
