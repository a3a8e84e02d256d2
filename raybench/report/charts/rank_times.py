"""Step times by rank and iteration, as heat maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from raybench.analysis.rows import ScaledRow
from raybench.records import Status
from raybench.report import formatting
from raybench.report.charts.chart import Chart, ChartData
from raybench.report.charts.grammar import Figure, Panel, axis, by_threshold, heat_panel
from raybench.report.point_settings import distinguishing_settings

# Cells of all heat maps together: each is an element of the page.
_MOST_CELLS, _MOST_MAPS, _MOST_RANKS, _MOST_COLUMNS = 1_200, 4, 64, 60
# Differences from the median at which the colour of a cell changes.
_STEPS = (-0.1, -0.03, -0.01, 0.01, 0.03, 0.1)


def heat_points(rows: Sequence[ScaledRow]) -> list[ScaledRow]:
    """Return at most four points with the most ranks: those whose ranks or steps differ most first.

    [] where no point with several ranks is ok.
    """

    def spread(row: ScaledRow) -> tuple[float, float]:
        median, p95 = row.step_ms_p50 or 1.0, row.step_ms_p95 or 0.0
        return round((row.skew_ms_p50 or 0.0) / median, 2), p95 / median

    able = [row for row in rows if row.status == Status.OK and row.step_ms_p50 is not None]
    most = max((row.world_size for row in able), default=1)
    widest = [row for row in able if row.world_size == most > 1]
    return sorted(widest, key=spread, reverse=True)[:_MOST_MAPS]


def columns_of_a_map(rows: Sequence[ScaledRow]) -> int:
    """Return how many columns each heat map may have where these points are drawn: 8 to 60."""
    ranks = sum(min(int(row.world_size), _MOST_RANKS) for row in rows)
    return max(8, min(_MOST_COLUMNS, _MOST_CELLS // max(1, ranks)))


def rank_times_figure(data: ChartData) -> Figure | None:
    """Return heat maps of step times; None where no point with several ranks has samples."""
    mapped = [one for one in data.rank_times if not one.times_ms.empty]
    if not mapped:
        return None
    names = distinguishing_settings([one.row for one in mapped])
    titles = [formatting.settings_words(one.row, names, data.ranks) for one in mapped]
    return Figure(
        anchor="ranks",
        title="Ranks and iterations",
        note="Each rank's step times against the point's median over all ranks, of the points "
        "with the most ranks that differ most. Where a column stands for several iterations, it "
        "shows the one farthest from the median. Rounds follow each other.",
        panels=[_map(title, one.times_ms) for title, one in zip(titles, mapped, strict=True)],
    )


CHARTS = (Chart(draw=rank_times_figure, place=90),)


def _map(title: str, times_ms: pd.DataFrame) -> Panel:
    """Return the heat map of the first 64 ranks; times_ms: as `RankTimes` has it, not empty."""
    drawn = times_ms.iloc[:_MOST_RANKS]
    median = float(np.nanmedian(times_ms.to_numpy()))
    firsts = [int(first) for first in drawn.columns]
    ends = [*firsts[1:], firsts[-1] + max(1, firsts[-1] - firsts[-2] if len(firsts) > 1 else 1)]
    cells = [
        {
            "x": first,
            "x2": end,
            "y": int(rank),
            "excess": round(float(time_ms) / median - 1, 4),
            "tip": f"rank {rank}, iteration {first + 1}{f' to {end}' if end - first > 1 else ''}\n"
            f"{formatting.duration(float(time_ms))}, {time_ms / median - 1:+.1%}",
        }
        for rank, times in zip(drawn.index, drawn.to_numpy(), strict=True)
        for first, end, time_ms in zip(firsts, ends, times, strict=True)
        if time_ms == time_ms
    ]
    ranks = [int(rank) for rank in drawn.index]
    shown = {"values": ranks[:: max(1, len(ranks) // 8)], "ticks": False, "domain": False}
    scale = {"domain": [firsts[0], ends[-1]], "nice": False, "zero": False}
    return heat_panel(
        cells,
        axis("iteration", scale=scale, grid=False, tickMinStep=1),
        {"type": "ordinal", "title": "rank", "axis": shown},
        by_threshold("excess", _STEPS, "against the median"),
        title=title,
        height=min(420, max(100, 24 * len(drawn)) + 80),
    )
