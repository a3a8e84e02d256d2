"""What the devices did over the time of the run, and which point ran when."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd

from raybench.report import formatting, plain_text
from raybench.report.charts.figure import (
    MOST_LINES,
    TIP,
    Entry,
    Figure,
    Panel,
    Spec,
    Table,
    Value,
    by_line,
    legend,
    specification,
)
from raybench.report.charts.lines import linear_axis
from raybench.report.charts.series import Row, named, telling_settings

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
_THROTTLED = Entry(label="a point that was throttled", color="var(--held)")
_BAND = Entry(label="points, every second one shaded", color="var(--band)")


def telemetry_figure(
    telemetry: pd.DataFrame, start: datetime, rows: Sequence[Row] = (), ranks: str = "GPUs"
) -> Figure | None:
    """Draw what the devices did; None where nothing was sampled twice.

    telemetry: TELEMETRY_COLUMNS of one run. rows: its points.
    """
    known = telemetry.dropna(subset=list(_SHOWN), how="all")
    if known["time"].nunique() < 2:
        return None
    named_devices = known.assign(device=_names(known), second=_seconds(known["time"], start))
    bands = _bands(rows, start, ranks)
    left_out_s = _leave_gaps_out(named_devices, bands)
    width_s = max(1e-9, float(np.ptp(named_devices["second"])) / _MOST_TIMES)
    named_devices["second"] = (named_devices["second"] / width_s).round() * width_s
    by_time = named_devices.groupby(["device", "part", "second"], sort=True)
    means = by_time[list(_SHOWN)].mean().reset_index()
    lines, drawn = _lines(means)
    used = [name for name in _SHOWN if drawn[name].notna().any()]
    marks = [_BAND] * bool(bands) + [_THROTTLED] * any(band["held"] for band in bands)
    return Figure(
        anchor="telemetry",
        title="Devices over time",
        note=_note(left_out_s, is_each=len(lines) == means["device"].nunique()),
        legend=[*legend(lines, points=False), *marks],
        panels=[
            Panel(
                title=f"{_SHOWN[name][0]}, {_SHOWN[name][1]}",
                spec=_spec(drawn, lines, name, bands),
            )
            for name in used
        ],
        table=Table(
            columns=["device", *(f"{_SHOWN[name][0]}, {_SHOWN[name][1]}" for name in used)],
            rows=_cells(named_devices, used),
            texts=1,
        ),
        is_wide=True,
    )


def _bands(rows: Sequence[Row], start: datetime, ranks: str) -> list[Value]:
    """When each point ran, in seconds since the run began, in order."""
    timed = [row for row in rows if formatting.has_value(row["duration_s"])]
    timed.sort(key=lambda row: row["started_at"])
    names = telling_settings(timed)
    begins = [float(_seconds(pd.Series([row["started_at"]]), start).iloc[0]) for row in timed]
    return [
        {
            "low": begin,
            "high": begin + float(row["duration_s"]),
            "held": formatting.is_set(row["throttled"]),
            "even": place % 2 == 0,
            "name": named(row, names, ranks).replace("\n", ", "),
        }
        for place, (begin, row) in enumerate(zip(begins, timed, strict=True))
    ]


def _note(left_out_s: float, *, is_each: bool) -> str:
    """Say what is to be known to read the charts. is_each: whether each device has its line."""
    gap = f", without {formatting.long_time(left_out_s)} in which nothing was sampled"
    more = "" if is_each else " There are too many to draw each."
    when = f"seconds since the run began{gap if left_out_s else ''}."
    return f"As NVML tells it, by one process on each node; {when}{more}"


def _names(telemetry: pd.DataFrame) -> pd.Series:
    """`GPU 0`, and with the node where there are several."""
    index = "GPU " + telemetry["index"].astype("Int64").astype(str)
    if telemetry["node_id"].nunique() < 2:
        return index
    nodes = {node: plain_text.plain(node)[:8] for node in telemetry["node_id"].unique()}
    return telemetry["node_id"].map(nodes) + " " + index


def _seconds(times: pd.Series, start: datetime) -> pd.Series:
    return (pd.to_datetime(times, utc=True) - pd.Timestamp(start)).dt.total_seconds()


def _leave_gaps_out(named: pd.DataFrame, bands: Sequence[Value]) -> float:
    """Close the long gaps in `second`, and number the parts between them; the seconds left out."""
    times = np.unique(named["second"])
    # Also from the start of the run to its first sample.
    gaps_s = np.diff(times, prepend=min(0.0, times[0]))
    closed_s = np.where(gaps_s > _LONGEST_GAP_S, gaps_s, 0.0)
    place = np.searchsorted(times, named["second"])
    named["part"] = np.cumsum(closed_s > 0)[place]
    named["second"] -= np.cumsum(closed_s)[place]
    for band in bands:
        for end in ("low", "high"):
            after = min(int(np.searchsorted(times, band[end])), len(times) - 1)
            band[end] -= float(np.cumsum(closed_s)[after])
    return float(closed_s.sum())


def _lines(means: pd.DataFrame) -> tuple[list[str], pd.DataFrame]:
    """Choose the lines: each device; of many devices the least, the median and the most of them."""
    devices = list(dict.fromkeys(means["device"]))
    if len(devices) <= MOST_LINES:
        return devices, means
    by_time = means.drop(columns="device").groupby(["part", "second"])
    words = {f"least of {len(devices)}": 0.0, "median": 0.5, f"most of {len(devices)}": 1.0}
    parts = [by_time.quantile(q).reset_index().assign(device=word) for word, q in words.items()]
    return list(words), pd.concat(parts)


def _spec(drawn: pd.DataFrame, lines: Sequence[str], name: str, bands: Sequence[Value]) -> Spec:
    known = drawn[drawn[name].notna()]
    values: list[Value] = [
        {"x": round(float(second), 2), "y": round(float(value), 1), "line": line, "part": int(part)}
        for line, part, second, value in zip(
            *(known[column] for column in ("device", "part", "second", name)), strict=True
        )
    ]
    seconds = [value["x"] for value in values]
    # What came before the first sample and the first point would be empty.
    first = min([min(seconds), *(band["low"] for band in bands if band["low"] >= 0)])
    domain = [min(first, min(seconds)), max(seconds)]
    x = linear_axis(
        "x",
        "seconds",
        scale={"domain": domain, "nice": False, "zero": False},
        axis={"format": "~s"},
    )
    # Clocks differ by little, and from zero on their fall would not be seen.
    scale = {"zero": False} if name == "sm_clock_mhz" else {"domainMin": 0}
    y = linear_axis("y", _SHOWN[name][1], scale={**scale, "padding": 6})
    return specification(
        values,
        [
            *_band_layers(bands, domain),
            {
                "mark": {"type": "line", "strokeWidth": 1.5, "aria": False},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": by_line(lines, "color"),
                    "detail": {"field": "part", "type": "nominal"},
                },
            },
            _tip_layer(values, _SHOWN[name][1], bands),
        ],
    )


def _band_layers(bands: Sequence[Value], domain: Sequence[float]) -> list[Spec]:
    """Every second point shaded, and those that were throttled in a colour of their own."""
    shown = [
        {
            "low": max(band["low"], domain[0]),
            "high": min(band["high"], domain[1]),
            "fill": _THROTTLED.color if band["held"] else _BAND.color,
        }
        for band in bands
        if (band["held"] or band["even"]) and band["high"] > domain[0] and band["low"] < domain[1]
    ]
    if not shown:
        return []
    encoding: dict[str, Any] = {
        "x": {"field": "low", "type": "quantitative"},
        "x2": {"field": "high"},
        "fill": {"field": "fill", "type": "nominal", "scale": None},
    }
    mark = {"type": "rect", "stroke": None, "aria": False}
    return [{"data": {"values": shown}, "mark": mark, "encoding": encoding}]


def _tip_layer(values: Sequence[Value], unit: str, bands: Sequence[Value]) -> Spec:
    """Draw what can be pointed at: a strip for each time, over the whole height."""
    times = sorted({value["x"] for value in values})
    half = float(np.diff(times).min()) / 2 if len(times) > 1 else 0.5
    strips = []
    for time in times:
        phrases = [f"{v['line']}: {v['y']:g} {unit}" for v in values if v["x"] == time]
        now = [
            one["name"] for one in bands if one["low"] <= time + half and one["high"] > time - half
        ]
        tip = "\n".join([f"{time:.1f} s", *phrases, *now[:_MOST_NAMED]])
        strips.append({"low": time - half, "high": time + half, "tip": tip})
    quantitative = {"type": "quantitative"}
    return {
        "data": {"values": strips},
        "mark": {"type": "rect", "fill": "transparent", "stroke": None},
        "encoding": {
            "x": {"field": "low", **quantitative},
            "x2": {"field": "high"},
            "description": TIP,
        },
    }


def _cells(named: pd.DataFrame, used: Sequence[str]) -> list[list[str]]:
    """Of each device the least and the most."""
    spans = named.groupby("device")[list(used)].agg(["min", "max"])
    return [
        [str(device), *(_span(spans.loc[device, name]) for name in used)] for device in spans.index
    ]


def _span(span: pd.Series) -> str:
    return plain_text.span(formatting.number(span["min"]), formatting.number(span["max"]))
