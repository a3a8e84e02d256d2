"""A small grammar of charts on Vega-Lite: lines, bars and heat maps, for the page and for files.

A figure is some panels side by side. A panel is one chart: `line_panel`, `bar_panels`, `heat_panel`
or `scatter_panel` makes it from marks, which are plain dictionaries. Colours are CSS variables of
page.css, so that a drawing suits a light and a dark page. The `tip` of a mark is the tooltip of
the page.
"""

from __future__ import annotations

import html
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from raybench.report.documents import Table
from raybench.report.formatting import printable

# A part of a specification of Vega-Lite.
Spec = dict[str, Any]
# The fields of a mark, such as `x`, `y`, `line` and `tip`; each kind of panel says which it needs.
Mark = dict[str, Any]

# Width and height in px. A chart is as wide as the text on a phone, so that labels of 12 px are
# never made smaller. The height excludes axes and legend.
_WIDTH, _HEIGHT = 350, 195
# Lines differ by colour and shape; page.css gives 7 colours.
MOST_LINES, MOST_PANELS, MOST_BARS = 7, 8, 72
_SHAPES = (
    *("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right"),
)
_VEGA_LITE = "5.21"
_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
# Most bars of a panel, height of a bar, and height of a line of text.
_BARS_OF_A_PANEL, _BAR_PX, _LINE_PX = 12, 19, 13
# Room for the labels of an axis of y, for the key of an entry of a legend, and for a letter.
_AXIS_PX, _ENTRY_PX, _LETTER_PX = 52, 30, 6.2
_CAPITAL_PX = 8.2
# A label of a legend is at least so wide, even if it covers the axis.
_LEAST_LABEL_PX = 186
# Room for the name of a bar, and for the gaps around names and bars.
_NAME_PX, _AROUND_BARS_PX = 170, 20
# Distance between legend and plot, also if a title or label stands between both.
_LEGEND_PX, _LEGEND_ABOVE_TITLE_PX = 6, 22
# Bars longer than this share of the longest bar have their number inside, other bars beside them.
_LONG_BAR = 0.5
_POINT = {"type": "point", "filled": True, "size": 50, "opacity": 1}
_CROSS = {"shape": "M-1,-1L1,1M1,-1L-1,1", "filled": False, "strokeWidth": 2}
_DASHED = {"color": "var(--axis)", "strokeDash": [5, 4], "strokeWidth": 1.5}
_COLOR_RULE = re.compile(r"(--[a-z]+\d?): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)")
_USED_VARIABLE = re.compile(r'(?<==")var\((--[a-z]+\d?)\)(?=")')
# Invisible backgrounds, and roles that a screen reader would read out: a quarter of Vega's output.
_UNNEEDED_SVG = re.compile(
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
        # Without it, 0 would be `+0%` or `0k`, and 0.1 GB/s would be `100m`.
        "labelExpr": "datum.value === 0 ? replace(datum.label, /[+kM]/, '') : "
        "isNumber(datum.value) && test(/[mµ]$/, datum.label) ? format(datum.value, '~g') : "
        "datum.label",
    },
    # The title stands above the axis: beside it, a wide font would cover labels.
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
    # A sentence that names points that are not drawn, and why; may be "".
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture of a report; its texts are not yet escaped."""

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
class LegendLayout:
    """How the legend of the series is drawn."""

    # Shape of the symbols; None uses the shape of the marks.
    symbol: str | None = None
    width_px: float = _WIDTH
    # Distance between legend and plot.
    offset_px: int = _LEGEND_PX
    # Whether there is a legend; None: if there are several series.
    is_shown: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLayout:
    """Axes, dashed lines and style of a panel of lines."""

    # Channels by `axis`.
    x: Spec
    y: Spec
    # Points (x, y) of the dashed line of ideal scaling.
    ideal: Sequence[tuple[float, float]] = ()
    # A line at a value of y.
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
    """Axis, series and style of panels of bars."""

    # A linear channel by `axis`.
    x: Spec
    # The values of `line` in the order of the legend.
    series: Sequence[str] = ()
    # A colour for each of the series; empty for the default colours.
    colors: Sequence[str] = ()
    is_stacked: bool = False
    # A line at a value of x, in each panel.
    level: Level | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatLayout:
    """Axes, colours and height of a heat map."""

    # Channels without a field.
    x: Spec
    y: Spec
    # The encoding of the colour, with its field.
    color: Spec
    # Height of the plot in px.
    height: int
    # A Vega expression that is true for cells whose text has the colour of the page.
    inverse: str = "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterLayout:
    """Axes, shapes, colours and height of a scatter plot."""

    # Channels without a field.
    x: Spec
    y: Spec
    # Value of `line` -> (shape, colour), in the order of the legend.
    kinds: Mapping[str, tuple[str, str]]
    # Height of the plot in px.
    height: int
    # A line at a value of x.
    level: Level | None = None
    # Layers that are drawn first.
    below: Sequence[Spec] = ()


def axis(title: str | None, log: int | None = None, **settings: Any) -> Spec:
    """Return a quantitative channel of Vega-Lite without its field.

    Args:
        title: None for an axis without a title.
        log: the base of a logarithmic scale; None: linear from zero.
        settings: settings of the axis, such as `format`; `scale` has settings of the scale.
    """
    scale = {"type": "log", "base": log, "nice": False, "padding": 14} if log else {"zero": True}
    scale |= settings.pop("scale", {})
    return {
        "type": "quantitative",
        "title": title,
        "scale": scale,
        "axis": {"tickCount": 6 if log == 2 else 5, **settings},
    }


# A label with a binary unit, which Vega does not have.
_POWER = "floor(log(datum.value) / log(1024) + 1e-9)"
SIZE_LABELS = (
    f"format(datum.value / pow(1024, {_POWER}), '~g') + ' ' "
    f"+ ['B', 'KiB', 'MiB', 'GiB', 'TiB'][{_POWER}]"
)


def names_axis(names: Sequence[str], **settings: Any) -> Spec:
    """Return a nominal channel of Vega-Lite without its field.

    Args:
        names: the order of the values. Names without a mark are not shown.
        settings: settings of the axis in Vega-Lite.
    """
    return {
        "type": "nominal",
        "title": None,
        "sort": list(names),
        "axis": {"ticks": False, "domain": False, "labelPadding": 4, **settings},
    }


_DEFAULT_LEGEND = LegendLayout()


def by_series(
    names: Sequence[str],
    channel: str,
    colors_or_shapes: Sequence[str] = (),
    layout: LegendLayout = _DEFAULT_LEGEND,
) -> Spec:
    """Return the encoding that gives each series its colour or shape, and a legend.

    Args:
        names: the values of the field `line`, in the order of the legend.
        channel: "color" or "shape".
        colors_or_shapes: colour or shape of each name; the defaults repeat after seven.
        layout: how the legend is drawn.
    """
    defaults = [f"var(--s{number % MOST_LINES + 1})" for number in range(len(names))]
    if channel == "shape":
        defaults = [_SHAPES[number % MOST_LINES] for number in range(len(names))]
    longest_name = max(map(len, names), default=0)
    entry_px = _ENTRY_PX + _LETTER_PX * longest_name
    columns = max(1, min(len(names), int(layout.width_px / entry_px)))
    # The axis takes room to the left of the legend.
    label_px = max(_LEAST_LABEL_PX, layout.width_px - _ENTRY_PX - _AXIS_PX)
    folded_names = {name: _fold(name, label_px) for name in names}
    legend: Spec = {"columns": columns, "offset": layout.offset_px} | _label_setting(folded_names)
    legend |= {"symbolType": layout.symbol} if layout.symbol else {}
    has_legend = len(names) > 1 if layout.is_shown is None else layout.is_shown
    return {
        "field": "line",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(names), "range": list(colors_or_shapes or defaults)},
        "legend": legend if has_legend else None,
    }


def _line_encoding(
    lines: Sequence[str],  # names of the lines of all panels
    marks: Sequence[Mark],  # of one panel
    channel: str,  # "color" or "shape"
    legend_offset_px: int,
) -> Spec:
    """Return the encoding of the lines in a panel; a line looks the same in all panels."""
    lines_with_marks = {mark["line"] for mark in marks}
    drawn = [line for line in lines if line in lines_with_marks]
    colors_or_shapes = by_series(lines, channel)["scale"]["range"]
    look_of_line = dict(zip(lines, colors_or_shapes, strict=True))
    layout = LegendLayout(offset_px=legend_offset_px, is_shown=len(lines) > 1)
    return by_series(drawn, channel, [look_of_line[line] for line in drawn], layout)


def _fold(text: str, width_px: float) -> list[str]:
    """Return the lines of a text, at least one; long names are folded after `=` or `_`."""
    letter_px = _CAPITAL_PX if text.isupper() else _LETTER_PX
    most_chars = int(width_px / letter_px)
    lines: list[str] = []
    for line in textwrap.wrap(text, most_chars, break_long_words=False) or [""]:
        rest = line
        while len(rest) > most_chars:
            last_sign = max(rest.rfind(sign, 0, most_chars) for sign in "=_")
            # Without such a sign, the name is folded anywhere.
            end = most_chars if last_sign == -1 else last_sign + 1
            lines.append(rest[:end])
            rest = rest[end:]
        lines.append(rest)
    return lines


def _label_setting(
    lines_of_label: Mapping[str, Sequence[str]],  # value -> lines of its label
) -> Spec:
    """Return the setting of an axis or a legend that writes labels in several lines."""
    return {"labelExpr": f"{json.dumps(_printable(lines_of_label))}[datum.label]"}


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
        title: title of the panel.
        missing: a sentence that names points that are not drawn.
    """
    y = layout.y
    channels: Spec = {"x": {"field": "x", **layout.x}, "y": {"field": "y", **y}}
    offset = _LEGEND_ABOVE_TITLE_PX if y["title"] else _LEGEND_PX
    color = _line_encoding(lines, marks, "color", offset)
    shape = _line_encoding(lines, marks, "shape", offset)
    drawn = [mark for mark in marks if mark["y"] is not None]
    intervals = [mark for mark in drawn if mark.get("low") is not None]
    interval = {"x": channels["x"], "y": {"field": "low", **y}, "y2": {"field": "high"}}
    ideal = [{"x": x, "y": value, "text": "ideal"} for x, value in layout.ideal]
    # Crosses of several lines may coincide, so the cross below is larger.
    size_of_line = {line: 50 + 60 * number for number, line in enumerate(reversed(lines))}
    crosses = [{**mark, "size": size_of_line[mark["line"]]} for mark in marks if mark["y"] is None]
    crosses.sort(key=lambda cross: -float(cross["size"]))
    on_axis = {**channels, "y": {"value": "height"}, "size": {"field": "size", "scale": None}}
    width = 2 if layout.has_points else 1.5
    numbers = [
        _text_layer([mark], channels, align="left", dx=8, dy=dy, fontWeight=600, field="number")
        for mark, dy in _numbered_ends(drawn)
    ]
    layers = _layers_with_marks(
        *layout.below,
        _layer(ideal, {"type": "line", **_DASHED}, channels),
        # The last point of the ideal line has the label.
        _text_layer(ideal[-1:], channels, align="right", dx=-4, dy=-6, color="var(--quiet)"),
        *_level_line(layout.level, "y", channels["y"]),
        _layer(intervals, {"type": "rule", "strokeWidth": 1.5}, interval, color=color),
        _layer(drawn, {"type": "line", "strokeWidth": width}, channels, color=color),
        _layer(drawn if layout.has_points else (), _POINT, channels, color=color, shape=shape),
        *numbers,
        _layer(crosses, {**_POINT, **_CROSS}, on_axis, color=color),
    )
    return Panel(title=title, layers=layers, height=_HEIGHT, missing=missing)


