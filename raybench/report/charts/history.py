"""The picture of a history: step time over time, with its levels and steps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from raybench.analysis.history import HistoryRow
from raybench.report import formatting, plain_text
from raybench.report.charts.figure import (
    MOST_LINES,
    Figure,
    Panel,
    Spec,
    Value,
    by_line,
    legend,
    specification,
)
from raybench.report.point_settings import point_names

_LABEL_CHARS = 60
# More points than can be told apart by colour get a panel each; the first ones have the steps.
_MOST_PANELS, _PANEL_HEIGHT = 40, 150
_DAY_S = 86_400
_TICKS, _TICKS_OF_PANEL = 6, 3


def history_figure(rows: Sequence[HistoryRow]) -> Figure:
    """Draw a line for each point and machine, its levels dashed, a rule at each step.

    Few of them are drawn in one panel, many in one each, those with steps first.
    rows: as `raybench.analysis.history.history` gives them.
    """
    several = len({row.machine for row in rows}) > 1
    named = zip(rows, point_names(rows), strict=True)
    values = [_value(row, name, several) for row, name in named]
    lines = list(dict.fromkeys(value["line"] for value in values))
    is_one = len(lines) <= MOST_LINES
    if is_one:
        panels = [Panel(title="", spec=specification(values, _layers(values, lines, _TICKS)))]
    else:
        stepped = {value["line"] for value in values if value["step"]}
        shown = sorted(lines, key=lambda line: line not in stepped)[:_MOST_PANELS]
        panels = []
        for line in shown:
            own = [one for one in values if one["line"] == line]
            layers = _layers(own, [line], _TICKS_OF_PANEL)
            spec = specification(own, layers, height=_PANEL_HEIGHT)
            panels.append(Panel(title=line, spec=spec))
    hidden = len(lines) - _MOST_PANELS
    more = f"; {hidden} more points are not drawn; choose with --point or --filter"
    return Figure(
        anchor="history",
        title="Step time over runs",
        note="dashed: level between steps; vertical: a step" + (more if hidden > 0 else ""),
        legend=legend(lines) if is_one else [],
        panels=panels,
    )


def _value(row: HistoryRow, name: str, several: bool) -> Value:
    machine = f", {plain_text.plain(row['device_name'])}" if several else ""
    return {
        "time": row["started_at"].isoformat(),
        "step_ms": round(row["step_ms_p50"], 6),
        "level_ms": round(row["level_ms"], 6),
        "line": (name if len(name) <= _LABEL_CHARS else row["point_id"]) + machine,
        "step": formatting.has_value(row["step"]),
    }


def _times(values: Sequence[Value], ticks: int) -> Spec:
    """Make the axis of time, with days, or with hours where all runs are of few days."""
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


def _layers(values: Sequence[Value], lines: Sequence[str], ticks: int) -> list[Spec]:
    x, color = _times(values, ticks), by_line(lines, "color")
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
            "encoding": {
                "x": x,
                "y": {**y, "field": "step_ms"},
                "color": color,
                "shape": by_line(lines, "shape"),
            },
        },
    ]
