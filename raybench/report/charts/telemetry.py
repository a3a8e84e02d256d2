"""What the devices did over the time of the run, and which point ran when."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np
import pandas as pd

from raybench.report import formatting, plain_text
from raybench.report.charts.data import ChartData, Row, point_name
from raybench.report.charts.grammar import (
    HEIGHT,
    MOST_LINES,
    Figure,
    Mark,
    Panel,
    Spec,
    Table,
    axis,
    legend_height,
    line_chart,
)
from raybench.report.charts.registry import Chart
from raybench.report.point_settings import distinguishing_settings

_SHOWN = {
    "sm_clock_mhz": ("SM clock", "MHz"),
    "power_w": ("Power", "W"),
    "temperature_c": ("Temperature", "°C"),
    "gpu_utilization_pct": ("A kernel is running", "%"),
}
# What is read of the table `telemetry`.
TELEMETRY_COLUMNS = ("node_id", "index", "time", *_SHOWN)
_MOST_TIMES = 60
# A run that stood still for longer, as until it was resumed, is drawn without that time.
_LONGEST_GAP_S = 60.0
# Of the points at one time, as many are named.
_MOST_NAMED = 3


def telemetry_figure(data: ChartData) -> Figure | None:
    """Draw what the devices did; None where nothing was sampled twice."""
    start = data.summary.run.started_at
    if data.telemetry.empty:
        return None
    known = data.telemetry.dropna(subset=list(_SHOWN), how="all")
    if known["time"].nunique() < 2:
        return None
    sampled = known.assign(device=_device_names(known), second=_seconds(known["time"], start))
    bands = _bands(data.rows, start, data.ranks)
    left_out_s = _leave_gaps_out(sampled, bands)
    width_s = max(1e-9, float(np.ptp(sampled["second"])) / _MOST_TIMES)
    sampled["second"] = (sampled["second"] / width_s).round() * width_s
    by_time = sampled.groupby(["device", "part", "second"], sort=True)
    means = by_time[list(_SHOWN)].mean().reset_index()
    lines, drawn = _lines(means)
    used = [name for name in _SHOWN if drawn[name].notna().any()]
    note = "As NVML tells it, by one process on each node; seconds since the run began"
    if left_out_s:
        note += f", without {formatting.long_time(left_out_s)} in which nothing was sampled"
    note += "." + (" Every second point is shaded." if bands else "")
    if any(band["is_throttled"] for band in bands):
        note += " Orange: a point that was throttled."
    if len(lines) < means["device"].nunique():
        note += " There are too many devices to draw each."
    titles = {name: f"{_SHOWN[name][0]}, {_SHOWN[name][1]}" for name in used}
    spans = sampled.groupby("device")[used].agg(["min", "max"])
    cells = [
        [
            str(device),
            *(
                plain_text.span(*map(formatting.number, spans.loc[device, name][["min", "max"]]))
                for name in used
            ),
        ]
        for device in spans.index
    ]
    return Figure(
        anchor="telemetry",
        title="Devices over time",
        note=note,
        panels=[
            Panel(
                title=titles[name],
                layers=_layers(drawn, lines, name, bands),
                height=HEIGHT + legend_height(lines),
            )
            for name in used
        ],
        table=Table(columns=["device", *titles.values()], rows=cells, texts=1),
    )


CHARTS = (Chart(draw=telemetry_figure, place=100),)


def _bands(rows: Sequence[Row], start: datetime, ranks: str) -> list[Mark]:
    """Return when each point ran, in seconds since the run began, in order."""
    timed = [row for row in rows if row.duration_s is not None]
    timed.sort(key=lambda row: row.started_at)
    names = distinguishing_settings(timed)
    begins = [float(_seconds(pd.Series([row.started_at]), start).iloc[0]) for row in timed]
    return [
        {
            "low": begin,
            "high": begin + (row.duration_s or 0.0),
            "is_throttled": formatting.is_set(row.throttled),
            "is_even": place % 2 == 0,
            "name": point_name(row, names, ranks).replace("\n", ", "),
        }
        for place, (begin, row) in enumerate(zip(begins, timed, strict=True))
    ]


def _device_names(telemetry: pd.DataFrame) -> pd.Series:
    """Return `GPU 0`, and with the node where there are several."""
    index = "GPU " + telemetry["index"].astype("Int64").astype(str)
    if telemetry["node_id"].nunique() < 2:
        return index
    nodes = {node: plain_text.plain(node)[:8] for node in telemetry["node_id"].unique()}
    return telemetry["node_id"].map(nodes) + " " + index


def _seconds(times: pd.Series, start: datetime) -> pd.Series:
    return (pd.to_datetime(times, utc=True) - pd.Timestamp(start)).dt.total_seconds()


def _leave_gaps_out(sampled: pd.DataFrame, bands: Sequence[Mark]) -> float:
    """Close the long gaps in `second`, and number the parts between them in `part`.

    Changes `sampled` and the ends of `bands`; returns the seconds that are left out.
    """
    times = np.unique(sampled["second"])
    # Also from the start of the run to its first sample.
    gaps_s = np.diff(times, prepend=min(0.0, times[0]))
    closed_s = np.where(gaps_s > _LONGEST_GAP_S, gaps_s, 0.0)
    place = np.searchsorted(times, sampled["second"])
    sampled["part"] = np.cumsum(closed_s > 0)[place]
    sampled["second"] -= np.cumsum(closed_s)[place]
    for band in bands:
        for end in ("low", "high"):
            after = min(int(np.searchsorted(times, band[end])), len(times) - 1)
            band[end] -= float(np.cumsum(closed_s)[after])
    return float(closed_s.sum())


def _lines(means: pd.DataFrame) -> tuple[list[str], pd.DataFrame]:
    """Return each device as a line; of many devices the least, the median and the most of them."""
    devices = list(dict.fromkeys(means["device"]))
    if len(devices) <= MOST_LINES:
        return devices, means
    by_time = means.drop(columns="device").groupby(["part", "second"])
    words = {f"least of {len(devices)}": 0.0, "median": 0.5, f"most of {len(devices)}": 1.0}
    parts = [by_time.quantile(q).reset_index().assign(device=word) for word, q in words.items()]
    return list(words), pd.concat(parts)


def _layers(
    drawn: pd.DataFrame, lines: Sequence[str], name: str, bands: Sequence[Mark]
) -> list[Spec]:
    known = drawn[drawn[name].notna()]
    marks: list[Mark] = [
        {"x": round(float(second), 2), "y": round(float(value), 1), "line": line, "part": int(part)}
        for line, part, second, value in zip(
            *(known[column] for column in ("device", "part", "second", name)), strict=True
        )
    ]
    seconds = [mark["x"] for mark in marks]
    # What came before the first sample and the first point would be empty.
    first = min([min(seconds), *(band["low"] for band in bands if band["low"] >= 0)])
    domain = [min(first, min(seconds)), max(seconds)]
    scale = {"domain": domain, "nice": False, "zero": False}
    # Clocks differ by little, and from zero on their fall would not be seen.
    from_zero = {"zero": False} if name == "sm_clock_mhz" else {"domainMin": 0}
    x = axis("seconds", format="~s", scale=scale)
    y = axis(None, scale={**from_zero, "padding": 6})
    shaded = [
        {
            "low": max(band["low"], domain[0]),
            "high": min(band["high"], domain[1]),
            "fill": "var(--held)" if band["is_throttled"] else "var(--band)",
        }
        for band in bands
        if (band["is_throttled"] or band["is_even"])
        and band["high"] > domain[0]
        and band["low"] < domain[1]
    ]
    return [
        *([_strips(shaded, "low", "high")] if shaded else []),
        *line_chart(marks, lines, x, y, has_points=False),
        _tips(marks, _SHOWN[name][1], bands),
    ]


def _strips(values: Sequence[Mark], low: str, high: str) -> Spec:
    """Return strips over the whole height of a chart, of the colour `fill` each."""
    return {
        "data": {"values": list(values)},
        "mark": {"type": "rect", "stroke": None},
        "encoding": {
            "x": {"field": low, "type": "quantitative"},
            "x2": {"field": high},
            "fill": {"field": "fill", "type": "nominal", "scale": None},
        },
    }


def _tips(marks: Sequence[Mark], unit: str, bands: Sequence[Mark]) -> Spec:
    """Return an unseen strip for each time that can be pointed at."""
    times = sorted({mark["x"] for mark in marks})
    half = float(np.diff(times).min()) / 2 if len(times) > 1 else 0.5
    strips = []
    for time in times:
        phrases = [f"{one['line']}: {one['y']:g} {unit}" for one in marks if one["x"] == time]
        now = [
            one["name"] for one in bands if one["low"] <= time + half and one["high"] > time - half
        ]
        tip = "\n".join([f"{time:.1f} s", *phrases, *now[:_MOST_NAMED]])
        strips.append({"low": time - half, "high": time + half, "fill": "transparent", "tip": tip})
    spec = _strips(strips, "low", "high")
    spec["mark"]["aria"] = True
    spec["encoding"]["description"] = {"field": "tip", "type": "nominal"}
    return spec