def _numbered_ends(marks: Sequence[Mark]) -> list[tuple[Mark, int]]:
    """Return (mark, shift of its number in px) of the highest and lowest mark at the largest x."""
    numbered = [mark for mark in marks if mark.get("number")]
    largest_x = max((mark["x"] for mark in numbered), default=None)
    at_end = [mark for mark in numbered if mark["x"] == largest_x]
    at_end.sort(key=lambda mark: -mark["y"])
    if len(at_end) < 2:
        return [(mark, 0) for mark in at_end]
    # One number moves up and the other down, so that close numbers do not overlap.
    return [(at_end[0], -8), (at_end[-1], 8)]


def bar_panels(bars: Sequence[Bar], layout: BarLayout) -> list[Panel]:
    """Return panels of at most twelve horizontal bars; panels with the same title share a scale.

    Args:
        bars: each mark has `x` and `tip`. Optional: `low` and `high` (an interval), `text` (at the
            end of the bar or of its interval) and `line` (its series). Marks of several series are
            side by side. Stacked marks reach from `x` to `x2`.
        layout: stacked bars need a `domain` in the scale of `x` that includes every `x2`.
    """
    bars_of_title: dict[str, list[Bar]] = {}
    for bar in bars:
        bars_of_title.setdefault(bar.panel, []).append(bar)
    panels = []
    for title, alike in bars_of_title.items():
        has_intervals = any(mark.get("low") is not None for bar in alike for mark in bar.marks)
        scale = {"domain": _bar_domain(alike, layout.level, has_intervals), **layout.x["scale"]}
        scaled = replace(layout, x={**layout.x, "scale": scale})
        # The numbers of bars in these panels differ by at most one.
        panel_count = math.ceil(len(alike) / _BARS_OF_A_PANEL)
        for number in range(panel_count):
            start = number * len(alike) // panel_count
            end = (number + 1) * len(alike) // panel_count
            panels.append(_bar_panel(title, alike[start:end], scaled, has_intervals))
    return panels


