"""The picture of a history: step time over time, with its levels and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from raybench.analysis.history import HistoryRow
from raybench.report import formatting, plain_text
from raybench.report.charts.grammar import (
    HEIGHT,
    MOST_LINES,
    Figure,
    Mark,
    Panel,
    Spec,
    by_series,
    legend_height,
    line_chart,
)
from raybench.report.point_settings import point_names

_LABEL_CHARS = 60
# More points than can be told apart by colour get a panel each; the first ones have the steps.
_MOST_PANELS, _PANEL_HEIGHT = 40, 150


def history_figure(rows: Sequence[HistoryRow]) -> Figure:
    """Return a line for each point and machine, its levels dashed, a vertical rule at each step.

    Few of them are drawn in one panel, many in one each, those with steps first. Points of one run
    alone are left out, unless all are.
    rows: as `raybench.analysis.history.history` gives them.
    """
    several = len({row.machine for row in rows}) > 1
    marks = [_mark(row, name, several) for row, name in zip(rows, point_names(rows), strict=True)]
    counts = Counter(mark["line"] for mark in marks)
    # A single run is no history.
    lines = [line for line, count in counts.items() if count > 1] or list(counts)
    stepped = {mark["line"] for mark in marks if mark["is_step"]}
    shown = sorted(lines, key=lambda line: line not in stepped)[:_MOST_PANELS]
    groups = [lines] if len(lines) <= MOST_LINES else [[line] for line in shown]
    panels = []
    for some in groups:
        own = [mark for mark in marks if mark["line"] in some]
        is_small = len(groups) > 1
        height = _PANEL_HEIGHT if is_small else HEIGHT + legend_height(some)
        title = some[0] if is_small else ""
        layers = _layers(own, some, ticks=3 if is_small else 6)
        panels.append(Panel(title=title, layers=layers, height=height))
    note = "dashed: level between steps; vertical: a step"
    if len(groups) > 1 and len(lines) > _MOST_PANELS:
        hidden = len(lines) - _MOST_PANELS
        note += f"; {hidden} more points are not drawn; choose with --point or --filter"
    return Figure(anchor="history", title="Step time over runs", note=note, panels=panels)


def _mark(row: HistoryRow, name: str, several: bool) -> Mark:
    machine = f", {plain_text.plain(row.device_name)}" if several else ""
    line = (name if len(name) <= _LABEL_CHARS else row.point_id) + machine
    when, step_ms = row.started_at, row.step_ms_p50 or 0.0
    return {
        "x": when.isoformat(),
        "y": round(step_ms, 6),
        "level": round(row.level_ms, 6),
        "line": line,
        "is_step": row.step is not None,
        "tip": f"{line}\n{when:%Y-%m-%d %H:%M}: {formatting.duration(step_ms)}",
    }


def _layers(marks: Sequence[Mark], lines: Sequence[str], ticks: int) -> list[Spec]:
    x: Spec = {
        "type": "temporal",
        "title": "UTC",
        "axis": {"labelOverlap": True, "tickCount": ticks, "format": "%m-%d %H:%M"},
        "scale": {"type": "utc", "padding": 12},
    }
    color = by_series(lines, "color")
    y: Spec = {
        "type": "quantitative",
        "title": "step time, ms",
        "scale": {"zero": False, "padding": 12},
    }
    at = {"field": "x", **x}
    data = {"data": {"values": list(marks)}}
    return [
        {
            **data,
            "transform": [{"filter": "datum.is_step"}],
            "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.6},
            "encoding": {"x": at, "color": color},
        },
        {
            **data,
            "mark": {"type": "line", "strokeDash": [5, 4], "interpolate": "step-after"},
            "encoding": {"x": at, "y": {"field": "level", **y}, "color": color},
        },
        # Between the runs only levels are lines.
        *(one for one in line_chart(marks, lines, x, y) if one["mark"]["type"] != "line"),
    ]
