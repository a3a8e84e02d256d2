"""Figures with a horizontal bar for each point: step times, and TFLOP/s against the datasheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

from raybench.analysis.settings import varying
from raybench.report import formatting
from raybench.report.charts.figure import TIP, Entry, Figure, Panel, Spec, Value, specification
from raybench.report.charts.lines import level_layer
from raybench.report.charts.series import Row, in_order, is_other, named, telling_settings
from raybench.report.summary import Summary
from raybench.report.tables import STEP_MEANING

MOST_BARS = 72
_ROW_PX, _AXIS_PX = 19, 52
_BARS_OF_A_PANEL = 12
# What has room beside a bar.
_NAME_PX, _NAME_CHARS = 130, 20
# Read along the bars of one panel.
_OF_BARS = ("batch", "world_size", "size_bytes")

BAR_AXIS: Spec = {
    "field": "bar",
    "type": "nominal",
    "title": None,
    "axis": {"ticks": False, "domain": False, "labelPadding": 4, "labelLimit": _NAME_PX},
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
    if name is None:
        along = _readable(rows, along, ranks)
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


def _readable(rows: Sequence[Row], names: list[str], ranks: str) -> list[str]:
    """Take all of these settings, or of those that fit beside a bar what makes fewest panels."""

    def words(some: Sequence[str]) -> set[str]:
        return {formatting.settings_words(row, some, ranks) for row in rows}

    def panel_count(some: Sequence[str]) -> int:
        return len(words([one for one in names if one not in some]))

    smaller = [list(some) for size in (2, 1) for some in combinations(names, size)]
    able = [some for some in (names, *smaller) if max(map(len, words(some))) <= _NAME_CHARS]
    return min(able, key=panel_count) if able else names


def _names(rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    """Each one once: two bars of one name would lie on each other."""
    names: list[str] = []
    for row in rows:
        text = name(row) or str(row["point_id"])
        names.append(f"{text} ({row['point_id']})" if text in names else text)
    return names


def first_of(shown: int, known: int) -> str:
    """Say where not all is drawn."""
    return f" {shown} of {known} points are drawn; the table has all." if shown < known else ""


def times_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """None where no point has a step time."""
    known = [row for row in rows if formatting.has_value(row["step_ms_p50"]) and not is_other(row)]
    known = [row for row in known if row["status"] == "ok"]
    if not known:
        return None
    shown = in_order(known, ("batch", "world_size"))[:MOST_BARS]
    x: Spec = {"field": "x", "type": "quantitative", "title": "ms", "axis": {"tickCount": 5}}
    return Figure(
        anchor="times",
        title="Step time",
        note=STEP_MEANING + first_of(len(shown), len(known)),
        legend=[],
        panels=bar_panels(
            shown,
            summary.ranks,
            lambda row: [{"x": float(row["step_ms_p50"]), "tip": formatting.step_time(row)}],
            lambda y, _: [_bars(x, y)],
        ),
    )


_REACHED = "achieved_tflops_per_device"
# A number stands inside of a bar that is longer than this share of the chart, else beside it.
_LONG = 0.5
# As the formula of a product names them.
_SHAPE = ("m", "n", "k")
_PEAK = Entry(label="datasheet's dense peak", color="var(--axis)", shape="dash")


def products_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """None where a step finishes samples, or its operations are not known."""
    known = [row for row in rows if formatting.has_value(row[_REACHED]) and not is_other(row)]
    if not known or any(formatting.has_value(row["throughput"]) for row in rows):
        return None
    shown = in_order(known)[:MOST_BARS]
    has_peaks = any(peak_tflops(row) for row in known)
    shaped = all(name in row["params"] for row in known for name in _SHAPE)
    note = "TFLOP/s of one device" + ("; products are m × n × k." if shaped else ".")
    if not has_peaks:
        note += " The peak of this device is not known to raybench."
    return Figure(
        anchor="tflops",
        title="TFLOP/s against the datasheet" if has_peaks else "TFLOP/s",
        note=note + first_of(len(shown), len(known)),
        legend=[Entry(label="reached", color="var(--s1)"), *([_PEAK] if has_peaks else [])],
        panels=bar_panels(
            shown,
            summary.ranks,
            _product_values,
            _product_layers,
            of_bars=varying(known, ("precision",)),
            name=(lambda row: " × ".join(str(row["params"][one]) for one in _SHAPE))
            if shaped
            else None,
        ),
    )


def peak_tflops(row: Row) -> float | None:
    """Compute the datasheet's peak, from the share of it that was reached."""
    if not formatting.has_value(row["mfu_pct"]) or not row["mfu_pct"]:
        return None
    return float(row[_REACHED] / (row["mfu_pct"] / 100))


def _product_values(row: Row) -> list[Value]:
    reached, peak = float(row[_REACHED]), peak_tflops(row)
    share = f", {reached / peak:.1%} of the datasheet's {peak:,.1f}" if peak else ""
    text = f"{formatting.number(reached)} TFLOP/s{share}\n{formatting.step_time(row)}"
    short = formatting.number(reached) + (f" · {reached / peak:.0%}" if peak else "")
    return [{"x": reached, "peak": peak, "short": short, "tip": text}]


def _product_layers(y: Spec, marks: Sequence[Value]) -> list[Spec]:
    peaks = [mark["peak"] for mark in marks if mark["peak"]]
    highest = max([*peaks, *(mark["x"] for mark in marks)])
    x: Spec = {
        "field": "x",
        "type": "quantitative",
        "title": "TFLOP/s",
        "scale": {"domain": [0, highest * 1.02], "nice": False},
        "axis": {"tickCount": 4},
    }
    inside = f"datum.x > {_LONG * highest}"
    drawn: list[Spec] = [
        _bars(x, y),
        _number(x, y, inside, align="right", dx=-5, color="var(--page)"),
        _number(x, y, f"!({inside})", align="left", dx=5, color="var(--text)"),
    ]
    if peaks:
        drawn.append(level_layer(max(peaks), "x", x))
    return drawn


def _bars(x: Spec, y: Spec) -> Spec:
    return {
        "mark": {"type": "bar", "color": "var(--s1)"},
        "encoding": {"x": x, "y": y, "description": TIP},
    }


def _number(x: Spec, y: Spec, condition: str, **settings: object) -> Spec:
    return {
        "transform": [{"filter": condition}],
        "mark": {"type": "text", "fontSize": 12, "baseline": "middle", "aria": False, **settings},
        "encoding": {"x": x, "y": y, "text": {"field": "short", "type": "nominal"}},
    }
