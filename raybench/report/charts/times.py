"""The step time of each point, and how its steps are spread."""

from __future__ import annotations

from raybench.report import formatting
from raybench.report.charts.data import (
    ChartData,
    in_order,
    point_name,
)
from raybench.report.charts.grammar import MOST_BARS, Figure, Table, axis, bar_panels
from raybench.report.charts.ranking import bar_names
from raybench.report.charts.registry import Chart
from raybench.report.point_settings import distinguishing_settings
from raybench.report.tables import STEP_MEANING

_COLUMNS = {
    **{"step_ms_min": "least ms", "step_ms_p50": "median ms", "step_ms_p90": "p90 ms"},
    **{"step_ms_p95": "p95 ms", "step_ms_p99": "p99 ms", "step_ms_max": "most ms"},
    "step_ms_std": "std. deviation ms",
}


def times_figure(data: ChartData) -> Figure | None:
    """Draw the median of each point and the range of its steps; None where nothing was measured."""
    known = in_order(data.measured, ("batch", "world_size"))
    if not known:
        return None
    shown, names = known[:MOST_BARS], distinguishing_settings(known)
    bars = []
    for row, (panel, bar) in zip(shown, bar_names(shown, data), strict=True):
        median = row.step_ms_p50 or 0.0
        low, high = row.step_ms_min or median, row.step_ms_p95 or median
        tip = f"{point_name(row, names, data.ranks)}\n{formatting.step_time(row)}\n"
        tip += f"least {formatting.duration(low)}, p95 {formatting.duration(high)}"
        bars.append(
            (
                panel,
                bar,
                [
                    {
                        "x": median,
                        "low": low,
                        "high": high,
                        "tip": tip,
                        "text": formatting.duration(median),
                    }
                ],
            )
        )
    note = f"{STEP_MEANING} Bars: medians; thin lines: from the least to the 95th percentile."
    if len(shown) < len(known):
        note += f" {len(shown)} of {len(known)} points are drawn; the table has all."
    cells = [
        [
            *(row.point_id, formatting.settings_words(row, names, data.ranks)),
            f"{row.iterations:,}",
            *(formatting.number(getattr(row, name)) for name in _COLUMNS),
        ]
        for row in known
    ]
    columns = ["point", "settings", "iterations", *_COLUMNS.values()]
    return Figure(
        anchor="times",
        title="Step times",
        note=note,
        panels=bar_panels(bars, axis("ms")),
        table=Table(columns=columns, rows=cells, texts=2),
    )


CHARTS = (Chart(draw=times_figure, place=80, answers=80),)
