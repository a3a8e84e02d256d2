"""The picture of a history: step time over time with its levels, as a Vega-Lite specification."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pandas as pd

from raybench.report import formatting
from raybench.report.charts.charts import COLORS, CONFIG, LONE, SCHEMA, Spec, distinguish_lines
from raybench.report.comparison import label
from raybench.report.text.points import varying_settings

_MOST_LINES = len(COLORS)
_LABEL_CHARS = 60
# More points than can be told apart by colour get a panel each; the first ones have the steps.
_MOST_PANELS, _PANELS_A_ROW = 40, 4
_PANEL = (190, 110)
_DAY_S = 86_400
_TICKS, _TICKS_OF_PANEL = 6, 3


def history_chart(frame: pd.DataFrame) -> Spec:
    """A line for each point and machine, its levels dashed, a rule at each step.

    Few of them are drawn in one panel, many in one each, those with steps first.
    frame: as `raybench.analysis.history.history` gives it.
    """
    rows = [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
    names = varying_settings(rows)
    several = frame["machine"].nunique() > 1
    values = [_value(row, names, several) for row in rows]
    lines = list(dict.fromkeys(value["line"] for value in values))
    if len(lines) <= _MOST_LINES:
        return _one_panel(values, lines)
    stepped = {value["line"] for value in values if value["step"]}
    lines.sort(key=lambda line: line not in stepped)
    shown = lines[:_MOST_PANELS]
    return _panels([value for value in values if value["line"] in shown], shown, len(lines))


def _value(row: dict[str, Any], names: list[str], several: bool) -> dict[str, Any]:
    told = label(row, names)
    machine = f", {formatting.plain(row['device_name'])}" if several else ""
    return {
        "time": row["started_at"].isoformat(),
        "step_ms": round(row["step_ms_p50"], 6),
        "level_ms": round(row["level_ms"], 6),
        "line": (told if len(told) <= _LABEL_CHARS else row["point_id"]) + machine,
        "step": formatting.has_value(row["step"]),
    }


def _one_panel(values: list[dict[str, Any]], lines: list[str]) -> Spec:
    color, shape = distinguish_lines(lines)
    legend = {"legend": {**CONFIG["legend"], "orient": "bottom", "columns": 2}}
    return {
        **_head(values, []),
        "width": LONE[0] + 150,
        "height": LONE[1],
        "config": {**CONFIG, **legend},
        "layer": _layers(_times(values, _TICKS), color, shape),
    }


def _panels(values: list[dict[str, Any]], lines: list[str], count: int) -> Spec:
    hidden = count - len(lines)
    more = [f"{hidden} more points are not drawn; choose with --point or --filter"]
    color = {"value": COLORS[0]}
    header = {"title": None, "labelLimit": _PANEL[0] + 40, "labelAnchor": "start"}
    width, height = _PANEL
    return {
        **_head(values, more if hidden else []),
        "config": CONFIG,
        "columns": _PANELS_A_ROW,
        "facet": {"field": "line", "type": "nominal", "sort": lines, "header": header},
        "resolve": {"scale": {"y": "independent"}},
        "spec": {
            "width": width,
            "height": height,
            "layer": _layers(_times(values, _TICKS_OF_PANEL), color, {"value": "circle"}),
        },
    }


def _head(values: list[dict[str, Any]], more: list[str]) -> Spec:
    return {
        "$schema": SCHEMA,
        "background": "white",
        "title": {
            "text": "Step time over runs",
            "subtitle": ["dashed: level between steps; vertical: a step", *more],
            "anchor": "start",
        },
        "data": {"values": values},
    }


def _times(values: list[dict[str, Any]], ticks: int) -> Spec:
    """The axis of time, with days, or with hours where all runs are of few days."""
    known = [datetime.fromisoformat(value["time"]) for value in values]
    first, last = min(known), max(known)
    days = (last - first).total_seconds() / _DAY_S
    form, title = "%Y-%m-%d", None
    if days < 1:
        form, title = "%H:%M", f"{first:%Y-%m-%d}, UTC"
    elif days < ticks:
        form, title = "%m-%d %H:%M", "UTC"
    axis = {"format": form, "labelOverlap": True, "tickCount": ticks}
    scale = {"type": "utc", "padding": 12}
    return {"field": "time", "type": "temporal", "title": title, "axis": axis, "scale": scale}


def _layers(x: Spec, color: Spec, shape: Spec) -> list[Spec]:
    scale = {"zero": False, "padding": 12}
    y = {"type": "quantitative", "title": "step time, ms", "scale": scale}
    return [
        {
            "transform": [{"filter": "datum.step"}],
            "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.6},
            "encoding": {"x": x, "color": color},
        },
        {
            "mark": {"type": "line", "strokeDash": [5, 4], "interpolate": "step-after"},
            "encoding": {"x": x, "y": {**y, "field": "level_ms"}, "color": color},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
            "encoding": {"x": x, "y": {**y, "field": "step_ms"}, "color": color, "shape": shape},
        },
    ]
