"""Panels with a horizontal bar for each point, as Vega-Lite specifications."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raybench.report.html_figure import Panel, Spec, Value, specification
from raybench.report.html_series import Row, label, telling_settings

MOST_BARS = 72
_ROW_PX, _AXIS_PX = 17, 48
_BARS_OF_A_PANEL = 12
# Read along the bars of one panel.
_OF_BARS = ("batch", "world_size", "size_bytes")

BAR_AXIS: Spec = {
    "field": "bar",
    "type": "nominal",
    "title": None,
    "axis": {"ticks": False, "domain": False, "labelPadding": 4},
    "scale": {"paddingInner": 0.25, "paddingOuter": 0.12},
}


def bar_panels(
    rows: Sequence[Row],
    ranks: str,
    values: Callable[[Row], Sequence[Value]],
    layers: Callable[[Spec], Sequence[Spec]],
) -> list[Panel]:
    """Panels of at most twelve bars each.

    rows: those to draw, in order. values: the marks of one bar; their `tip` gets the settings of
    the point put before it. layers: of one chart, given the axis of the bars.
    """
    varying = telling_settings(rows)
    of_bars = [name for name in varying if name in _OF_BARS] or varying
    of_panels = [name for name in varying if name not in of_bars]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(label(row, of_panels, ranks), []).append(row)
    panels = []
    for title, members in groups.items():
        for first in range(0, len(members), _BARS_OF_A_PANEL):
            some = members[first : first + _BARS_OF_A_PANEL]
            names = _names(some, of_bars, ranks)
            marks = [
                {**value, "bar": name, "tip": f"{label(row, varying, ranks)}\n{value['tip']}"}
                for name, row in zip(names, some, strict=True)
                for value in values(row)
            ]
            drawn = layers({**BAR_AXIS, "sort": names})
            height = _ROW_PX * len(some) + _AXIS_PX
            panels.append(Panel(title=title, spec=specification(marks, drawn, height=height)))
    return panels


def _names(rows: Sequence[Row], of_bars: Sequence[str], ranks: str) -> list[str]:
    """Each one once: two bars of one name would lie on each other."""
    names: list[str] = []
    for row in rows:
        name = label(row, of_bars, ranks) or str(row["point_id"])
        names.append(f"{name} ({row['point_id']})" if name in names else name)
    return names


def first_of(shown: int, known: int) -> str:
    """What is to be said where not all is drawn."""
    return f" {shown} of {known} points are drawn; the table has all." if shown < known else ""
