"""The step time of each point, and how its steps are spread."""

from __future__ import annotations

from collections.abc import Callable

from raybench.report import formatting
from raybench.report.charts.data import (
    ChartData,
    Row,
    distinguishing_settings,
    in_order,
    point_name,
)
from raybench.report.charts.grammar import MOST_BARS, Figure, Table, axis, bar_panels
from raybench.report.charts.ranking import bar_names
from raybench.report.charts.registry import Chart
from raybench.report.tables import STEP_MEANING

_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("iterations", lambda row: f"{int(row['iterations']):,}"),
    *(
        (f"{title} ms", lambda row, name=name: formatting.number(row[f"step_ms_{name}"]))
        for name, title in (
            *(("min", "least"), ("p50", "median"), ("p90", "p90"), ("p95", "p95")),
            *(("p99", "p99"), ("max", "most"), ("std", "std. deviation")),
        )
    ),
)


def times_figure(data: ChartData) -> Figure | None:
    """Draw the median of each point and the range of its steps; None where nothing was measured."""
    known = in_order(data.measured, ("batch", "world_size"))
    if not known:
        return None
    shown, names = known[:MOST_BARS], distinguishing_settings(known)
    bars = []
    for row, (panel, name) in zip(shown, bar_names(shown, data), strict=True):
        least, median, p95 = (float(row[f"step_ms_{one}"]) for one in ("min", "p50", "p95"))
        spread = f"least {formatting.duration(least)}, p95 {formatting.duration(p95)}"
        tip = f"{point_name(row, names, data.ranks)}\n{formatting.step_time(row)}\n{spread}"
        mark = {"x": median, "low": least, "high": p95, "tip": tip}
        bars.append((panel, name, [mark]))
    note = f"{STEP_MEANING} Bars: medians; thin lines: from the least to the 95th percentile."
    if len(shown) < len(known):
        note += f" {len(shown)} of {len(known)} points are drawn; the table has all."
    cells = [
        [
            str(row["point_id"]),
            formatting.settings_words(row, names, data.ranks),
            *(cell(row) for _, cell in _COLUMNS),
        ]
        for row in known
    ]
    columns = ["point", "settings", *(title for title, _ in _COLUMNS)]
    return Figure(
        anchor="times",
        title="Step times",
        note=note,
        panels=bar_panels(bars, axis("ms")),
        table=Table(columns=columns, rows=cells, texts=2),
    )


CHARTS = (Chart(draw=times_figure, place=80, answers=80),)
