"""Which layout or setting is best: sorted bars with intervals and short names, the best first."""

from __future__ import annotations

from raybench.report import formatting
from raybench.report.charts.data import ChartData, drawn_of, point_name
from raybench.report.charts.grammar import Figure, Mark, axis, bar_panels
from raybench.report.charts.registry import Chart
from raybench.report.lead import amount, answer_metric, metric_noun
from raybench.report.point_settings import distinguishing_settings

_MOST = 12


def ranking_figure(data: ChartData) -> Figure | None:
    """Return bars of the points of each case, the best first; None where no case has two."""
    metric, cases = answer_metric(data.summary), data.summary.cases
    contested = [case for case in cases if len(case.ranked) > 1]
    if metric is None or not contested:
        return None
    every = [(case, one) for case in contested for one in case.ranked]
    noun = metric_noun(data.summary, metric)
    names = distinguishing_settings([one.row for _, one in every])
    bars = []
    for case, one in every[:_MOST]:
        value = amount(data.summary, metric, one.value)
        mark: Mark = {"x": one.value, "text": formatting.metric(metric, one.value)}
        mark["tip"] = f"{point_name(one.row, names, data.ranks)}\n{value}"
        if one.low is not None and one.high is not None:
            mark["low"], mark["high"] = one.low, one.high
        bars.append((case.name, one.name, [mark]))
    note = f"The best first, by {noun}. Thin lines: 95 % intervals, where they are known."
    note += drawn_of(len(bars), len(every))
    title = f"{noun[:1].upper()}{noun[1:]}, the best first"
    return Figure(
        anchor="ranking", title=title, note=note, panels=bar_panels(bars, axis(noun, format="~s"))
    )


CHARTS = (Chart(draw=ranking_figure, place=25, answers=60, is_only_first=True),)
