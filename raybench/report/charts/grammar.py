"""A small grammar of charts on Vega-Lite: lines, bars and heat maps, for the page and for files.

A figure is some panels side by side. A panel is one chart: `line_panel`, `bar_panels`, `heat_panel`
or `scatter_panel` makes it from marks, which are plain dictionaries. Colours are CSS variables of
page.css, so that a drawing suits a light and a dark page. The `tip` of a mark is the tooltip of
the page.
"""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from raybench.report.documents import Table
from raybench.report.formatting import printable

Spec = dict[str, Any]
Mark = dict[str, Any]

# A chart is as wide as the text on a phone, so that labels of 12 px are never made smaller. The
# height excludes axes and legend.
_WIDTH, _HEIGHT = 350, 195
# Lines differ by colour and shape; page.css gives the colours.
MOST_LINES, MOST_PANELS, MOST_BARS = 7, 8, 72
_SHAPES = (
    *("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right"),
)
_VEGA_LITE = "5.21"
_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
_BARS_OF_A_PANEL, _BAR_PX, _LINE_PX = 12, 19, 13
# Room for the labels of an axis of y, for an entry of a legend beside its text, and for a letter.
_AXIS_PX, _ENTRY_PX, _LETTER_PX = 52, 30, 6.2
_CAPITAL_PX = 8.2
# Room for the name of a bar.
_NAME_PX = 170
# A number stands inside of a bar that is longer than this share of the longest, else beside it.
_LONG = 0.5
_POINT = {"type": "point", "filled": True, "size": 50, "opacity": 1}
_CROSS = {"shape": "M-1,-1L1,1M1,-1L-1,1", "filled": False, "strokeWidth": 2}
_DASHED = {"color": "var(--axis)", "strokeDash": [5, 4], "strokeWidth": 1.5}
_COLOR = re.compile(r"(--[a-z]+\d?): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)")
_USED = re.compile(r'(?<==")var\((--[a-z]+\d?)\)(?=")')
# A quarter of what Vega writes: unseen backgrounds, and roles that a screen reader would read out.
_NOISE = re.compile(
    r'<path class="(?:back|fore)ground"[^>]*? d="(?:M0,0h0v0h0Z)?"[^>]*/>'
    r'| (?:class="mark-|role="graphics|aria-roledescription=")[^"]*"'
)

