"""A figure of a report: charts side by side, their legend and what is said of them.

Charts are Vega-Lite specifications whose colours are CSS variables (page.css), so that one picture
suits light and dark, the page and a file of its own (`charts.py`). What a mark says when it is
pointed at is its `description`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
Value = dict[str, Any]

# A chart among several is as wide as a phone, so that its labels are never made smaller. One or two
# that stand alone are drawn wide too, for larger screens.
WIDTH, HEIGHT = 288, 236
WIDE = (580, 320)
# Told apart by colour and shape; page.css gives the colours.
MOST_LINES = 7
MOST_PANELS = 8
SHAPES = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "cross",
    "triangle-down",
    "triangle-right",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart.

    title: plain text, empty where there is only one. missing: what it does not show, and why.
    """

    title: str
    spec: Spec
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of a legend. color: the name of a CSS variable. shape: as Vega names it, or `dash`."""

    label: str
    color: str
    shape: str = "square"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """texts: how many columns, from the first, hold no numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture of a report. All text is plain: the page escapes it.

    anchor: its id in the page. note: what is to be known to read the charts. table: what the table
    of the points does not hold. is_wide: also several charts are drawn wide.
    """

    anchor: str
    title: str
    note: str
    legend: Sequence[Entry]
    panels: Sequence[Panel]
    table: Table | None = None
    is_wide: bool = False

    @property
    def is_large(self) -> bool:
        """Whether there is room to draw its charts wide."""
        return self.is_wide or len(self.panels) <= 2


def specification(
    values: Sequence[Mapping[str, Any]],
    layers: Sequence[Spec],
    *,
    height: int = HEIGHT,
) -> Spec:
    """Make a chart of the page's width."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "background": None,
        "width": WIDTH,
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
        "padding": 4,
        "data": {"values": list(values)},
        "layer": list(layers),
        "config": CONFIG,
    }


def series_color(place: int) -> str:
    """Name the colour of the line at this place of the legend."""
    return f"var(--s{place % MOST_LINES + 1})"


def by_line(lines: Sequence[str], channel: str) -> Spec:
    """Make the encoding that gives each line its colour or its shape; the page draws the legend."""
    places = range(len(lines))
    ranges = {
        "color": [series_color(place) for place in places],
        "shape": [SHAPES[place % MOST_LINES] for place in places],
    }
    return {
        "field": "line",
        "type": "nominal",
        "scale": {"domain": list(lines), "range": ranges[channel]},
        "legend": None,
    }


def legend(lines: Sequence[str], *, points: bool = True) -> list[Entry]:
    """Make the legend of some lines. points: whether their shapes tell them apart too."""
    return [
        Entry(
            label=line,
            color=series_color(place),
            shape=SHAPES[place % MOST_LINES] if points else "line",
        )
        for place, line in enumerate(lines)
    ]


# Says what a mark stands for: see page.js.
TIP: Spec = {"field": "tip", "type": "nominal"}

CONFIG: Spec = {
    "font": "sans-serif",
    "axis": {
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelColor": "var(--text)",
        "titleColor": "var(--text)",
        "gridColor": "var(--grid)",
        "domainColor": "var(--axis)",
        "tickColor": "var(--axis)",
        "labelLimit": 150,
        "labelOverlap": True,
        # Nothing is neither `+0%` nor `0k`.
        "labelExpr": "datum.value === 0 ? replace(datum.label, /[+kM]/, '') : datum.label",
        "labelSeparation": 4,
        "aria": False,
    },
    # Above the axis: beside it, it would lie on labels where the reader's font is wider than ours.
    "axisY": {
        "titleAngle": 0,
        "titleAlign": "left",
        "titleBaseline": "bottom",
        "titleX": 0,
        "titleY": -6,
    },
    "view": {"stroke": None},
}
