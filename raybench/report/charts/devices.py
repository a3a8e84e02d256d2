"""What devices and ranks did over the time of the run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from raybench.analysis.rows import ScaledRow, distinguishing_settings
from raybench.records.status import Status
from raybench.report import formatting
from raybench.report.charts import Chart, ChartData, RankTimes, point_name
from raybench.report.charts.grammar import (
    MOST_LINES,
    Figure,
    Mark,
    Panel,
    Spec,
    axis,
    by_threshold,
    heat_panel,
    line_panel,
)
from raybench.report.messages import marks as doubt_marks
from raybench.report.point_settings import settings_words

_SHOWN = {
    "sm_clock_mhz": ("SM clock", "MHz"),
    "power_w": ("Power", "W"),
    "temperature_c": ("Temperature", "°C"),
    "gpu_utilization_pct": ("A kernel is running", "%"),
}
# What is read of the table `telemetry`.
TELEMETRY_COLUMNS = ("node_id", "index", "time", *_SHOWN)
_MOST_TIMES = 60
_THROTTLED = "var(--held)"
# A run that stood still for longer, as until it was resumed, is drawn without that time.
_LONGEST_GAP_S = 60.0
# Cells of all heat maps together: each is an element of the page.
_MOST_CELLS, _MOST_MAPS, _MOST_RANKS, _MOST_COLUMNS = 1_200, 4, 64, 60
# Differences from the median at which the colour of a cell changes.
_STEPS = (-0.1, -0.03, -0.01, 0.01, 0.03, 0.1)


def telemetry_figure(data: ChartData) -> Figure | None:
    """Return panels of SM clock, power, temperature and use over the seconds since the run began.

    What was never sampled has no panel. Values are means over 1/60 of the time; of more than seven
    devices the least, the median and the most at each time are drawn. Gaps of more than a minute
    are left out. None for fewer than two times.
    """
    if data.telemetry.empty:
        return None
    known = data.telemetry.dropna(subset=list(_SHOWN), how="all")
    if known["time"].nunique() < 2:
        return None
    index = "GPU " + known["index"].astype("Int64").astype(str)
    if known["node_id"].nunique() > 1:
        index = known["node_id"].map(lambda node: formatting.plain(node)[:8]) + " " + index
    start = pd.Timestamp(data.answer.data.run.started_at)
    at_s = (pd.to_datetime(known["time"], utc=True) - start).dt.total_seconds()
    # Sampled times, and the same without the long gaps before them; also from the start of the run.
    times = np.unique(at_s)
    gaps_s = np.diff(times, prepend=min(0.0, times[0]))
    closed_s = np.cumsum(np.where(gaps_s > _LONGEST_GAP_S, gaps_s, 0.0))
    drawn_at = times - closed_s
    step_s = max(1e-9, float(np.ptp(drawn_at)) / _MOST_TIMES)
    second = (np.interp(at_s, times, drawn_at) / step_s).round() * step_s
    by_time = known.assign(device=index, second=second).groupby(["device", "second"], sort=True)
    means = by_time[list(_SHOWN)].mean().reset_index()
    lines = list(dict.fromkeys(means["device"]))
    count, is_crowded = len(lines), len(lines) > MOST_LINES
    if is_crowded:
        of_all = means.drop(columns="device").groupby("second")
        shares = {f"least of {count}": 0.0, "median": 0.5, f"most of {count}": 1.0}
        found = [of_all.quantile(q).reset_index().assign(device=n) for n, q in shares.items()]
        lines, means = list(shares), pd.concat(found)
    bands = _bands(data, times, drawn_at)
    note = "One process on each node samples NVML. Time counts from the start of the run"
    if closed_s[-1]:
        note += f", without {formatting.long_time(closed_s[-1])} in which nothing was sampled"
    note += "." + (" Every second point is shaded." if bands else "")
    if any(band["fill"] == _THROTTLED for band in bands):
        note += " Orange: a point whose clocks were limited by heat or a fault."
    if is_crowded:
        note += " There are too many devices to draw each."
    panels = [
        _panel(f"{title}, {unit}", means[means[name].notna()], lines, name, bands)
        for name, (title, unit) in _SHOWN.items()
        if means[name].notna().any()
    ]
    return Figure(anchor="telemetry", title="Devices over time", note=note, panels=panels)


def _bands(data: ChartData, times: np.ndarray, drawn_at: np.ndarray) -> list[Mark]:
    """Return the span of each point along x, in order; points between two samples have none."""
    timed = sorted(
        (row for row in data.rows if row.duration_s is not None), key=lambda row: row.started_at
    )
    names = distinguishing_settings(timed)
    bands: list[Mark] = []
    for place, row in enumerate(timed):
        begin_s = (row.started_at - data.answer.data.run.started_at).total_seconds()
        low, high = np.interp([begin_s, begin_s + (row.duration_s or 0.0)], times, drawn_at)
        fill = "var(--band)" if place % 2 == 0 else "transparent"
        fill = _THROTTLED if "t" in doubt_marks(row) else fill
        tip = point_name(row, names, data.ranks)
        bands.append({"low": float(low), "high": float(high), "fill": fill, "tip": tip})
    return [band for band in bands if band["low"] < band["high"]]


def _panel(
    title: str, means: pd.DataFrame, lines: Sequence[str], name: str, bands: Sequence[Mark]
) -> Panel:
    """Return the lines of the column `name` of `means` over time, above the bands of the points."""
    marks: list[Mark] = [
        {"x": round(float(second), 2), "y": round(float(value), 1), "line": line}
        for line, second, value in zip(means["device"], means["second"], means[name], strict=True)
    ]
    domain = [min(mark["x"] for mark in marks), max(mark["x"] for mark in marks)]
    scale = {"domain": domain, "nice": False, "zero": False, "clamp": True}
    x = axis("seconds", format="~s", scale=scale)
    # Clocks differ by little, and from zero on their fall would not be seen.
    from_zero = {"zero": False} if name == "sm_clock_mhz" else {"domainMin": 0}
    y = axis(None, scale={**from_zero, "padding": 6})
    strips: Spec = {
        "data": {"values": list(bands)},
        "mark": {"type": "rect", "stroke": None, "aria": True},
        "encoding": {
            "x": {"field": "low", **x},
            "x2": {"field": "high"},
            "fill": {"field": "fill", "type": "nominal", "scale": None},
            "description": {"field": "tip", "type": "nominal"},
        },
    }
    return line_panel(marks, lines, x, y, title=title, below=[strips], has_points=False)


def heat_points(rows: Sequence[ScaledRow]) -> list[ScaledRow]:
    """Return the points to draw as heat maps: at most four, of the ok ones with most ranks.

    Sorted by how much ranks differ, then steps, the most first; [] if no ok one has several ranks.
    """

    def spread(row: ScaledRow) -> tuple[float, float]:
        median, p95 = row.step_ms_p50 or 1.0, row.step_ms_p95 or 0.0
        return round((row.skew_ms_p50 or 0.0) / median, 2), p95 / median

    able = [row for row in rows if row.status == Status.OK and row.step_ms_p50 is not None]
    most = max((row.world_size for row in able), default=1)
    widest = [row for row in able if row.world_size == most > 1]
    return sorted(widest, key=spread, reverse=True)[:_MOST_MAPS]


def columns_of_a_map(rows: Sequence[ScaledRow]) -> int:
    """Return how many columns each heat map may have if these points are drawn: 8 to 60."""
    ranks = sum(min(int(row.world_size), _MOST_RANKS) for row in rows)
    return max(8, min(_MOST_COLUMNS, _MOST_CELLS // max(1, ranks)))


def _rank_times_figure(data: ChartData) -> Figure | None:
    """Return heat maps of step times, of 64 ranks at most; None if all `rank_times` are empty."""
    mapped = [one for one in data.rank_times if not one.times_ms.empty]
    if not mapped:
        return None
    names = distinguishing_settings([one.row for one in mapped])
    titles = [settings_words(one.row, names, data.ranks) for one in mapped]
    return Figure(
        anchor="ranks",
        title="Ranks and iterations",
        note="Each cell compares a step of one rank with the median step time of the point. "
        "Shown are the points with the most ranks whose ranks differ most. A column that stands "
        "for several iterations shows the one farthest from the median. Rounds follow each other.",
        panels=[_map(title, one) for title, one in zip(titles, mapped, strict=True)],
    )


def _map(title: str, found: RankTimes) -> Panel:
    """Return the heat map of the first 64 ranks of a point that has times."""
    drawn, median = found.times_ms.iloc[:_MOST_RANKS], found.median_ms
    firsts = [int(first) for first in drawn.columns]
    ends = [*firsts[1:], firsts[-1] + max(1, firsts[-1] - firsts[-2] if len(firsts) > 1 else 1)]
    cells = [
        {
            "x": first,
            "x2": end,
            "y": int(rank),
            "excess": round(_excess(time_ms, median), 4),
            "tip": f"rank {rank}, iteration {first + 1}{f' to {end}' if end - first > 1 else ''}\n"
            f"{formatting.duration(float(time_ms))}, {_excess(time_ms, median):+.1%}",
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
        by_threshold("excess", _STEPS, "compared with the median"),
        title=title,
        height=min(340, max(100, 24 * len(drawn))),
    )


def _excess(time_ms: float, median: float) -> float:
    """Return by which share a step is longer than the median; 0 for a median of 0."""
    return float(time_ms) / median - 1 if median else 0.0


CHARTS = (Chart(draw=telemetry_figure, place=100), Chart(draw=_rank_times_figure, place=90))
