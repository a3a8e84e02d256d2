"""A figure of the page: small charts side by side, their legend, and a plain table of the same.

Charts are Vega-Lite specifications whose colours are CSS variables of the page (page.css), so that
one picture suits light and dark. What a mark says when it is pointed at is its `description`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
Value = dict[str, Any]

# As wide as a phone: there one stands below the other, elsewhere several stand side by side.
WIDTH, HEIGHT = 320, 240
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
    """One chart. title: plain text, empty where there is only one."""

    title: str
    spec: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of a legend. color: the name of a CSS variable. shape: as Vega names it, or `dash`."""

    label: str
    color: str
    shape: str = "square"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A section of the page. All text is plain: the page escapes it.

    anchor: the id of the section. note: what is to be known to read the charts. columns, rows: the
    table; texts: how many columns, from the first, hold no numbers.
    """

    anchor: str
    title: str
    note: str
    legend: Sequence[Entry]
    panels: Sequence[Panel]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 0


def specification(
    values: Sequence[Mapping[str, Any]],
    layers: Sequence[Spec],
    *,
    height: int = HEIGHT,
) -> Spec:
    """A chart of the page's width."""
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
    """The colour of the line at this place of the legend."""
    return f"var(--s{place % MOST_LINES + 1})"


def by_line(lines: Sequence[str], channel: str) -> Spec:
    """The encoding that gives each line its colour or its shape; the page draws the legend."""
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
    """The lines of a figure. points: whether their shapes tell them apart too."""
    return [
        Entry(
            label=line,
            color=series_color(place),
            shape=SHAPES[place % MOST_LINES] if points else "line",
        )
        for place, line in enumerate(lines)
    ]


# Says what a mark stands for: see page.js.
TOLD: Spec = {"field": "tip", "type": "nominal"}

CONFIG: Spec = {
    "font": "sans-serif",
    "axis": {
        "labelFontSize": 11,
        "titleFontSize": 11,
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
        "titleY": -5,
    },
    "view": {"stroke": "var(--grid)"},
}
