"""A small grammar of charts on Vega-Lite: lines, bars and heat maps, for the page and for files.

A figure is some panels side by side. A panel is one chart: `line_panel`, `bar_panels`, `heat_panel`
or `scatter_panel` makes it from marks, which are plain dictionaries. Colours are CSS variables of
page.css, so that one drawing suits a light and a dark page. The `tip` of a mark is the text that
the page shows where the mark is pointed at.
"""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from raybench.report.documents import Table
from raybench.report.formatting import printable

Spec = dict[str, Any]
Mark = dict[str, Any]

# A chart is as wide as the text of a phone, so that labels of 12 px are never made smaller. The
# height is that of the plot without axes and legend.
_WIDTH, _HEIGHT = 350, 195
# Lines are told apart by colour and shape; page.css gives the colours.
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
    """One chart of a figure.

    title: plain text, or empty. layers: of Vega-Lite. height: of the plot, in px. missing: a
    sentence that names the points that are not drawn, and why; or empty.
    """

    title: str = ""
    layers: Sequence[Spec]
    height: int
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture of a report. All text is plain: the page escapes it.

    anchor: its id in the page. note: what a reader must know to read the charts. table: figures
    that the table of all points does not hold.
    """

    anchor: str
    title: str
    note: str
    panels: Sequence[Panel]
    table: Table | None = None


def axis(title: str | None, log: int | None = None, **settings: Any) -> Spec:
    """Return a quantitative channel without field, linear from zero or logarithmic to base `log`.

    settings: of the axis in Vega-Lite, as `format`; but `scale`: settings of the scale, a mapping.
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
    """Return a nominal channel without field; its axis has those of the names that marks have.

    They are in the order of `names`; others come last. settings: of the axis in Vega-Lite.
    """
    return {
        "type": "nominal",
        "title": None,
        "sort": list(names),
        "axis": {"ticks": False, "domain": False, "labelPadding": 4, **settings},
    }


def by_series(
    names: Sequence[str],
    channel: str,
    values: Sequence[str] = (),
    *,
    symbol: str | None = None,
    room: float = _WIDTH,
    offset: int = 6,
    has_legend: bool | None = None,
) -> Spec:
    """Return the encoding that gives each series (`line`) its colour or shape, and one legend.

    names: the values of `line`, in the order of the legend. channel: "color"
    or "shape". values: one for each name, instead of the usual ones, which repeat after seven.
    symbol: shape of the legend's keys. room: its width in px. offset: px between it and the plot.
    has_legend: None: only where there are several names.
    """
    usual = [f"var(--s{place % MOST_LINES + 1})" for place in range(len(names))]
    if channel == "shape":
        usual = [_SHAPES[place % MOST_LINES] for place in range(len(names))]
    longest = max(map(len, names), default=0)
    columns = max(1, min(len(names), int(room / (_ENTRY_PX + _LETTER_PX * longest))))
    # At the left of the legend is the axis.
    folded = {name: _folded(name, max(186, room - _ENTRY_PX - _AXIS_PX)) for name in names}
    legend: Spec = {"columns": columns, "offset": offset} | _labels(folded)
    legend |= {"symbolType": symbol} if symbol else {}
    return {
        "field": "line",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(names), "range": list(values or usual)},
        "legend": legend if (len(names) > 1 if has_legend is None else has_legend) else None,
    }


def _of_lines(lines: Sequence[str], marks: Sequence[Mark], channel: str, offset: int) -> Spec:
    """Return `by_series` of the lines that a panel has; a line looks the same in all panels."""
    drawn = [name for name in lines if any(mark["line"] == name for mark in marks)]
    looks = by_series(lines, channel)["scale"]["range"]
    values = [looks[lines.index(name)] for name in drawn]
    return by_series(drawn, channel, values, offset=offset, has_legend=len(lines) > 1)


