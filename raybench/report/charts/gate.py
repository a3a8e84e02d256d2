"""The change of each point of a gate, as bars with intervals, coloured by verdict."""

from __future__ import annotations

from raybench.ab.verdict import GateOutcome
from raybench.report.charts.grammar import Bar, BarLayout, Figure, Mark, axis, bar_panels
from raybench.report.comparison import change_percent
from raybench.report.gate_report import GateReport
from raybench.report.words.ab import OUTCOME_WORDS

_MOST_BARS = 36
_COLORS = {
    GateOutcome.SLOWER: "var(--bad)",
    GateOutcome.NOT_MEASURED: "var(--s6)",
    GateOutcome.UNDECIDED: "var(--s5)",
    GateOutcome.SAME: "var(--axis)",
    GateOutcome.FASTER: "var(--s3)",
}


def gate_figures(report: GateReport) -> list[Figure]:
    """Return the bars of the points that have a change; [] without such points."""
    drawn = [point for point in report.points if point.change is not None][:_MOST_BARS]
    if not drawn:
        return []
    bars = []
    for point in sorted(drawn, key=lambda point: point.change or 0.0):
        change = point.change or 0.0
        low = change if point.low is None else point.low
        high = change if point.high is None else point.high
        name, verdict = report.name(point), OUTCOME_WORDS[point.outcome]
        text = change_percent(change)
        mark: Mark = {"x": change, "x2": 0.0, "low": low, "high": high, "text": text}
        mark |= {"line": verdict, "tip": f"{name}\n{verdict}, {text}"}
        bars.append(Bar(panel="", name=name, marks=[mark]))
    outcomes = {point.outcome for point in drawn}
    # Verdict in words -> colour, in the order of the legend.
    colors = {
        OUTCOME_WORDS[outcome]: color for outcome, color in _COLORS.items() if outcome in outcomes
    }
    units = " or ".join(sorted({point.unit for point in drawn}))
    layout = BarLayout(
        x=axis(f"change of {units}", format="+%"),
        series=[*colors],
        colors=[*colors.values()],
        is_stacked=True,
    )
    note = f"Bars: the change of {units}. Thin lines: its interval. Colours: the verdict."
    panels = bar_panels(bars, layout)
    return [Figure(anchor="changes", title="Slower or faster", note=note, panels=panels)]
