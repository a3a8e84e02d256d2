"""Charts of lines with points, as Vega-Lite specifications."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raybench.report import wording
from raybench.report.html_figure import TOLD, Spec, Value, by_line, specification

# The share of a doubling by which axes of powers of two reach beyond the outermost points.
_MARGIN = 0.2
# A label for each power of two is too many beyond so many.
_MOST_TICKS = 7


def line_chart(values: Sequence[Value], lines: Sequence[str], x: Spec, y: Spec) -> Spec:
    """values: x, y, line, tip; with `low` and `high` where the interval of y is known."""
    return specification(values, [*interval_layer(values, lines, x, y), *layers(lines, x, y)])


def layers(lines: Sequence[str], x: Spec, y: Spec) -> list[Spec]:
    """Lines, and on them the points that can be pointed at."""
    color = by_line(lines, "color")
    return [
        {
            "mark": {"type": "line", "strokeWidth": 2, "aria": False},
            "encoding": {"x": x, "y": y, "color": color},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 50, "opacity": 1},
            "encoding": {
                "x": x,
                "y": y,
                "color": color,
                "shape": by_line(lines, "shape"),
                "description": TOLD,
            },
        },
    ]


def interval_layer(values: Sequence[Value], lines: Sequence[str], x: Spec, y: Spec) -> list[Spec]:
    """Bars from `low` to `high`."""
    known = [value for value in values if "low" in value]
    if not known:
        return []
    return [
        {
            "data": {"values": known},
            "mark": {"type": "rule", "strokeWidth": 1.5, "aria": False},
            "encoding": {
                "x": x,
                "y": {**y, "field": "low"},
                "y2": {"field": "high"},
                "color": by_line(lines, "color"),
            },
        }
    ]


def power_axis(field: str, title: str, reached: Sequence[float], *, is_size: bool = False) -> Spec:
    """A logarithmic axis to the base of 2 that holds all of `reached`, all above 0.

    is_size: label it in bytes.
    """
    ticks = _powers_of_two(reached)
    domain = [min(reached) / 2**_MARGIN, max(reached) * 2**_MARGIN]
    axis: Spec = {"values": ticks, "format": "~s" if max(ticks) >= 10_000 else "~g"}
    if is_size:
        # Vega has no binary units: the labels come from us.
        names = ", ".join(f"'{tick:.0f}': '{wording.size(tick)}'" for tick in ticks)
        axis = {"values": ticks, "labelExpr": f"{{{names}}}[datum.value]"}
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"type": "log", "base": 2, "domain": domain, "nice": False},
        "axis": axis,
    }


def decade_axis(field: str, title: str, reached: Sequence[float]) -> Spec:
    """A logarithmic axis to the base of 10."""
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
        "axis": {"values": ticks, "format": "~s" if max(ticks) >= 10_000 else "~g"},
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
    """A dashed line."""
    return {
        "data": {"values": list(ideal)},
        "mark": {
            "type": "line",
            "color": "var(--axis)",
            "strokeDash": [5, 4],
            "strokeWidth": 1.5,
            "aria": False,
        },
        "encoding": {"x": x, "y": y},
    }


def _powers_of_two(reached: Sequence[float]) -> list[float]:
    first, last = math.floor(math.log2(min(reached))), math.ceil(math.log2(max(reached)))
    step = max(1, math.ceil((last - first) / _MOST_TICKS))
    return [2.0**power for power in range(first, last + 1, step)]