def _folded(text: str, width_px: float) -> list[str]:
    """Return the lines of a text in this width, one at least; long names break after `=` or `_`."""
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
    """Return the setting by which an axis or a legend writes these lines for each of its values."""
    return {"labelExpr": f"{json.dumps(_printable(lines))}[datum.label]"}


def line_panel(
    marks: Sequence[Mark],
    lines: Sequence[str],
    x: Spec,
    y: Spec,
    *,
    title: str = "",
    missing: str = "",
    ideal: Sequence[tuple[float, float]] = (),
    level: tuple[float, str] | None = None,
    below: Sequence[Spec] = (),
    has_points: bool = True,
) -> Panel:
    """Return a panel of lines, with a point for each mark where `has_points`.

    marks: each with `x`, `y`, `line` and, for its point, `tip`; optional `low` and `high` (an
    interval) and `number` (a text, drawn for the highest and the lowest mark at the largest x that
    has one). A mark whose `y` is None is a cross on the axis of x. lines: the values of `line` in
    the order of the legend; a single one has none. x, y: of `axis`. ideal: points (x, y) of a
    dashed line. level: the y of a dashed line, and its label. below: layers to draw first.
    """
    at: Spec = {"x": {"field": "x", **x}, "y": {"field": "y", **y}}
    # The legend stands above the title of the axis.
    offset = 22 if y["title"] else 6
    color, shape = (_of_lines(lines, marks, channel, offset) for channel in ("color", "shape"))
    drawn = [mark for mark in marks if mark["y"] is not None]
    ranges = [mark for mark in drawn if mark.get("low") is not None]
    ends = {"x": at["x"], "y": {"field": "low", **y}, "y2": {"field": "high"}}
    points = [{"x": at, "y": value, "text": "ideal"} for at, value in ideal]
    # Of crosses of several lines at one place, those below are larger.
    sizes = {line: 50 + 60 * place for place, line in enumerate(reversed(lines))}
    crosses = [{**mark, "size": sizes[mark["line"]]} for mark in marks if mark["y"] is None]
    crosses.sort(key=lambda mark: -float(mark["size"]))
    on_axis = {**at, "y": {"value": "height"}, "size": {"field": "size", "scale": None}}
    layers = _with_data(
        *below,
        _layer(points, {"type": "line", **_DASHED}, at),
        _text(points[-1:], at, align="right", dx=-4, dy=-6, color="var(--quiet)"),
        *_level_line(level, "y", at["y"]),
        _layer(ranges, {"type": "rule", "strokeWidth": 1.5}, ends, color=color),
        _layer(drawn, {"type": "line", "strokeWidth": 2 if has_points else 1.5}, at, color=color),
        _layer(drawn if has_points else (), _POINT, at, color=color, shape=shape),
        *(
            _text([mark], at, align="left", dx=8, dy=dy, fontWeight=600, field="number")
            for mark, dy in _ends(drawn)
        ),
        _layer(crosses, {**_POINT, **_CROSS}, on_axis, color=color),
    )
    return Panel(title=title, layers=layers, height=_HEIGHT, missing=missing)


def _ends(marks: Sequence[Mark]) -> list[tuple[Mark, int]]:
    """Return the last marks with a number of the highest line and of the lowest, and their dy.

    Each is moved by half a line of text, so that they are apart. [] where no mark has a number.
    """
    known = [mark for mark in marks if mark.get("number")]
    end = max((mark["x"] for mark in known), default=None)
    last = sorted((mark for mark in known if mark["x"] == end), key=lambda mark: -mark["y"])
    return [(last[0], -8), (last[-1], 8)] if len(last) > 1 else [(mark, 0) for mark in last]