def _bar_domain(bars: Sequence[Bar], level: Level | None, has_intervals: bool) -> list[float]:
    """Return the ends of the scale of x, with room for texts beside intervals."""
    marks = [mark for bar in bars for mark in bar.marks]
    low = min(0.0, *(min(mark["x"], mark.get("low") or 0.0) for mark in marks))
    high = max(level.value if level else 0.0, *(_end_of_bar(mark) for mark in marks))
    if has_intervals:
        # Lengthen the scale, so that the longest text fits to the right of the largest value.
        plot_px = _bar_room_px([bar.name for bar in bars])
        text_px = _LETTER_PX * max(len(mark.get("text", "")) for mark in marks) + 8
        px_of_values = plot_px - min(text_px, plot_px / 2)
        high = low + (high - low) * plot_px / px_of_values
    return [low, high]


def _bar_panel(title: str, bars: Sequence[Bar], layout: BarLayout, has_intervals: bool) -> Panel:
    """Return one panel; texts stand beside intervals, beside short bars, or inside long bars."""
    # Several bars may have the same name, so each is identified by its number.
    marks: list[Mark] = []
    for number, bar in enumerate(bars):
        marks += [{**mark, "bar": str(number)} for mark in bar.marks]
    y, most_lines = _bar_names_axis(bars)
    x, series, level = layout.x, layout.series, layout.level
    channels: Spec = {"x": {"field": "x", **x}, "y": y}
    if layout.is_stacked:
        channels["x2"] = {"field": "x2"}
    elif len(series) > 1:
        channels["yOffset"] = {"field": "line", "type": "nominal", "sort": list(series)}
    color: Spec = {"value": "var(--s1)"}
    if series:
        legend = LegendLayout(
            symbol="square",
            width_px=_bar_room_px([bar.name for bar in bars]),
            # The label of the level line stands between legend and plot.
            offset_px=_LEGEND_ABOVE_TITLE_PX if level else _LEGEND_PX,
        )
        color = by_series(series, "color", layout.colors, legend)
    intervals = [mark for mark in marks if mark.get("low") is not None]
    interval = {**channels, "x": {"field": "low", **x}, "x2": {"field": "high"}}
    longest = max([*(mark["x"] for mark in marks), level.value if level else 0.0])
    texts = [{**mark, "x": _end_of_bar(mark)} for mark in marks if "text" in mark]
    # An expression of Vega: whether a text is inside its bar.
    is_inside = "false" if has_intervals else f"datum.x > {_LONG_BAR * longest}"
    layers = _layers_with_marks(
        _layer(marks, {"type": "bar"}, channels, color=color),
        _layer(intervals, {"type": "rule", "strokeWidth": 1.5, "color": "var(--text)"}, interval),
        _text_layer(
            texts,
            channels,
            align={"expr": f"{is_inside} ? 'right' : 'left'"},
            dx={"expr": f"{is_inside} ? -5 : 5"},
            color={"expr": f"{is_inside} ? 'var(--page)' : 'var(--text)'"},
        ),
        *_level_line(level, "x", channels["x"]),
    )
    bars_side_by_side = 1 if layout.is_stacked else len(series)
    bar_px = max(_BAR_PX, 0.9 * _BAR_PX * bars_side_by_side, _LINE_PX * most_lines + 6)
    return Panel(title=title, layers=layers, height=round(bar_px * len(bars)))


