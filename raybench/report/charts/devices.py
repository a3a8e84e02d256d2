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
    HeatLayout,
    LineLayout,
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
# The columns that are read of the table `telemetry`.
TELEMETRY_COLUMNS = ("node_id", "index", "time", *_SHOWN)
_MOST_TIMES = 60
_THROTTLED = "var(--held)"
# A longer pause of the run, as until it was resumed, is not drawn.
_LONGEST_GAP_S = 60.0
# Limits of all heat maps together, because each cell is an element of the page.
_MOST_CELLS, _MOST_MAPS, _MOST_RANKS, _MOST_COLUMNS = 1_200, 4, 64, 60
# Differences from the median at which the colour of a cell changes.
_STEPS = (-0.1, -0.03, -0.01, 0.01, 0.03, 0.1)


def telemetry_figure(data: ChartData) -> Figure | None:
    """Return panels of SM clock, power, temperature and use over the seconds since the run began.

    Values are means over 1/60 of the time. For more than seven devices, the least, the median and
    the most at each time are drawn. Gaps of more than a minute are left out. None for fewer than
    two times.
    """
    if data.telemetry.empty:
        return None
    sampled = data.telemetry.dropna(subset=list(_SHOWN), how="all")
    if sampled["time"].nunique() < 2:
        return None
    index = "GPU " + sampled["index"].astype("Int64").astype(str)
    if sampled["node_id"].nunique() > 1:
        index = sampled["node_id"].map(lambda node: formatting.plain(node)[:8]) + " " + index
    start = pd.Timestamp(data.answer.data.run.started_at)
    at_s = (pd.to_datetime(sampled["time"], utc=True) - start).dt.total_seconds()
    # Sampled times, and the same without the long gaps before them; also from the start of the run.
    times = np.unique(at_s)
    gaps_s = np.diff(times, prepend=min(0.0, times[0]))
    closed_s = np.cumsum(np.where(gaps_s > _LONGEST_GAP_S, gaps_s, 0.0))
    drawn_at = times - closed_s
    step_s = max(1e-9, float(np.ptp(drawn_at)) / _MOST_TIMES)
    second = (np.interp(at_s, times, drawn_at) / step_s).round() * step_s
    by_time = sampled.assign(device=index, second=second).groupby(["device", "second"], sort=True)
    means = by_time[list(_SHOWN)].mean().reset_index()
    lines = list(dict.fromkeys(means["device"]))
    count, is_crowded = len(lines), len(lines) > MOST_LINES
    if is_crowded:
        of_all = means.drop(columns="device").groupby("second")
        shares = {f"least of {count}": 0.0, "median": 0.5, f"most of {count}": 1.0}
        quantiles = [
            of_all.quantile(share).reset_index().assign(device=name)
            for name, share in shares.items()
        ]
        lines, means = list(shares), pd.concat(quantiles)
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
    """Return the span of each point along x, in order; points between two samples are omitted."""
    timed = sorted(
        (row for row in data.rows if row.duration_s is not None), key=lambda row: row.started_at
    )
    names = distinguishing_settings(timed)
    bands: list[Mark] = []
    for number, row in enumerate(timed):
        begin_s = (row.started_at - data.answer.data.run.started_at).total_seconds()
        low, high = np.interp([begin_s, begin_s + (row.duration_s or 0.0)], times, drawn_at)
        fill = "var(--band)" if number % 2 == 0 else "transparent"
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
    # Clocks differ by little: on an axis from zero a drop could not be seen.
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
    layout = LineLayout(x=x, y=y, below=[strips], has_points=False)
    return line_panel(marks, lines, layout, title=title)


def heat_points(rows: Sequence[ScaledRow]) -> list[ScaledRow]:
    """Return the points to draw as heat maps: at most four of the ok points with most ranks.

    Points whose ranks differ most come first, then points whose steps differ most. Empty if no ok
    point has several ranks.
    """

    def spread(row: ScaledRow) -> tuple[float, float]:
        median, p95 = row.step_ms_p50 or 1.0, row.step_ms_p95 or 0.0
        return round((row.skew_ms_p50 or 0.0) / median, 2), p95 / median

    measured = [row for row in rows if row.status == Status.OK and row.step_ms_p50 is not None]
    most = max((row.world_size for row in measured), default=1)
    widest = [row for row in measured if row.world_size == most > 1]
    return sorted(widest, key=spread, reverse=True)[:_MOST_MAPS]


def columns_of_a_map(rows: Sequence[ScaledRow]) -> int:
    """Return the number of columns of each heat map if these points are drawn: 8 to 60."""
    ranks = sum(min(int(row.world_size), _MOST_RANKS) for row in rows)
    return max(8, min(_MOST_COLUMNS, _MOST_CELLS // max(1, ranks)))


def _rank_times_figure(data: ChartData) -> Figure | None:
    """Return heat maps of step times, of 64 ranks at most; None if all `rank_times` are empty."""
    mapped = [times for times in data.rank_times if not times.times_ms.empty]
    if not mapped:
        return None
    names = distinguishing_settings([times.row for times in mapped])
    titles = [settings_words(times.row, names, data.ranks) for times in mapped]
    return Figure(
        anchor="ranks",
        title="Ranks and iterations",
        note="Each cell compares a step of one rank with the median step time of the point. "
        "Shown are the points with the most ranks whose ranks differ most. A column that stands "
        "for several iterations shows the one farthest from the median. Rounds follow each other.",
        panels=[_map(title, times) for title, times in zip(titles, mapped, strict=True)],
    )


def _map(title: str, times: RankTimes) -> Panel:
    """Return the heat map of the first 64 ranks of a point."""
    drawn, median = times.times_ms.iloc[:_MOST_RANKS], times.median_ms
    firsts = [int(first) for first in drawn.columns]
    ends = [*firsts[1:], firsts[-1] + max(1, firsts[-1] - firsts[-2] if len(firsts) > 1 else 1)]
    cells: list[Mark] = []
    for rank, times_ms in zip(drawn.index, drawn.to_numpy(), strict=True):
        for first, end, time_ms in zip(firsts, ends, times_ms, strict=True):
            if pd.isna(time_ms):
                continue
            excess = _excess(time_ms, median)
            last = f" to {end}" if end - first > 1 else ""
            tip = f"rank {rank}, iteration {first + 1}{last}\n"
            tip += f"{formatting.duration(float(time_ms))}, {excess:+.1%}"
            cell = {"x": first, "x2": end, "y": int(rank), "excess": round(excess, 4), "tip": tip}
            cells.append(cell)
    ranks = [int(rank) for rank in drawn.index]
    shown = {"values": ranks[:: max(1, len(ranks) // 8)], "ticks": False, "domain": False}
    scale = {"domain": [firsts[0], ends[-1]], "nice": False, "zero": False}
    layout = HeatLayout(
        x=axis("iteration", scale=scale, grid=False, tickMinStep=1),
        y={"type": "ordinal", "title": "rank", "axis": shown},
        color=by_threshold("excess", _STEPS, "compared with the median"),
        height=min(340, max(100, 24 * len(drawn))),
    )
    return heat_panel(cells, layout, title)


def _excess(time_ms: float, median: float) -> float:
    """Return the relative difference from the median; 0 for a median of 0."""
    return float(time_ms) / median - 1 if median else 0.0


CHARTS = (Chart(draw=telemetry_figure, position=100), Chart(draw=_rank_times_figure, position=90))
