"""The picture of a history: step times over runs, with their levels and steps."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.analysis.history import HistoryRow
from raybench.report import formatting, plain_text
from raybench.report.charts.grammar import Figure, Mark, Panel, Spec, scatter_panel
from raybench.report.point_settings import point_names

_LABEL_CHARS = 60
_MOST_PANELS, _HEIGHT, _COLOR = 40, 180, "var(--s1)"


def history_figure(rows: Sequence[HistoryRow]) -> Figure:
    """Return a panel for each point and machine, of its step times over the time of the runs.

    Points with a step come first, and at most 40 are drawn. Points of one run alone are left out,
    unless all are. rows: as `raybench.analysis.history.history` gives them.
    """
    has_models = len({row.device_name for row in rows}) > 1
    has_node_counts = len({row.node_count for row in rows}) > 1
    by_point: dict[str, list[HistoryRow]] = {}
    for row, name in zip(rows, point_names(rows), strict=True):
        words = [name if len(name) <= _LABEL_CHARS else row.point_id]
        if has_models:
            words.append(plain_text.plain(row.device_name))
        if has_node_counts:
            words.append(plain_text.counted(row.node_count or 1, "node"))
        by_point.setdefault(", ".join(words), []).append(row)
    points = [point for point, some in by_point.items() if len(some) > 1] or list(by_point)
    points.sort(key=lambda point: all(row.step is None for row in by_point[point]))
    note = "dashed: level between steps; vertical: a step"
    if hidden := len(points[_MOST_PANELS:]):
        note += f"; {hidden} more points are not drawn; choose with --point or --filter"
    panels = [_panel(point, by_point[point]) for point in points[:_MOST_PANELS]]
    return Figure(anchor="history", title="Step time over runs", note=note, panels=panels)


def _panel(point: str, rows: Sequence[HistoryRow]) -> Panel:
    """Return the step times of one point as marks, their levels dashed, a rule at each step."""
    marks: list[Mark] = []
    for row in rows:
        when, step_ms = row.started_at, row.step_ms_p50 or 0.0
        tip = f"{point}\n{when:%Y-%m-%d %H:%M}: {formatting.duration(step_ms)}"
        level = {"level": round(row.level_ms, 6), "is_step": row.step is not None}
        place = {"x": when.isoformat(), "y": round(step_ms, 6), "line": point}
        marks.append({**place, **level, "tip": tip})
    x: Spec = {
        "type": "temporal",
        "title": "UTC",
        "axis": {"labelOverlap": True, "tickCount": 3, "format": "%m-%d %H:%M"},
        "scale": {"type": "utc", "padding": 12},
    }
    y: Spec = {
        "type": "quantitative",
        "title": "step time, ms",
        "scale": {"zero": False, "padding": 12},
    }
    color, at, data = {"value": _COLOR}, {"field": "x", **x}, {"data": {"values": marks}}
    steps: Spec = {
        **data,
        "transform": [{"filter": "datum.is_step"}],
        "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.6},
        "encoding": {"x": at, "color": color},
    }
    levels: Spec = {
        **data,
        "mark": {"type": "line", "strokeDash": [5, 4], "interpolate": "step-after"},
        "encoding": {"x": at, "y": {"field": "level", **y}, "color": color},
    }
    kinds, below = {point: ("circle", _COLOR)}, [steps, levels]
    return scatter_panel(marks, x, y, kinds, height=_HEIGHT, title=point, below=below)
