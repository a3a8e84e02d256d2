"""What devices and ranks did over the time of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.rows import ScaledRow, distinguishing_settings
from raybench.records.doubts import DoubtKind
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

# Column of the table `telemetry` -> title and unit of its panel.
_SHOWN = {
    "sm_clock_mhz": ("SM clock", "MHz"),
    "power_w": ("Power", "W"),
    "temperature_c": ("Temperature", "°C"),
    "gpu_utilization_pct": ("A kernel is running", "%"),
}
# The columns that are read of the table `telemetry`.
TELEMETRY_COLUMNS = ("node_id", "index", "time", *_SHOWN)
_BINS = 60
_THROTTLED = "var(--held)"
# Longer gaps between samples, as until a run was resumed, are not drawn.
_LONGEST_GAP_S = 60.0
# Limits of cells in all maps, maps, and ranks and columns of a map. Each cell is an element of the
# page.
_MOST_CELLS, _MOST_MAPS, _MOST_RANKS, _MOST_COLUMNS = 1_200, 4, 64, 60
# Fewer columns would not show how step times change.
_LEAST_COLUMNS = 8
# Differences from the median at which the colour of a cell changes.
_COLOR_STEPS = (-0.1, -0.03, -0.01, 0.01, 0.03, 0.1)


def telemetry_figure(data: ChartData) -> Figure | None:
    """Return panels of SM clock, power, temperature and use over the seconds since the run began.

    Gaps of more than a minute are left out. None if there are samples at fewer than two times.
    """
    if data.telemetry.empty:
        return None
    samples = data.telemetry.dropna(subset=list(_SHOWN), how="all")
    if samples["time"].nunique() < 2:
        return None
    start = pd.Timestamp(data.answer.data.run.started_at)
    sampled_s = (pd.to_datetime(samples["time"], utc=True) - start).dt.total_seconds()
    time_axis = _TimeAxis.without_gaps(sampled_s)
    means = _means_by_time(samples, time_axis.drawn_at(sampled_s))
    devices = list(dict.fromkeys(means["device"]))
    bands = _point_bands(data, time_axis)
    note = "One process on each node samples NVML. Time counts from the start of the run"
    if time_axis.gaps_s:
        note += f", without {formatting.long_time(time_axis.gaps_s)} in which nothing was sampled"
    note += "." + (" Every second point is shaded." if bands else "")
    if any(band["fill"] == _THROTTLED for band in bands):
        note += " Orange: a point whose clocks were limited by heat or a fault."
    lines = devices
    if len(devices) > MOST_LINES:
        means, lines = _quantiles_of_devices(means, len(devices))
        note += " There are too many devices to draw each."
    panels = [
        _panel(f"{title}, {unit}", means[means[name].notna()], lines, name, bands)
        for name, (title, unit) in _SHOWN.items()
        if means[name].notna().any()
    ]
    return Figure(anchor="telemetry", title="Devices over time", note=note, panels=panels)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimeAxis:
    """An axis of the seconds since the start of the run; long gaps are left out."""

    # Times of samples since the start of the run, ascending.
    times_s: np.ndarray
    # The same times without the long gaps: positions on the axis.
    drawn_s: np.ndarray

    @classmethod
    def without_gaps(cls, sampled_s: pd.Series) -> _TimeAxis:
        """Return the axis of samples; the gap before the first sample begins at 0."""
        times_s = np.unique(sampled_s)  # ascending
        gaps_s = np.diff(times_s, prepend=min(0.0, times_s[0]))
        long_gaps_s = np.where(gaps_s > _LONGEST_GAP_S, gaps_s, 0.0)
        return cls(times_s=times_s, drawn_s=times_s - np.cumsum(long_gaps_s))

    @property
    def gaps_s(self) -> float:
        """Return the total length of the gaps that are left out."""
        return float(self.times_s[-1] - self.drawn_s[-1])

    def drawn_at(self, times_s: Any) -> np.ndarray:
        """Return the positions of times on the axis, between those of the samples."""
        drawn_s: np.ndarray = np.interp(times_s, self.times_s, self.drawn_s)
        return drawn_s


def _means_by_time(samples: pd.DataFrame, axis_s: np.ndarray) -> pd.DataFrame:
    """Return means with the columns `device`, `second` (position of a time bin) and _SHOWN.

    Args:
        axis_s: position of each sample on the axis, which leaves out long gaps.
    """
    device = "GPU " + samples["index"].astype("Int64").astype(str)
    if samples["node_id"].nunique() > 1:
        short_ids = samples["node_id"].map(lambda node_id: formatting.plain(node_id)[:8])
        device = short_ids + " " + device
    bin_s = max(1e-9, float(np.ptp(axis_s)) / _BINS)  # above 0, even for a single time
    second = (axis_s / bin_s).round() * bin_s
    by_time = samples.assign(device=device, second=second).groupby(["device", "second"], sort=True)
    return by_time[list(_SHOWN)].mean().reset_index()


def _quantiles_of_devices(
    means: pd.DataFrame,  # as `_means_by_time` returns them
    count: int,  # of devices
) -> tuple[pd.DataFrame, list[str]]:
    """Return least, median and most over all devices at each time, and the names of the lines."""
    by_time = means.drop(columns="device").groupby("second")
    quantile_of_line = {f"least of {count}": 0.0, "median": 0.5, f"most of {count}": 1.0}
    lines = []
    for name, quantile in quantile_of_line.items():
        lines.append(by_time.quantile(quantile).reset_index().assign(device=name))
    return pd.concat(lines), list(quantile_of_line)


def _point_bands(data: ChartData, time_axis: _TimeAxis) -> list[Mark]:
    """Return a band along x for each point, in order of start."""
    timed = [row for row in data.rows if row.duration_s is not None]
    timed.sort(key=lambda row: row.started_at)
    names = distinguishing_settings(timed)
    bands: list[Mark] = []
    for number, row in enumerate(timed):
        begin_s = (row.started_at - data.answer.data.run.started_at).total_seconds()
        low, high = time_axis.drawn_at([begin_s, begin_s + (row.duration_s or 0.0)])
        fill = "var(--band)" if number % 2 == 0 else "transparent"
        if DoubtKind.THROTTLED.mark in doubt_marks(row):
            fill = _THROTTLED
        tip = point_name(row, names, data.ranks)
        # A point that lies wholly in a gap that the axis leaves out has no band.
        if low < high:
            bands.append({"low": float(low), "high": float(high), "fill": fill, "tip": tip})
    return bands


def _panel(
    title: str, means: pd.DataFrame, lines: Sequence[str], column: str, bands: Sequence[Mark]
) -> Panel:
    """Return the lines of a column of `means` over time, above the bands of the points.

    Args:
        means: a row for each position on the axis (`second`) and line (`device`).
        lines: names of the lines in the order of the legend.
    """
    marks: list[Mark] = [
        {"x": round(float(second), 2), "y": round(float(value), 1), "line": line}
        for line, second, value in zip(means["device"], means["second"], means[column], strict=True)
    ]
    domain = [min(mark["x"] for mark in marks), max(mark["x"] for mark in marks)]
    scale = {"domain": domain, "nice": False, "zero": False, "clamp": True}
    x = axis("seconds", format="~s", scale=scale)
    # Clocks differ by little: on an axis from zero a drop could not be seen.
    lower_end = {"zero": False} if column == "sm_clock_mhz" else {"domainMin": 0}
    y = axis(None, scale={**lower_end, "padding": 6})
    band_layer: Spec = {
        "data": {"values": list(bands)},
        "mark": {"type": "rect", "stroke": None, "aria": True},
        "encoding": {
            "x": {"field": "low", **x},
            "x2": {"field": "high"},
            "fill": {"field": "fill", "type": "nominal", "scale": None},
            "description": {"field": "tip", "type": "nominal"},
        },
    }
    layout = LineLayout(x=x, y=y, below=[band_layer], has_points=False)
    return line_panel(marks, lines, layout, title=title)


def heat_points(rows: Sequence[ScaledRow]) -> list[ScaledRow]:
    """Return at most four ok points with the most ranks, to draw as heat maps.

    Points whose ranks differ most come first, then points whose steps differ most.
    """

    def spread_of_ranks_and_steps(row: ScaledRow) -> tuple[float, float]:
        median_ms = row.step_ms_p50 or 1.0
        spread_of_ranks = (row.skew_ms_p50 or 0.0) / median_ms
        spread_of_steps = (row.step_ms_p95 or 0.0) / median_ms
        return round(spread_of_ranks, 2), spread_of_steps

    measured = [row for row in rows if row.status == Status.OK and row.step_ms_p50 is not None]
    most_ranks = max((row.world_size for row in measured), default=1)
    if most_ranks == 1:
        return []
    with_most_ranks = [row for row in measured if row.world_size == most_ranks]
    with_most_ranks.sort(key=spread_of_ranks_and_steps, reverse=True)
    return with_most_ranks[:_MOST_MAPS]


def columns_of_a_map(rows: Sequence[ScaledRow]) -> int:
    """Return the number of columns of each heat map if these points are drawn."""
    ranks_of_all_maps = sum(min(int(row.world_size), _MOST_RANKS) for row in rows)
    columns = _MOST_CELLS // max(1, ranks_of_all_maps)
    return max(_LEAST_COLUMNS, min(_MOST_COLUMNS, columns))


def _rank_times_figure(data: ChartData) -> Figure | None:
    """Return heat maps of step times by rank and iteration; None without such times."""
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
        panels=[_heat_map(title, times) for title, times in zip(titles, mapped, strict=True)],
    )


def _heat_map(title: str, times: RankTimes) -> Panel:
    """Return the heat map of the first 64 ranks of a point."""
    times_ms = times.times_ms.iloc[:_MOST_RANKS]
    # A column stands for the iterations from `begin` to before `end`. The last column is taken
    # to be as long as the column before.
    begins = [int(begin) for begin in times_ms.columns]
    last_length = max(1, begins[-1] - begins[-2]) if len(begins) > 1 else 1
    ends = [*begins[1:], begins[-1] + last_length]
    cells: list[Mark] = []
    for rank, times_of_rank in zip(times_ms.index, times_ms.to_numpy(), strict=True):
        for begin, end, time_ms in zip(begins, ends, times_of_rank, strict=True):
            if pd.isna(time_ms):
                continue
            difference = float(time_ms) / times.median_ms - 1 if times.median_ms else 0.0
            to_last = f" to {end}" if end - begin > 1 else ""
            tip = f"rank {rank}, iteration {begin + 1}{to_last}\n"
            tip += f"{formatting.duration(float(time_ms))}, {difference:+.1%}"
            excess = round(difference, 4)
            cells.append({"x": begin, "x2": end, "y": int(rank), "excess": excess, "tip": tip})
    ranks = [int(rank) for rank in times_ms.index]
    # At most about eight ranks have a label.
    labels = {"values": ranks[:: max(1, len(ranks) // 8)], "ticks": False, "domain": False}
    scale = {"domain": [begins[0], ends[-1]], "nice": False, "zero": False}
    layout = HeatLayout(
        x=axis("iteration", scale=scale, grid=False, tickMinStep=1),
        y={"type": "ordinal", "title": "rank", "axis": labels},
        color=by_threshold("excess", _COLOR_STEPS, "compared with the median"),
        height=min(340, max(100, 24 * len(times_ms))),
    )
    return heat_panel(cells, layout, title)


CHARTS = (Chart(draw=telemetry_figure, position=100), Chart(draw=_rank_times_figure, position=90))
