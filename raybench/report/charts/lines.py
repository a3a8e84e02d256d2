"""Charts of lines with points, as Vega-Lite specifications."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raybench.report import formatting
from raybench.report.charts.figure import TIP, Entry, Spec, Value, by_line

# The share of a doubling by which axes of powers of two reach beyond the outermost points.
_MARGIN = 0.2
# A label for each power of two is too many beyond so many.
_MOST_TICKS = 6
# On a logarithmic axis an interval reaches at most so far from its point; beyond, an arrow says so.
_LONGEST_INTERVAL = 2.0
# Lines whose points are all nearer than this lie on each other: there the first is the widest.
_SAME = 0.01
_WIDTHS, _SIZES = (11.0, 6.0, 2.0), (230, 120, 45)
# Numbers of lines nearer than this would lie on each other.
_APART = 1.2
_DASHED = {"color": "var(--axis)", "strokeDash": [5, 4], "strokeWidth": 1.5, "aria": False}
OTHER = Entry(label="the other run", color="var(--axis)", shape="hollow")


def layers(values: Sequence[Value], lines: Sequence[str], x: Spec, y: Spec) -> list[Spec]:
    """Draw lines with points that can be pointed at; below, dotted, those of another run."""
    apart = _by_width(values, lines)
    own = [_line_layer(lines, x, y, apart[0]), _point_layer(lines, x, y, apart[1])]
    if not any(value.get("other") for value in values):
        return own
    dotted: Spec = {"strokeDash": {"value": [2, 3]}, "opacity": {"value": 0.75}}
    others = [_line_layer(lines, x, y, dotted), _point_layer(lines, x, y, {}, is_filled=False)]
    return [
        *({**layer, "transform": [{"filter": "datum.other"}]} for layer in others),
        *({**layer, "transform": [{"filter": "!datum.other"}]} for layer in own),
    ]


def _line_layer(lines: Sequence[str], x: Spec, y: Spec, more: Spec) -> Spec:
    return {
        "mark": {"type": "line", "strokeWidth": 2, "aria": False},
        "encoding": {"x": x, "y": y, "color": by_line(lines, "color"), **more},
    }


def _point_layer(
    lines: Sequence[str], x: Spec, y: Spec, more: Spec, *, is_filled: bool = True
) -> Spec:
    return {
        "mark": {"type": "point", "filled": is_filled, "size": 50, "opacity": 1},
        "encoding": {
            "x": x,
            "y": y,
            "color": by_line(lines, "color"),
            "shape": by_line(lines, "shape"),
            "description": TIP,
            **more,
        },
    }


def _by_width(values: Sequence[Value], lines: Sequence[str]) -> tuple[Spec, Spec]:
    """Make encodings of the width of lines and the size of points, where lines hide each other."""
    drawn: dict[str, dict[float, float]] = {}
    for value in values:
        if not value.get("other") and value["y"] is not None:
            drawn.setdefault(value["line"], {})[value["x"]] = value["y"]
    used = [line for line in lines if line in drawn]
    hidden = [
        [above for above in used[place + 1 :] if _lie_on_each_other(drawn[line], drawn[above])]
        for place, line in enumerate(used)
    ]
    if not any(hidden):
        return {}, {}
    ranks = [-min(len(over) + 1, len(_WIDTHS)) for over in hidden]
    return tuple(  # type: ignore[return-value]
        {
            channel: {
                "field": "line",
                "type": "nominal",
                "scale": {"domain": used, "range": [sizes[rank] for rank in ranks]},
                "legend": None,
            }
        }
        for channel, sizes in (("strokeWidth", _WIDTHS), ("size", _SIZES))
    )


def _lie_on_each_other(below: Mapping[float, float], above: Mapping[float, float]) -> bool:
    shared = below.keys() & above.keys()
    return len(shared) > 0 and all(abs(below[x] - above[x]) <= _SAME * below[x] for x in shared)


def number_layer(values: Sequence[Value], x: Spec, y: Spec) -> list[Spec]:
    """Beside the last points of the highest and the lowest line, their `number`."""
    own = [value for value in values if not value.get("other")]
    last = [value for value in own if value["x"] == max(one["x"] for one in own)]
    if not last:
        return []
    ends = {value["y"]: value for value in sorted(last, key=lambda value: value["y"])}
    low, high = ends[min(ends)], ends[max(ends)]
    shown = [high] if high["y"] < _APART * low["y"] else [low, high]
    mark: Spec = {"type": "text", "align": "left", "dx": 8, "fontSize": 12, "fontWeight": 600}
    return [
        {
            "data": {"values": shown},
            "mark": {**mark, "baseline": "middle", "color": "var(--text)", "aria": False},
            "encoding": {"x": x, "y": y, "text": {"field": "number", "type": "nominal"}},
        }
    ]


def interval_layers(values: Sequence[Value], lines: Sequence[str], x: Spec, y: Spec) -> list[Spec]:
    """Bars from `low` to `high`, with an arrow where one is longer than can be drawn."""
    known = [_shorten(value) for value in values if "low" in value and not value.get("other")]
    if not known:
        return []
    color = by_line(lines, "color")
    rule: Spec = {
        "data": {"values": known},
        "mark": {"type": "rule", "strokeWidth": 1.5, "aria": False},
        "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": color},
    }
    arrows = (("low", "triangle-down"), ("high", "triangle-up"))
    return [rule] + [
        {
            "data": {"values": cut},
            "mark": {"type": "point", "filled": True, "shape": shape, "size": 40, "aria": False},
            "encoding": {"x": x, "y": {**y, "field": end}, "color": color},
        }
        for end, shape in arrows
        if (cut := [value for value in known if value[f"{end}_is_cut"]])
    ]


def _shorten(value: Value) -> Value:
    low = max(value["low"], value["y"] / _LONGEST_INTERVAL)
    high = min(value["high"], value["y"] * _LONGEST_INTERVAL)
    ends = {"low": low, "high": high}
    return value | ends | {f"{name}_is_cut": end != value[name] for name, end in ends.items()}


def reached(values: Sequence[Value]) -> list[float]:
    """List what the axis of y must hold: points, and intervals as far as they are drawn."""
    shown = [_shorten(value) if "low" in value else value for value in values]
    return [value[name] for value in shown for name in ("y", "low", "high") if name in value]


def power_axis(field: str, title: str, reached: Sequence[float], *, is_size: bool = False) -> Spec:
    """Make a logarithmic axis to the base of 2 that holds all of `reached`, all above 0.

    is_size: label it in bytes.
    """
    ticks = _powers_of_two(reached)
    domain = [min(reached) / 2**_MARGIN, max(reached) * 2**_MARGIN]
    axis: Spec = {"values": ticks, "format": "~s" if max(ticks) >= 10_000 else "~g"}
    if is_size:
        # Vega has no binary units: the labels come from us.
        names = ", ".join(f"'{tick:.0f}': '{formatting.size(tick)}'" for tick in ticks)
        axis = {"values": ticks, "labelExpr": f"{{{names}}}[datum.value]"}
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"type": "log", "base": 2, "domain": domain, "nice": False},
        "axis": axis,
    }


def decade_axis(field: str, title: str, reached: Sequence[float]) -> Spec:
    """Make a logarithmic axis to the base of 10."""
    domain = [min(reached) / 1.2, max(reached) * 1.2]
    first, last = (math.floor(math.log10(end)) for end in domain)
    decades = math.log10(domain[1] / domain[0])
    factors = range(1, 10) if decades < 0.7 else (1, 2, 5) if decades < 2 else (1,)
    step = max(1, math.ceil((last - first) / _MOST_TICKS))
    ticks = [f * 10.0**power for power in range(first, last + 1, step) for f in factors]
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"type": "log", "domain": domain, "nice": False},
        "axis": {"values": ticks, "format": "~s" if max(ticks) >= 100_000 else ",~g"},
    }


def linear_axis(field: str, title: str, **settings: Any) -> Spec:
    """From zero on."""
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"zero": True},
        **settings,
    }


def ideal_layer(ideal: Sequence[Mapping[str, float]], x: Spec, y: Spec) -> Spec:
    """Draw a dashed line."""
    return {
        "data": {"values": list(ideal)},
        "mark": {"type": "line", **_DASHED},
        "encoding": {"x": x, "y": y},
    }


def level_layer(level: float, channel: str, axis: Spec) -> Spec:
    """Draw a dashed line over the whole chart, at a level of the axis of `channel` ("x" or "y")."""
    return {
        "data": {"values": [{channel: level}]},
        "mark": {"type": "rule", **_DASHED},
        "encoding": {channel: {**axis, "field": channel}},
    }


def _powers_of_two(reached: Sequence[float]) -> list[float]:
    first, last = math.floor(math.log2(min(reached))), math.ceil(math.log2(max(reached)))
    step = max(1, math.ceil((last - first) / _MOST_TICKS))
    return [2.0**power for power in range(first, last + 1, step)]