def bar_panels(
    bars: Sequence[tuple[str, str, Sequence[Mark]]],
    x: Spec,
    *,
    series: Sequence[str] = (),
    colors: Sequence[str] = (),
    is_stacked: bool = False,
    level: tuple[float, str] | None = None,
) -> list[Panel]:
    """Return panels of at most twelve horizontal bars each; panels of one title have one scale.

    bars: for each bar (title of its panel, its name, one mark or more). Marks: each with `x` and
    `tip`; optional `low` and `high` (an interval), `text` (written at the largest of 0, `x` and
    `high`), `line` (its series). Several marks of a bar need one series each, side by side; with
    `is_stacked`, each is the part from `x` to `x2`, and the `scale` of x needs a `domain` that has
    every `x2`. x: of `axis`, linear. series: the values of `line` in the order of the legend.
    colors: instead of the usual ones. level: the x of a dashed line in each panel, and its label.
    """
    groups: dict[str, list[tuple[str, Sequence[Mark]]]] = {}
    for title, name, marks in bars:
        groups.setdefault(title, []).append((name, marks))
    panels = []
    for title, members in groups.items():
        marks = [mark for _, own in members for mark in own]
        has_ranges = any(mark.get("low") is not None for mark in marks)
        room = _beside([name for name, _ in members])
        low = min(0.0, *(min(one["x"], one.get("low") or 0.0) for one in marks))
        high = max(level[0] if level else 0.0, *(_end(one) for one in marks))
        if has_ranges:
            # Texts are written beyond intervals.
            text_px = _LETTER_PX * max(len(one.get("text", "")) for one in marks) + 8
            high = low + (high - low) * room / (room - min(text_px, room / 2))
        along = {**x, "scale": {"domain": [low, high], **x["scale"]}}
        count = -(-len(members) // _BARS_OF_A_PANEL)
        for place in range(count):
            some = members[place * len(members) // count : (place + 1) * len(members) // count]
            panels.append(_bars(title, some, along, series, colors, is_stacked, level, has_ranges))
    return panels


def _bars(
    title: str,
    bars: Sequence[tuple[str, Sequence[Mark]]],
    x: Spec,
    series: Sequence[str],
    colors: Sequence[str],
    is_stacked: bool,
    level: tuple[float, str] | None,
    has_ranges: bool,
) -> Panel:
    """Return one panel of bars: their names, and the marks of each.

    has_ranges: whether the texts are written beyond the bars, and not inside of long ones. The
    others are as of `bar_panels`.
    """
    # Bars may have one name, so that they are told apart by their place.
    marks = [{**mark, "bar": str(n)} for n, (_, own) in enumerate(bars) for mark in own]
    folded = [_folded(name, _NAME_PX) for name, _ in bars]
    most = max(map(len, folded))
    # The first line of a label is at the middle of its bar, unless it is moved.
    lines = {str(n): [""] * ((most - len(own)) // 2) + own for n, own in enumerate(folded)}
    labels = _labels(lines) | {"labelLimit": _NAME_PX, "labelOffset": _LINE_PX * (1 - most) / 2}
    y = {"field": "bar", **names_axis(list(lines), **labels)}
    y["scale"] = {"paddingInner": 0.25, "paddingOuter": 0.12}
    at: Spec = {"x": {"field": "x", **x}, "y": y}
    if is_stacked:
        at["x2"] = {"field": "x2"}
    elif len(series) > 1:
        at["yOffset"] = {"field": "line", "type": "nominal", "sort": list(series)}
    color: Spec = {"value": "var(--s1)"}
    if series:
        # The legend stands above the label of a level.
        above, room = 22 if level else 6, _beside([name for name, _ in bars])
        color = by_series(series, "color", colors, symbol="square", room=room, offset=above)
    ranges = [mark for mark in marks if mark.get("low") is not None]
    ends = {**at, "x": {"field": "low", **x}, "x2": {"field": "high"}}
    longest = max([*(mark["x"] for mark in marks), level[0] if level else 0.0])
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
    beside = 1 if is_stacked else len(series)
    bar_px = max(_BAR_PX, 0.9 * _BAR_PX * beside, _LINE_PX * most + 6)
    return Panel(title=title, layers=layers, height=round(bar_px * len(bars)))


def _end(mark: Mark) -> float:
    """Return the end of a bar or of its interval, whichever is farther; 0 at least."""
    return max(0.0, float(mark["x"]), float(mark.get("high") or 0.0))


def _beside(names: Sequence[str]) -> float:
    """Return the width in px that is left for bars beside their names."""
    return _WIDTH - 20 - min(_NAME_PX, _LETTER_PX * max(map(len, names), default=0))


def heat_panel(
    cells: Sequence[Mark],
    x: Spec,
    y: Spec,
    color: Spec,
    *,
    height: int,
    title: str = "",
    inverse: str = "false",
) -> Panel:
    """Return a panel of coloured cells, with the legend of `color`.

    cells: at least one, each with `x`, `y`, `tip` and the field of `color`. All have `x2` (x is a
    range to it), or any may have `text` (written into it) and `is_marked` (it is outlined).
    x, y: Vega-Lite channels, whose field is added. height: of the plot, in px. inverse: a Vega
    expression that is true for cells whose text has the colour of the page.
    """
    at: Spec = {"x": {"field": "x", **x}, "y": {"field": "y", **y}}
    is_range = "x2" in cells[0]
    wide = {"x2": {"field": "x2"}} if is_range else {}
    mark = {"type": "rect", "stroke": None if is_range else "var(--page)", "strokeWidth": 2}
    ink = {"expr": f"{inverse} ? 'var(--page)' : 'var(--text)'"}
    texts = [cell for cell in cells if cell.get("text")]
    marked = [{"x": one["x"], "y": one["y"]} for one in cells if one.get("is_marked")]
    outline = {"type": "rect", "fill": None, "stroke": "var(--bad)", "strokeWidth": 3}
    layers = _with_data(
        _layer(cells, mark, at | wide, color=color),
        _layer(marked, outline, at),
        _text(texts, at, color=ink),
    )
    return Panel(title=title, layers=layers, height=height)


def scatter_panel(
    marks: Sequence[Mark],
    x: Spec,
    y: Spec,
    kinds: Mapping[str, tuple[str, str]],
    *,
    height: int,
    title: str = "",
    level: tuple[float, str] | None = None,
    below: Sequence[Spec] = (),
) -> Panel:
    """Return a panel of points without lines.

    marks: at least one, each with `x`, `y`, `line` and `tip`. x, y: as of `heat_panel`. kinds: each
    value of `line` -> its shape and colour, in the order of the legend, which is left out if only
    one occurs. height: of the plot, in px. level: the x of a dashed line across the chart, and its
    label. below: layers that are drawn first.
    """
    at: Spec = {"x": {"field": "x", **x}, "y": {"field": "y", **y}}
    used = [name for name in kinds if any(mark["line"] == name for mark in marks)]
    shapes, colors = zip(*(kinds[name] for name in used), strict=True)
    legend = {"shape": by_series(used, "shape", shapes), "color": by_series(used, "color", colors)}
    layers = _with_data(
        *below, *_level_line(level, "x", at["x"]), _layer(marks, _POINT, at, **legend)
    )
    return Panel(title=title, layers=layers, height=height)


def by_threshold(field: str, steps: Sequence[float], title: str) -> Spec:
    """Return the encoding that colours cells from blue to brown, with a titled scale as its legend.

    field: has shares, of which 0.1 is written +10%. steps: six, ascending; each begins a colour.
    """
    return {
        "field": field,
        "type": "quantitative",
        "scale": {
            "type": "threshold",
            "domain": list(steps),
            "range": [f"var(--h{place + 1})" for place in range(len(steps) + 1)],
        },
        "legend": {
            **{"title": title, "titleOrient": "left", "format": "+~%", "gradientThickness": 10},
            **{"gradientLength": 220, "direction": "horizontal"},
        },
    }


def draw(panel: Panel, name: str) -> str:
    """Return a panel as SVG, coloured by page.css, without title and `missing`. name: its label."""
    svg = _svg(
        width=_WIDTH,
        height=panel.height,
        autosize={"type": "fit-x", "contains": "padding"},
        layer=list(panel.layers),
    )
    label = html.escape(printable(name))
    return svg.replace('class="marks"', f'class="chart" role="img" aria-label="{label}"', 1)


def draw_figure(figure: Figure, kind: str, *, title: str = "", below: str = "") -> bytes:
    """Return a figure of one panel or more, without its table, as a file; kind: `svg` or `png`.

    An SVG follows the light or dark theme of a browser, else it is light. A PNG is light, with two
    pixels for each of the layout. title: instead of the figure's. below: a line under the title.
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
    light_svg = _USED.sub(lambda found: colors[found[1]][0], svg)
    if kind == "png":
        import vl_convert

        return bytes(vl_convert.svg_to_png(light_svg, scale=2))
    # Only browsers know variables in a file: others get the light colours.
    rules = "".join(
        f'[{paint}="{light}"]{{{paint}:{dark}}}'
        for light, dark in (colors[name] for name in dict.fromkeys(_USED.findall(svg)))
        for paint in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>"
    return light_svg.replace("><", f">{style}<", 1).encode()


def _svg(**spec: Any) -> str:
    """Return a Vega-Lite specification, completed by CONFIG, as SVG without what nobody sees."""
    import vl_convert

    spec = {"$schema": _SCHEMA, "background": None, "config": CONFIG, **_printable(spec)}
    return _NOISE.sub("", str(vl_convert.vegalite_to_svg(spec, vl_version=_VEGA_LITE)))


def _printable(part: Any) -> Any:
    """Return a part of a specification without control characters: vl_convert would abort."""
    if isinstance(part, str):
        return "\n".join(map(printable, part.split("\n")))
    if isinstance(part, Mapping):
        return {_printable(name): _printable(value) for name, value in part.items()}
    return [*map(_printable, part)] if isinstance(part, list | tuple) else part


def _with_data(*layers: Spec) -> list[Spec]:
    """Return the layers that have marks."""
    return [layer for layer in layers if layer["data"]["values"]]


def _layer(values: Sequence[Mark], mark: Spec, at: Spec, **encoding: Spec) -> Spec:
    """Return a layer of marks of one kind; where the first one has a tip, the page shows tips."""
    tip = {"description": {"field": "tip", "type": "nominal"}}
    has_tips = mark["type"] not in ("line", "rule") and bool(values) and "tip" in values[0]
    return {
        "data": {"values": list(values)},
        "mark": {**mark, "aria": has_tips},
        "encoding": {**at, **encoding, **(tip if has_tips else {})},
    }


def _text(values: Sequence[Mark], at: Spec, field: str = "text", **settings: Any) -> Spec:
    """Return a layer of texts, which are in `field` of the marks; settings: of Vega-Lite's mark."""
    words = [{name: one for name, one in value.items() if name != "tip"} for value in values]
    mark = {"type": "text", "fontSize": 12, "baseline": "middle", "color": "var(--text)"}
    return _layer(words, mark | settings, at, text={"field": field, "type": "nominal"})


def _level_line(level: tuple[float, str] | None, channel: str, axis: Spec) -> list[Spec]:
    """Return the layers of a dashed line across the chart at a value of `channel`, with its label.

    [] where `level` is None. The label is above the line, at its right end if it is one of y.
    """
    if level is None:
        return []
    values = [{"level": level[0], "text": level[1]}]
    at = {channel: {**axis, "field": "level"}}
    corner = {"x": {"value": "width"}} if channel == "y" else {"y": {"value": -5}}
    side: Spec = {"dy": -8} if channel == "y" else {"dx": 4}
    line = _layer(values, {"type": "rule", **_DASHED}, at)
    return [line, _text(values, at | corner, color="var(--quiet)", align="right", **side)]
