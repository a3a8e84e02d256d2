"""What the devices did over the time of the run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np
import pandas as pd

from raybench.report import wording
from raybench.report.html_figure import (
    MOST_LINES,
    TOLD,
    Figure,
    Panel,
    Spec,
    Value,
    by_line,
    legend,
    specification,
)
from raybench.report.html_lines import linear_axis

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


def telemetry_figure(telemetry: pd.DataFrame, start: datetime) -> Figure | None:
    """telemetry: TELEMETRY_COLUMNS of one run. None where nothing was sampled twice."""
    known = telemetry.dropna(subset=list(_SHOWN), how="all")
    if known["time"].nunique() < 2:
        return None
    named = known.assign(device=_names(known), second=_seconds(known, start))
    left_out_s = _leave_gaps_out(named)
    width_s = max(1e-9, (named["second"].max() - named["second"].min()) / _MOST_TIMES)
    named["second"] = (named["second"] / width_s).round() * width_s
    by_time = named.groupby(["device", "part", "second"], sort=True)
    means = by_time[list(_SHOWN)].mean().reset_index()
    lines, drawn = _lines(means)
    used = [name for name in _SHOWN if drawn[name].notna().any()]
    return Figure(
        anchor="telemetry",
        title="Devices over time",
        note=_note(left_out_s, is_each=len(lines) == means["device"].nunique()),
        legend=legend(lines, points=False),
        panels=[
            Panel(title=f"{_SHOWN[name][0]}, {_SHOWN[name][1]}", spec=_spec(drawn, lines, name))
            for name in used
        ],
        columns=["device", *(f"{_SHOWN[name][0]}, {_SHOWN[name][1]}" for name in used)],
        rows=_cells(named, used),
        texts=1,
    )


def _note(left_out_s: float, *, is_each: bool) -> str:
    """What is to be known to read the charts. is_each: whether each device has its line."""
    gap = f", without {wording.long_time(left_out_s)} in which nothing was sampled"
    more = "" if is_each else " There are too many to draw each."
    when = f"seconds since the run began{gap if left_out_s else ''}."
    return f"As NVML tells it, by one process on each node; {when}{more}"


def _names(telemetry: pd.DataFrame) -> pd.Series:
    """`GPU 0`, and with the node where there are several."""
    index = "GPU " + telemetry["index"].astype("Int64").astype(str)
    if telemetry["node_id"].nunique() < 2:
        return index
    nodes = {node: wording.plain(node)[:8] for node in telemetry["node_id"].unique()}
    return telemetry["node_id"].map(nodes) + " " + index


def _seconds(telemetry: pd.DataFrame, start: datetime) -> pd.Series:
    return (telemetry["time"] - pd.Timestamp(start)).dt.total_seconds()


def _leave_gaps_out(named: pd.DataFrame) -> float:
    """Close the long gaps in `second`, and number the parts between them; the seconds left out."""
    times = np.unique(named["second"])
    # Also from the start of the run to its first sample.
    gaps_s = np.diff(times, prepend=min(0.0, times[0]))
    closed_s = np.where(gaps_s > _LONGEST_GAP_S, gaps_s, 0.0)
    place = np.searchsorted(times, named["second"])
    named["part"] = np.cumsum(closed_s > 0)[place]
    named["second"] -= np.cumsum(closed_s)[place]
    return float(closed_s.sum())


def _lines(means: pd.DataFrame) -> tuple[list[str], pd.DataFrame]:
    """A line for each device; of many devices the least, the median and the most of them."""
    devices = list(dict.fromkeys(means["device"]))
    if len(devices) <= MOST_LINES:
        return devices, means
    by_time = means.drop(columns="device").groupby(["part", "second"])
    words = {f"least of {len(devices)}": 0.0, "median": 0.5, f"most of {len(devices)}": 1.0}
    parts = [by_time.quantile(q).reset_index().assign(device=word) for word, q in words.items()]
    return list(words), pd.concat(parts)


def _spec(drawn: pd.DataFrame, lines: Sequence[str], name: str) -> Spec:
    known = drawn[drawn[name].notna()]
    values: list[Value] = [
        {"x": round(float(second), 2), "y": round(float(value), 1), "line": line, "part": int(part)}
        for line, part, second, value in zip(
            *(known[column] for column in ("device", "part", "second", name)), strict=True
        )
    ]
    x = linear_axis("x", "seconds", scale={"zero": True, "nice": False}, axis={"format": "~s"})
    # Clocks differ by little, and from zero on their fall would not be seen.
    y = linear_axis("y", _SHOWN[name][1], scale={"zero": name != "sm_clock_mhz"})
    return specification(
        values,
        [
            {
                "mark": {"type": "line", "strokeWidth": 1.5, "aria": False},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": by_line(lines, "color"),
                    "detail": {"field": "part", "type": "nominal"},
                },
            },
            _told_layer(values, _SHOWN[name][1]),
        ],
    )


def _told_layer(values: Sequence[Value], unit: str) -> Spec:
    """What can be pointed at: a strip for each time, over the whole height."""
    times = sorted({value["x"] for value in values})
    half = float(np.diff(times).min()) / 2 if len(times) > 1 else 0.5
    strips = []
    for time in times:
        told = [f"{v['line']}: {v['y']:g} {unit}" for v in values if v["x"] == time]
        tip = "\n".join([f"{time:.1f} s", *told])
        strips.append({"low": time - half, "high": time + half, "tip": tip})
    quantitative = {"type": "quantitative"}
    return {
        "data": {"values": strips},
        "mark": {"type": "rect", "fill": "transparent", "stroke": None},
        "encoding": {
            "x": {"field": "low", **quantitative},
            "x2": {"field": "high"},
            "description": TOLD,
        },
    }


def _cells(named: pd.DataFrame, used: Sequence[str]) -> list[list[str]]:
    """Of each device the least and the most."""
    spans = named.groupby("device")[list(used)].agg(["min", "max"])
    return [
        [str(device), *(_span(spans.loc[device, name]) for name in used)] for device in spans.index
    ]


def _span(span: pd.Series) -> str:
    low, high = wording.number(span["min"]), wording.number(span["max"])
    return low if low == high else f"{low} to {high}"