CONFIG: Spec = {
    "font": "Arial, Liberation Sans, Helvetica, sans-serif",
    # The chart is one picture with a name; only marks with a tip have a label of their own.
    "mark": {"aria": False},
    "legend": {
        **{"aria": False, "orient": "top", "title": None, "offset": 6, "symbolSize": 60},
        **{"labelColor": "var(--text)", "labelFontSize": 12, "labelLimit": 320, "rowPadding": 1},
        **{"titleColor": "var(--text)", "titleFontSize": 12, "titleFontWeight": "normal"},
        "symbolBaseFillColor": "var(--axis)",
    },
    "title": {
        **{"aria": False, "anchor": "start", "color": "var(--text)", "fontSize": 13, "offset": 8},
        **{"subtitleColor": "var(--quiet)", "subtitleFontSize": 12},
    },
    "axis": {
        **{"aria": False, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
        **{"labelColor": "var(--text)", "titleColor": "var(--text)", "gridColor": "var(--grid)"},
        **{"domainColor": "var(--axis)", "tickColor": "var(--axis)", "labelLimit": 150},
        **{"labelOverlap": True, "labelSeparation": 4, "labelLineHeight": _LINE_PX},
        # Nothing is neither `+0%` nor `0k`, and 0.1 GB/s are not `100m`.
        "labelExpr": "datum.value === 0 ? replace(datum.label, /[+kM]/, '') : "
        "isNumber(datum.value) && test(/[mµ]$/, datum.label) ? format(datum.value, '~g') : "
        "datum.label",
    },
    # Above the axis: beside it, it would lie on labels where the reader's font is wider than ours.
    "axisY": {
        **{"titleAngle": 0, "titleAlign": "left", "titleBaseline": "bottom"},
        **{"titleX": 0, "titleY": -6},
    },
    "view": {"stroke": None},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart of a figure."""

    title: str = ""
    # Layers of Vega-Lite.
    layers: Sequence[Spec]
    # Height of the plot in px, without axes and legend.
    height: int
    # A sentence that names the points that are not drawn, and why; or empty.
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture of a report. All text is plain: the page escapes it."""

    # The id of the figure in the page.
    anchor: str
    title: str
    # What a reader must know to read the charts.
    note: str
    panels: Sequence[Panel]
    # Values that the table of all points lacks.
    table: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A dashed line across a chart."""

    value: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """How the legend of the series is drawn."""

    # Shape of the keys; None uses the shape of the marks.
    symbol: str | None = None
    # Width of the legend in px.
    room: float = _WIDTH
    # Distance between legend and plot in px.
    offset: int = 6
    # Whether there is a legend; None: only for several series.
    are_shown: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLayout:
    """What a panel of lines has besides its marks. `axis` makes `x` and `y`."""

    x: Spec
    y: Spec
    # Points (x, y) of a dashed line.
    ideal: Sequence[tuple[float, float]] = ()
    # At a value of y.
    level: Level | None = None
    # Layers that are drawn first.
    below: Sequence[Spec] = ()
    # Whether each mark has a point on the line.
    has_points: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar, or the bars of several series side by side or stacked."""

    # Title of its panel; may be empty.
    panel: str
    name: str
    marks: Sequence[Mark]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarLayout:
    """What panels of bars have besides the bars."""

    # A linear channel of `axis`.
    x: Spec
    # The values of `line` in the order of the legend.
    series: Sequence[str] = ()
    # One for each of the series; empty for the usual colours.
    colors: Sequence[str] = ()
    is_stacked: bool = False
    # At a value of x, in each panel.
    level: Level | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatLayout:
    """What a heat map has besides its cells. Fields are added to the channels `x` and `y`."""

    x: Spec
    y: Spec
    # The encoding of the colour, with its field.
    color: Spec
    # Height of the plot in px.
    height: int
    # A Vega expression, true for cells whose text has the colour of the page.
    inverse: str = "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterLayout:
    """What a scatter plot has besides its marks. Fields are added to the channels `x` and `y`."""

    x: Spec
    y: Spec
    # Value of `line` -> (shape, colour), in the order of the legend.
    kinds: Mapping[str, tuple[str, str]]
    # Height of the plot in px.
    height: int
    # At a value of x.
    level: Level | None = None
    # Layers that are drawn first.
    below: Sequence[Spec] = ()


def axis(title: str | None, log: int | None = None, **settings: Any) -> Spec:
    """Return a quantitative channel without field, linear from zero or logarithmic to base `log`.

    Args:
        title: None for an axis without a title.
        log: the base; None for a linear scale.
        settings: of the axis in Vega-Lite, such as `format`; `scale` is a mapping of settings of
            the scale.
    """
    scale = {"type": "log", "base": log, "nice": False, "padding": 14} if log else {"zero": True}
    scale |= settings.pop("scale", {})
    return {
        "type": "quantitative",
        "title": title,
        "scale": scale,
        "axis": {"tickCount": 6 if log == 2 else 5, **settings},
    }


# Vega has no binary units.
_POWER = "floor(log(datum.value) / log(1024) + 1e-9)"
SIZE_LABELS = (
    f"format(datum.value / pow(1024, {_POWER}), '~g') + ' ' "
    f"+ ['B', 'KiB', 'MiB', 'GiB', 'TiB'][{_POWER}]"
)


def names_axis(names: Sequence[str], **settings: Any) -> Spec:
    """Return a nominal channel without field, in the order of `names`; other values come last.

    Args:
        names: the axis shows only the names that marks have.
        settings: of the axis in Vega-Lite.
    """
    return {
        "type": "nominal",
        "title": None,
        "sort": list(names),
        "axis": {"ticks": False, "domain": False, "labelPadding": 4, **settings},
    }


# Without symbol, in the usual place.
_USUAL_KEYS = Keys()


def by_series(
    names: Sequence[str], channel: str, values: Sequence[str] = (), keys: Keys = _USUAL_KEYS
) -> Spec:
    """Return the encoding that gives each series its colour or shape, and a legend.

    Args:
        names: the values of the field `line`, in the order of the legend.
        channel: "color" or "shape".
        values: one for each name; by default the usual ones, which repeat after seven.
        keys: how the legend is drawn.
    """
    usual = [f"var(--s{number % MOST_LINES + 1})" for number in range(len(names))]
    if channel == "shape":
        usual = [_SHAPES[number % MOST_LINES] for number in range(len(names))]
    longest = max(map(len, names), default=0)
    columns = max(1, min(len(names), int(keys.room / (_ENTRY_PX + _LETTER_PX * longest))))
    # At the left of the legend is the axis.
    folded = {name: _folded(name, max(186, keys.room - _ENTRY_PX - _AXIS_PX)) for name in names}
    legend: Spec = {"columns": columns, "offset": keys.offset} | _labels(folded)
    legend |= {"symbolType": keys.symbol} if keys.symbol else {}
    has_legend = len(names) > 1 if keys.are_shown is None else keys.are_shown
    return {
        "field": "line",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(names), "range": list(values or usual)},
        "legend": legend if has_legend else None,
    }


def _looks_of_lines(lines: Sequence[str], marks: Sequence[Mark], channel: str, offset: int) -> Spec:
    """Encode the lines that a panel has, so that a line looks the same in all panels."""
    with_marks = {mark["line"] for mark in marks}
    drawn = [name for name in lines if name in with_marks]
    looks = by_series(lines, channel)["scale"]["range"]
    values = [looks[lines.index(name)] for name in drawn]
    return by_series(drawn, channel, values, Keys(offset=offset, are_shown=len(lines) > 1))


def _folded(text: str, width_px: float) -> list[str]:
    """Wrap a text into one line or more; long names break after `=` or `_`."""
    letter_px = _CAPITAL_PX if text.isupper() else _LETTER_PX
    most = int(width_px / letter_px)
    lines: list[str] = []
    for line in textwrap.wrap(text, most, break_long_words=False) or [""]:
        while len(line) > most:
            end = 1 + max(line.rfind(sign, 0, most) for sign in "=_")
            lines.append(line[: end or most])
            line = line[end or most :]
        lines.append(line)
    return lines


def _labels(lines: Mapping[str, Sequence[str]]) -> Spec:
    """Return the setting of an axis or a legend that writes these lines for each value."""
    return {"labelExpr": f"{json.dumps(_printable(lines))}[datum.label]"}


def line_panel(
    marks: Sequence[Mark],
    lines: Sequence[str],
    layout: LineLayout,
    *,
    title: str = "",
    missing: str = "",
) -> Panel:
    """Return a panel of lines.

    Args:
        marks: each with `x`, `y`, `line` and, for its point, `tip`. Optional: `low` and `high`
            (an interval), and `number`, a text that is drawn beside the highest and the lowest
            mark at the largest x. A mark whose `y` is None is a cross on the axis of x.
        lines: the values of `line` in the order of the legend; a single line has no legend.
        layout: axes and dashed lines.
        title: of the panel.
        missing: see `Panel`.
    """
    y = layout.y
    at: Spec = {"x": {"field": "x", **layout.x}, "y": {"field": "y", **y}}
    # The legend stands above the title of the axis.
    offset = 22 if y["title"] else 6
    color = _looks_of_lines(lines, marks, "color", offset)
    shape = _looks_of_lines(lines, marks, "shape", offset)
    drawn = [mark for mark in marks if mark["y"] is not None]
    ranges = [mark for mark in drawn if mark.get("low") is not None]
    ends = {"x": at["x"], "y": {"field": "low", **y}, "y2": {"field": "high"}}
    ideal = [{"x": x, "y": value, "text": "ideal"} for x, value in layout.ideal]
    # Crosses of several lines may coincide: those below are larger.
    sizes = {line: 50 + 60 * number for number, line in enumerate(reversed(lines))}
    crosses = [{**mark, "size": sizes[mark["line"]]} for mark in marks if mark["y"] is None]
    crosses.sort(key=lambda mark: -float(mark["size"]))
    on_axis = {**at, "y": {"value": "height"}, "size": {"field": "size", "scale": None}}
    width = 2 if layout.has_points else 1.5
    numbers = [
        _text([mark], at, align="left", dx=8, dy=dy, fontWeight=600, field="number")
        for mark, dy in _numbered_ends(drawn)
    ]
    layers = _with_data(
        *layout.below,
        _layer(ideal, {"type": "line", **_DASHED}, at),
        _text(ideal[-1:], at, align="right", dx=-4, dy=-6, color="var(--quiet)"),
        *_level_line(layout.level, "y", at["y"]),
        _layer(ranges, {"type": "rule", "strokeWidth": 1.5}, ends, color=color),
        _layer(drawn, {"type": "line", "strokeWidth": width}, at, color=color),
        _layer(drawn if layout.has_points else (), _POINT, at, color=color, shape=shape),
        *numbers,
        _layer(crosses, {**_POINT, **_CROSS}, on_axis, color=color),
    )
    return Panel(title=title, layers=layers, height=_HEIGHT, missing=missing)


def _numbered_ends(marks: Sequence[Mark]) -> list[tuple[Mark, int]]:
    """Return the highest and the lowest mark at the largest x, each with the dy of its number."""
    numbered = [mark for mark in marks if mark.get("number")]
    end = max((mark["x"] for mark in numbered), default=None)
    last = sorted((mark for mark in numbered if mark["x"] == end), key=lambda mark: -mark["y"])
    return [(last[0], -8), (last[-1], 8)] if len(last) > 1 else [(mark, 0) for mark in last]


def bar_panels(bars: Sequence[Bar], layout: BarLayout) -> list[Panel]:
    """Return panels of at most twelve horizontal bars each; panels of one title have one scale.

    Each mark of a bar has `x` and `tip`. Optional: `low` and `high` (an interval), `text` (written
    at the end of the bar or of its interval) and `line` (its series). Several marks of a bar are
    side by side, one for each series. Stacked marks reach from `x` to `x2`, and the scale of
    `layout.x` must have a `domain` that includes every `x2`.
    """
    bars_of: dict[str, list[Bar]] = {}
    for bar in bars:
        bars_of.setdefault(bar.panel, []).append(bar)
    level = layout.level
    panels = []
    for title, members in bars_of.items():
        marks = [mark for bar in members for mark in bar.marks]
        has_ranges = any(mark.get("low") is not None for mark in marks)
        room = _beside([bar.name for bar in members])
        low = min(0.0, *(min(mark["x"], mark.get("low") or 0.0) for mark in marks))
        high = max(level.value if level else 0.0, *(_end(mark) for mark in marks))
        if has_ranges:
            # Texts are written beyond intervals.
            text_px = _LETTER_PX * max(len(mark.get("text", "")) for mark in marks) + 8
            high = low + (high - low) * room / (room - min(text_px, room / 2))
        scale = {"domain": [low, high], **layout.x["scale"]}
        scaled = replace(layout, x={**layout.x, "scale": scale})
        count = -(-len(members) // _BARS_OF_A_PANEL)
        for number in range(count):
            start, end = number * len(members) // count, (number + 1) * len(members) // count
            panels.append(_bar_panel(title, members[start:end], scaled, has_ranges))
    return panels


def _bar_panel(title: str, bars: Sequence[Bar], layout: BarLayout, has_ranges: bool) -> Panel:
    """Return one panel; texts stand beyond the bars if `has_ranges`, else inside of long bars."""
    # Several bars may have the same name, so each is identified by its position.
    marks = [{**mark, "bar": str(n)} for n, bar in enumerate(bars) for mark in bar.marks]
    folded = [_folded(bar.name, _NAME_PX) for bar in bars]
    most = max(map(len, folded))
    # The first line of a label is at the middle of its bar, unless it is moved.
    lines = {str(n): [""] * ((most - len(name)) // 2) + name for n, name in enumerate(folded)}
    labels = _labels(lines) | {"labelLimit": _NAME_PX, "labelOffset": _LINE_PX * (1 - most) / 2}
    y = {"field": "bar", **names_axis(list(lines), **labels)}
    y["scale"] = {"paddingInner": 0.25, "paddingOuter": 0.12}
    x, series, level = layout.x, layout.series, layout.level
    at: Spec = {"x": {"field": "x", **x}, "y": y}
    if layout.is_stacked:
        at["x2"] = {"field": "x2"}
    elif len(series) > 1:
        at["yOffset"] = {"field": "line", "type": "nominal", "sort": list(series)}
    color: Spec = {"value": "var(--s1)"}
    if series:
        # The legend stands above the label of a level.
        room = _beside([bar.name for bar in bars])
        keys = Keys(symbol="square", room=room, offset=22 if level else 6)
        color = by_series(series, "color", layout.colors, keys)
    ranges = [mark for mark in marks if mark.get("low") is not None]
    ends = {**at, "x": {"field": "low", **x}, "x2": {"field": "high"}}
    longest = max([*(mark["x"] for mark in marks), level.value if level else 0.0])
    texts = [{**mark, "x": _end(mark)} for mark in marks if "text" in mark]
    inside = "false" if has_ranges else f"datum.x > {_LONG * longest}"
    layers = _with_data(
        _layer(marks, {"type": "bar"}, at, color=color),
        _layer(ranges, {"type": "rule", "strokeWidth": 1.5, "color": "var(--text)"}, ends),
        _text(
            texts,
            at,
            align={"expr": f"{inside} ? 'right' : 'left'"},
            dx={"expr": f"{inside} ? -5 : 5"},
            color={"expr": f"{inside} ? 'var(--page)' : 'var(--text)'"},
        ),
        *_level_line(level, "x", at["x"]),
    )
    beside = 1 if layout.is_stacked else len(series)
    bar_px = max(_BAR_PX, 0.9 * _BAR_PX * beside, _LINE_PX * most + 6)
    return Panel(title=title, layers=layers, height=round(bar_px * len(bars)))


def _end(mark: Mark) -> float:
    """Return the end of a bar or of its interval, whichever is farther; 0 at least."""
    return max(0.0, float(mark["x"]), float(mark.get("high") or 0.0))


def _beside(names: Sequence[str]) -> float:
    """Return the width in px that is left for bars beside their names."""
    return _WIDTH - 20 - min(_NAME_PX, _LETTER_PX * max(map(len, names), default=0))


def heat_panel(cells: Sequence[Mark], layout: HeatLayout, title: str = "") -> Panel:
    """Return a heat map.

    Args:
        cells: at least one, each with `x`, `y`, `tip` and the field of `layout.color`. Either all
            have `x2` (the cell reaches from `x` to `x2`), or any may have `text` (written into the
            cell) and `is_marked` (the cell is outlined).
        layout: axes, colours and height.
        title: of the panel.
    """
    at: Spec = {"x": {"field": "x", **layout.x}, "y": {"field": "y", **layout.y}}
    is_range = "x2" in cells[0]
    wide = {"x2": {"field": "x2"}} if is_range else {}
    mark = {"type": "rect", "stroke": None if is_range else "var(--page)", "strokeWidth": 2}
    ink = {"expr": f"{layout.inverse} ? 'var(--page)' : 'var(--text)'"}
    texts = [cell for cell in cells if cell.get("text")]
    outlined = [{"x": cell["x"], "y": cell["y"]} for cell in cells if cell.get("is_marked")]
    outline = {"type": "rect", "fill": None, "stroke": "var(--bad)", "strokeWidth": 3}
    layers = _with_data(
        _layer(cells, mark, at | wide, color=layout.color),
        _layer(outlined, outline, at),
        _text(texts, at, color=ink),
    )
    return Panel(title=title, layers=layers, height=layout.height)


def scatter_panel(marks: Sequence[Mark], layout: ScatterLayout, title: str = "") -> Panel:
    """Return a panel of points without lines; a single kind of points has no legend.

    Args:
        marks: at least one, each with `x`, `y`, `line` and `tip`.
        layout: axes, shapes, colours and height.
        title: of the panel.
    """
    at: Spec = {"x": {"field": "x", **layout.x}, "y": {"field": "y", **layout.y}}
    with_marks = {mark["line"] for mark in marks}
    drawn = [name for name in layout.kinds if name in with_marks]
    shapes, colors = zip(*(layout.kinds[name] for name in drawn), strict=True)
    layers = _with_data(
        *layout.below,
        *_level_line(layout.level, "x", at["x"]),
        _layer(
            marks,
            _POINT,
            at,
            shape=by_series(drawn, "shape", shapes),
            color=by_series(drawn, "color", colors),
        ),
    )
    return Panel(title=title, layers=layers, height=layout.height)


def by_threshold(field: str, steps: Sequence[float], title: str) -> Spec:
    """Return the encoding that colours cells from blue to brown, with a titled scale as its legend.

    Args:
        field: of the cells, with shares; 0.1 is written as +10%.
        steps: six, ascending; at each a new colour begins.
        title: of the legend.
    """
    return {
        "field": field,
        "type": "quantitative",
        "scale": {
            "type": "threshold",
            "domain": list(steps),
            "range": [f"var(--h{number + 1})" for number in range(len(steps) + 1)],
        },
        "legend": {
            **{"title": title, "titleOrient": "left", "format": "+~%", "gradientThickness": 10},
            **{"gradientLength": 220, "direction": "horizontal"},
        },
    }


def draw(panel: Panel, name: str) -> str:
    """Return a panel as SVG, coloured by page.css, without title and `missing`.

    Args:
        panel: the panel to draw.
        name: the label for screen readers.
    """
    svg = _svg(
        width=_WIDTH,
        height=panel.height,
        autosize={"type": "fit-x", "contains": "padding"},
        layer=list(panel.layers),
    )
    label = html.escape(printable(name))
    return svg.replace('class="marks"', f'class="chart" role="img" aria-label="{label}"', 1)


def draw_figure(figure: Figure, kind: str, *, title: str = "", below: str = "") -> bytes:
    """Return a figure of one panel or more, without its table, as the bytes of a file.

    An SVG follows the light or dark theme of a browser; elsewhere it is light. A PNG is light and
    has twice the resolution of the layout.

    Args:
        figure: the figure to draw.
        kind: `svg` or `png`.
        title: replaces the title of the figure.
        below: a line under the title.
    """
    columns = {1: 1, 2: 2, 4: 2}.get(len(figure.panels), 3)
    width, least = (520, 300) if columns == 1 else (300, 0)
    panels = [
        {
            "title": {
                "text": panel.title,
                "subtitle": textwrap.wrap(panel.missing, int(width / _LETTER_PX)),
            },
            "width": width,
            "height": max(least, panel.height),
            "layer": list(panel.layers),
        }
        for panel in figure.panels
    ]
    note = textwrap.wrap(figure.note, int(columns * (width + 60) / _LETTER_PX))
    heading = {"text": title or figure.title, "subtitle": [below, *note] if below else note}
    svg = _svg(
        title=heading | {"fontSize": 17, "offset": 14, "subtitlePadding": 5},
        padding=16,
        background="var(--page)",
        concat=panels,
        columns=columns,
        spacing=24,
    )
    style = resources.files("raybench.report").joinpath("html/page.css").read_text("utf-8")
    colors = {name: (light, dark) for name, light, dark in _COLOR.findall(style)}
    light_svg = _USED.sub(lambda match: colors[match[1]][0], svg)
    if kind == "png":
        import vl_convert

        return bytes(vl_convert.svg_to_png(light_svg, scale=2))
    # Only browsers know variables in a file: others get the light colours.
    rules = ""
    for name in dict.fromkeys(_USED.findall(svg)):
        light, dark = colors[name]
        for paint in ("fill", "stroke"):
            rules += f'[{paint}="{light}"]{{{paint}:{dark}}}'
    style = f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>"
    return light_svg.replace("><", f">{style}<", 1).encode()


def _svg(**spec: Any) -> str:
    """Render a Vega-Lite specification, completed by CONFIG, as SVG."""
    import vl_convert

    spec = {"$schema": _SCHEMA, "background": None, "config": CONFIG, **_printable(spec)}
    return _NOISE.sub("", str(vl_convert.vegalite_to_svg(spec, vl_version=_VEGA_LITE)))


def _printable(part: Any) -> Any:
    """Remove control characters, which make vl_convert abort."""
    if isinstance(part, str):
        return "\n".join(map(printable, part.split("\n")))
    if isinstance(part, Mapping):
        return {_printable(name): _printable(value) for name, value in part.items()}
    return [*map(_printable, part)] if isinstance(part, list | tuple) else part


def _with_data(*layers: Spec) -> list[Spec]:
    """Return the layers that have marks."""
    return [layer for layer in layers if layer["data"]["values"]]


def _layer(values: Sequence[Mark], mark: Spec, at: Spec, **encoding: Spec) -> Spec:
    """Return a layer of marks of one kind; the page shows tips if the first mark has one."""
    tip = {"description": {"field": "tip", "type": "nominal"}}
    has_tips = mark["type"] not in ("line", "rule") and bool(values) and "tip" in values[0]
    return {
        "data": {"values": list(values)},
        "mark": {**mark, "aria": has_tips},
        "encoding": {**at, **encoding, **(tip if has_tips else {})},
    }


def _text(values: Sequence[Mark], at: Spec, field: str = "text", **settings: Any) -> Spec:
    """Return a layer that writes the `field` of each mark, with settings of Vega-Lite."""
    words = []
    for mark in values:
        words.append({name: value for name, value in mark.items() if name != "tip"})
    style = {"type": "text", "fontSize": 12, "baseline": "middle", "color": "var(--text)"}
    return _layer(words, style | settings, at, text={"field": field, "type": "nominal"})


def _level_line(level: Level | None, channel: str, axis: Spec) -> list[Spec]:
    """Return the layers of a dashed line at a value of `channel`, "x" or "y", with its label."""
    if level is None:
        return []
    values = [{"level": level.value, "text": level.label}]
    at = {channel: {**axis, "field": "level"}}
    corner = {"x": {"value": "width"}} if channel == "y" else {"y": {"value": -5}}
    side: Spec = {"dy": -8} if channel == "y" else {"dx": 4}
    line = _layer(values, {"type": "rule", **_DASHED}, at)
    return [line, _text(values, at | corner, color="var(--quiet)", align="right", **side)]
