"""The picture of a history: step time over time with its levels, as a Vega-Lite specification."""

from __future__ import annotations

from typing import Any

import pandas as pd

from raybench.errors import UsageError
from raybench.report import wording
from raybench.report.charts import COLORS, CONFIG, LONE, SCHEMA, Spec, told_apart
from raybench.report.comparison import label
from raybench.report.points import varying_settings

_MOST_LINES = len(COLORS)
_LABEL_CHARS = 60


def history_chart(frame: pd.DataFrame) -> Spec:
    """A line for each point and machine, its levels dashed, a rule at each step.

    frame: as `raybench.analysis.history.history` gives it. Raises UsageError for more points than
    can be told apart.
    """
    rows = [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
    names = varying_settings(rows)
    several = frame["machine"].nunique() > 1
    values = [_value(row, names, several) for row in rows]
    lines = list(dict.fromkeys(value["line"] for value in values))
    if len(lines) > _MOST_LINES:
        raise UsageError(
            f"--chart: draws at most {_MOST_LINES} points, got {len(lines)}; "
            "choose with --point or --filter"
        )
    return _specification(values, lines)


def _value(row: dict[str, Any], names: list[str], several: bool) -> dict[str, Any]:
    told = label(row, names)
    machine = f", {wording.plain(row['device_name'])}" if several else ""
    return {
        "time": row["started_at"].isoformat(),
        "step_ms": round(row["step_ms_p50"], 6),
        "level_ms": round(row["level_ms"], 6),
        "line": (told if len(told) <= _LABEL_CHARS else row["point_id"]) + machine,
        "step": wording.known(row["step"]),
    }


def _specification(values: list[dict[str, Any]], lines: list[str]) -> Spec:
    color, shape = told_apart(lines)
    axis = {"format": "%Y-%m-%d", "labelOverlap": True, "tickCount": 6}
    times = {"type": "utc", "padding": 12}
    x = {"field": "time", "type": "temporal", "title": None, "axis": axis, "scale": times}
    scale = {"zero": False, "padding": 12}
    y = {"type": "quantitative", "title": "step time, ms", "scale": scale}
    lone = {"legend": {**CONFIG["legend"], "orient": "bottom", "columns": 2}}
    return {
        "$schema": SCHEMA,
        "background": "white",
        "title": {
            "text": "Step time over runs",
            "subtitle": ["dashed: level between steps; vertical: a step"],
            "anchor": "start",
        },
        "data": {"values": values},
        "width": LONE[0] + 150,
        "height": LONE[1],
        "config": {**CONFIG, **lone},
        "layer": [
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
                "encoding": {
                    "x": x,
                    "y": {**y, "field": "step_ms"},
                    "color": color,
                    "shape": shape,
                },
            },
        ],
    }
