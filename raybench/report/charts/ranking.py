"""Which layout or setting is best: sorted bars with intervals and short names, the best first."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.report import formatting
from raybench.report.charts.data import ChartData, Row, point_name
from raybench.report.charts.grammar import Figure, Mark, axis, bar_panels
from raybench.report.charts.registry import Chart
from raybench.report.lead import amount, answer_metric, metric_noun
from raybench.report.point_settings import distinguishing_settings, short_name

_MOST = 12
# Settings that are read along the bars of one panel.
_ALONG = ("batch", "world_size", "size_bytes")


def ranking_figure(data: ChartData) -> Figure | None:
    """Draw the points of each case, the best first; None where no two points compete."""
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
    if len(every) > _MOST:
        note += f" The first {_MOST} of {len(every)} points are drawn; the table has all."
    title = f"{noun[:1].upper()}{noun[1:]}, the best first"
    return Figure(
        anchor="ranking", title=title, note=note, panels=bar_panels(bars, axis(noun, format="~s"))
    )


CHARTS = (Chart(draw=ranking_figure, place=25, answers=60, is_only_first=True),)


def bar_names(rows: Sequence[Row], data: ChartData) -> list[tuple[str, str]]:
    """Return the title of the panel and the name of the bar of each point.

    Batches, numbers of ranks and sizes are read along the bars of a panel, and all other settings
    tell the panels; where that leaves fewer than two bars a panel, there is one panel for all.
    """
    names = distinguishing_settings(rows)
    along = [name for name in names if name in _ALONG]
    rest = [name for name in names if name not in along]
    titles = [formatting.settings_words(row, rest, data.ranks) for row in rows]
    if len(rows) < 2 * len(set(titles)):
        return [("", short_name(row, names, data.ranks)) for row in rows]
    bars = [formatting.settings_words(row, along, data.ranks) for row in rows]
    return list(zip(titles, bars, strict=True))
