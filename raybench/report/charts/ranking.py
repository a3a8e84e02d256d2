"""Which layout or setting is best: sorted bars with intervals and short names, the best first."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.analysis.settings import is_numeric
from raybench.report import formatting
from raybench.report.charts.data import ChartData, Row, point_name
from raybench.report.charts.grammar import Figure, Mark, axis, bar_panels
from raybench.report.charts.registry import Chart
from raybench.report.point_settings import DEGREES, distinguishing_settings, short_name

_MOST = 12
# Settings that are read along the bars of one panel.
_ALONG = ("batch", "world_size", "size_bytes")


def ranking_figure(data: ChartData) -> Figure | None:
    """Draw the fastest points first; None where they differ in numbers alone, as a batch size."""
    known = data.measured
    names = distinguishing_settings(known)
    rest = [name for name in names if name not in (*_ALONG, "workload")]
    if not any(name in DEGREES or not is_numeric(known, name) for name in rest):
        return None
    has_rates = all(row.throughput is not None for row in known)
    column = "throughput" if has_rates else "step_ms_p50"
    known.sort(key=lambda row: getattr(row, column), reverse=has_rates)
    bars = [
        ("", short_name(row, names, data.ranks), [_mark(row, names, data)]) for row in known[:_MOST]
    ]
    what = "samples per second" if has_rates else "step time"
    note = f"The best first, by {what}. Thin lines: 95 % intervals, where they are known."
    if len(known) > _MOST:
        note += f" The first {_MOST} of {len(known)} points are drawn; the table has all."
    return Figure(
        anchor="ranking",
        title="Samples per second, the most first" if has_rates else "Step time, the least first",
        note=note,
        panels=bar_panels(bars, axis("samples/s", format="~s") if has_rates else axis("ms")),
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


def _mark(row: Row, names: Sequence[str], data: ChartData) -> Mark:
    step_ms, rate = row.step_ms_p50 or 0.0, row.throughput
    tip = f"{point_name(row, names, data.ranks)}\n{formatting.step_time(row)}"
    if rate is not None:
        tip += f", {formatting.number(rate)} samples/s"
    value = step_ms if rate is None else rate
    mark: Mark = {"x": value, "text": formatting.number(value), "tip": tip}
    low, high = row.step_ms_low, row.step_ms_high
    if low and high:
        ends = (low, high) if rate is None else (rate * step_ms / high, rate * step_ms / low)
        mark["low"], mark["high"] = ends
    return mark