def _bar_names_axis(bars: Sequence[Bar]) -> tuple[Spec, int]:
    """Return the channel of y that names bars, and the number of lines of the longest name."""
    folded_names = [_fold(bar.name, _NAME_PX) for bar in bars]
    most_lines = max(map(len, folded_names))
    lines_of_bar = {}  # number of the bar -> lines of its label
    for number, lines in enumerate(folded_names):
        # The middle of a label would be off its bar: empty lines and the offset correct this.
        empty_lines = [""] * ((most_lines - len(lines)) // 2)
        lines_of_bar[str(number)] = [*empty_lines, *lines]
    labels = _label_setting(lines_of_bar)
    labels |= {"labelLimit": _NAME_PX, "labelOffset": _LINE_PX * (1 - most_lines) / 2}
    channel = {"field": "bar", **names_axis(list(lines_of_bar), **labels)}
    channel["scale"] = {"paddingInner": 0.25, "paddingOuter": 0.12}
    return channel, most_lines


def _end_of_bar(mark: Mark) -> float:
    """Return the right end of a bar and its interval, at least 0."""
    return max(0.0, float(mark["x"]), float(mark.get("high") or 0.0))


def _bar_room_px(names: Sequence[str]) -> float:
    """Return the width that is left for bars beside their names."""
    names_px = min(_NAME_PX, _LETTER_PX * max(map(len, names), default=0))
    return _WIDTH - _AROUND_BARS_PX - names_px


def heat_panel(cells: Sequence[Mark], layout: HeatLayout, title: str = "") -> Panel:
    """Return a heat map.

    Args:
        cells: at least one, each with `x`, `y`, `tip` and the field of `layout.color`. Either all
            cells reach from `x` to `x2`, or cells may have `text` (written into the cell) and
            `is_marked` (the cell is outlined).
        layout: axes, colours and height.
        title: title of the panel.
    """
    channels: Spec = {"x": {"field": "x", **layout.x}, "y": {"field": "y", **layout.y}}
    is_range = "x2" in cells[0]
    cell_channels = channels | ({"x2": {"field": "x2"}} if is_range else {})
    mark = {"type": "rect", "stroke": None if is_range else "var(--page)", "strokeWidth": 2}
    # `inverse` is a Vega expression: true where a cell needs its text in the colour of the page.
    text_color = {"expr": f"{layout.inverse} ? 'var(--page)' : 'var(--text)'"}
    texts = [cell for cell in cells if cell.get("text")]
    outlined = [{"x": cell["x"], "y": cell["y"]} for cell in cells if cell.get("is_marked")]
    outline = {"type": "rect", "fill": None, "stroke": "var(--bad)", "strokeWidth": 3}
    layers = _layers_with_marks(
        _layer(cells, mark, cell_channels, color=layout.color),
        _layer(outlined, outline, channels),
        _text_layer(texts, channels, color=text_color),
    )
    return Panel(title=title, layers=layers, height=layout.height)


def scatter_panel(marks: Sequence[Mark], layout: ScatterLayout, title: str = "") -> Panel:
    """Return a panel of points without lines; a single kind of points has no legend.

    Args:
        marks: at least one, each with `x`, `y`, `line` (the kind of the point) and `tip`.
        layout: axes, shapes, colours and height; a vertical line marks its level.
        title: title of the panel.
    """
    channels: Spec = {"x": {"field": "x", **layout.x}, "y": {"field": "y", **layout.y}}
    lines_with_marks = {mark["line"] for mark in marks}
    drawn = [line for line in layout.kinds if line in lines_with_marks]
    shapes, colors = [], []
    for line in drawn:
        shape, color = layout.kinds[line]
        shapes.append(shape)
        colors.append(color)
    layers = _layers_with_marks(
        *layout.below,
        *_level_line(layout.level, "x", channels["x"]),
        _layer(
            marks,
            _POINT,
            channels,
            shape=by_series(drawn, "shape", shapes),
            color=by_series(drawn, "color", colors),
        ),
    )
    return Panel(title=title, layers=layers, height=layout.height)


def by_threshold(field: str, steps: Sequence[float], title: str) -> Spec:
    """Return the encoding that colours cells from blue to brown, with a legend.

    Args:
        field: field of the cells that holds a share, such as 0.1 for +10%.
        steps: six shares, ascending, at which the next colour begins.
        title: title of the legend.
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
    """Return a panel as SVG for the page, without `title` and `missing`.

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
    """Return a figure without its table as the bytes of a file.

    An SVG follows the light or dark theme of a browser. A PNG is light, at twice the resolution.

    Args:
        figure: the figure to draw.
        kind: `svg` or `png`.
        title: replaces the title of the figure.
        below: a line under the title.
    """
    # Two or four panels fill two columns.
    columns = {1: 1, 2: 2, 4: 2}.get(len(figure.panels), 3)
    width, least_height = (520, 300) if columns == 1 else (300, 0)
    panels = []
    for panel in figure.panels:
        missing = textwrap.wrap(panel.missing, int(width / _LETTER_PX))
        panels.append(
            {
                "title": {"text": panel.title, "subtitle": missing},
                "width": width,
                "height": max(least_height, panel.height),
                "layer": list(panel.layers),
            }
        )
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
    css = resources.files("raybench.report").joinpath("html/page.css").read_text("utf-8")
    # CSS variable -> colour of the light and of the dark theme
    colors = {name: (light, dark) for name, light, dark in _COLOR_RULE.findall(css)}
    # Other programs than browsers do not know CSS variables.
    light_svg = _USED_VARIABLE.sub(lambda match: colors[match[1]][0], svg)
    if kind == "png":
        import vl_convert

        return bytes(vl_convert.svg_to_png(light_svg, scale=2))
    # Only browsers know media queries in a file: other programs show the light colours.
    rules = ""
    for name in dict.fromkeys(_USED_VARIABLE.findall(svg)):
        light, dark = colors[name]
        for paint in ("fill", "stroke"):
            rules += f'[{paint}="{light}"]{{{paint}:{dark}}}'
    style = f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>"
    # The style comes right after the first tag, <svg>.
    return light_svg.replace("><", f">{style}<", 1).encode()


def _svg(**spec: Any) -> str:
    """Return a Vega-Lite specification, completed by CONFIG, as SVG without unneeded parts."""
    import vl_convert

    spec = {"$schema": _SCHEMA, "background": None, "config": CONFIG, **_printable(spec)}
    svg = str(vl_convert.vegalite_to_svg(spec, vl_version=_VEGA_LITE))
    return _UNNEEDED_SVG.sub("", svg)


def _printable(part: Any) -> Any:
    """Return a part of a specification without control characters, which make vl_convert abort."""
    if isinstance(part, str):
        return "\n".join(map(printable, part.split("\n")))
    if isinstance(part, Mapping):
        return {_printable(name): _printable(value) for name, value in part.items()}
    return [*map(_printable, part)] if isinstance(part, list | tuple) else part


def _layers_with_marks(*layers: Spec) -> list[Spec]:
    """Return the layers that have marks."""
    return [layer for layer in layers if layer["data"]["values"]]


def _layer(marks: Sequence[Mark], style: Spec, channels: Spec, **encoding: Spec) -> Spec:
    """Return a layer of marks of one style; the page shows tooltips if the first mark has one."""
    # Vega writes the description as `aria-label`, which the page shows as the tooltip.
    tip = {"description": {"field": "tip", "type": "nominal"}}
    # The points on a line, and the bars under a rule, have the tooltips.
    may_have_tips = style["type"] not in ("line", "rule")
    has_tips = may_have_tips and bool(marks) and "tip" in marks[0]
    return {
        "data": {"values": list(marks)},
        "mark": {**style, "aria": has_tips},
        "encoding": {**channels, **encoding, **(tip if has_tips else {})},
    }


def _text_layer(
    marks: Sequence[Mark], channels: Spec, field: str = "text", **settings: Any
) -> Spec:
    """Return a layer that writes a field of each mark, with settings of Vega-Lite."""
    texts = []
    for mark in marks:
        # The bar, cell or point beside the text has the tooltip.
        texts.append({name: value for name, value in mark.items() if name != "tip"})
    style = {"type": "text", "fontSize": 12, "baseline": "middle", "color": "var(--text)"}
    return _layer(texts, style | settings, channels, text={"field": field, "type": "nominal"})


def _level_line(level: Level | None, channel: str, axis: Spec) -> list[Spec]:
    """Return the layers of a dashed line at a value of `channel`, "x" or "y", with its label."""
    if level is None:
        return []
    marks = [{"level": level.value, "text": level.label}]
    channels = {channel: {**axis, "field": "level"}}
    line = _layer(marks, {"type": "rule", **_DASHED}, channels)
    # The label stands at the right end of a horizontal line, or above a vertical line.
    end = {"x": {"value": "width"}} if channel == "y" else {"y": {"value": -5}}
    shift: Spec = {"dy": -8} if channel == "y" else {"dx": 4}
    label = _text_layer(marks, channels | end, color="var(--quiet)", align="right", **shift)
    return [line, label]
