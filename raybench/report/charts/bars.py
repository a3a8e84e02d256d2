"""Panels with a horizontal bar for each point, as Vega-Lite specifications."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raybench.report import formatting
from raybench.report.charts.figure import Panel, Spec, Value, specification
from raybench.report.charts.series import Row, named, telling_settings

MOST_BARS = 72
_ROW_PX, _AXIS_PX = 19, 52
_BARS_OF_A_PANEL = 12
# Read along the bars of one panel.
_OF_BARS = ("batch", "world_size", "size_bytes")

BAR_AXIS: Spec = {
    "field": "bar",
    "type": "nominal",
    "title": None,
    "axis": {"ticks": False, "domain": False, "labelPadding": 4, "labelLimit": 130},
    "scale": {"paddingInner": 0.25, "paddingOuter": 0.12},
}


def bar_panels(
    rows: Sequence[Row],
    ranks: str,
    values: Callable[[Row], Sequence[Value]],
    layers: Callable[[Spec, Sequence[Value]], Sequence[Spec]],
    *,
    of_bars: Sequence[str] = _OF_BARS,
    name: Callable[[Row], str] | None = None,
) -> list[Panel]:
    """Panels of at most twelve bars each.

    rows: those to draw, in order. values: the marks of one bar; their `tip` gets the settings of
    the point put before it. layers: of one chart, given the axis of the bars and their marks.
    of_bars: settings that tell the bars of one panel. name: of a bar, instead of these.
    """
    apart = telling_settings(rows)
    along = [one for one in apart if one in of_bars] or apart
    of_panels = [one for one in apart if one not in along]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(formatting.settings_words(row, of_panels, ranks), []).append(row)
    panels = []
    for title, members in groups.items():
        for first in range(0, len(members), _BARS_OF_A_PANEL):
            some = members[first : first + _BARS_OF_A_PANEL]
            names = _names(some, name or (lambda row: formatting.settings_words(row, along, ranks)))
            marks = [
                {**value, "bar": bar, "tip": f"{named(row, apart, ranks)}\n{value['tip']}"}
                for bar, row in zip(names, some, strict=True)
                for value in values(row)
            ]
            drawn = layers({**BAR_AXIS, "sort": names}, marks)
            height = _ROW_PX * len(some) + _AXIS_PX
            panels.append(Panel(title=title, spec=specification(marks, drawn, height=height)))
    return panels


def _names(rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    """Each one once: two bars of one name would lie on each other."""
    names: list[str] = []
    for row in rows:
        told = name(row) or str(row["point_id"])
        names.append(f"{told} ({row['point_id']})" if told in names else told)
    return names


def first_of(shown: int, known: int) -> str:
    """Say where not all is drawn."""
    return f" {shown} of {known} points are drawn; the table has all." if shown < known else ""
