"""TFLOP/s of steps that finish no samples, as matrix products, against the datasheet's peak."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.analysis.settings import varying
from raybench.report import formatting
from raybench.report.charts.bars import MOST_BARS, bar_panels, first_of
from raybench.report.charts.figure import TOLD, Entry, Figure, Spec, Value
from raybench.report.charts.lines import level_layer
from raybench.report.charts.series import Row, in_order, is_other
from raybench.report.summary import Summary

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
            _values,
            _layers,
            of_bars=varying(known, ("precision",)),
            name=_shape if shaped else None,
        ),
    )


def peak_tflops(row: Row) -> float | None:
    """Compute the datasheet's peak, from the share of it that was reached."""
    if not formatting.has_value(row["mfu_pct"]) or not row["mfu_pct"]:
        return None
    return float(row[_REACHED] / (row["mfu_pct"] / 100))


def _shape(row: Row) -> str:
    return " × ".join(str(row["params"][name]) for name in _SHAPE)


def _values(row: Row) -> list[Value]:
    reached, peak = float(row[_REACHED]), peak_tflops(row)
    share = f", {reached / peak:.1%} of the datasheet's {peak:,.1f}" if peak else ""
    told = f"{formatting.number(reached)} TFLOP/s{share}\n{formatting.step_time(row)}"
    short = formatting.number(reached) + (f" · {reached / peak:.0%}" if peak else "")
    return [{"x": reached, "peak": peak, "short": short, "tip": told}]


def _layers(y: Spec, marks: Sequence[Value]) -> list[Spec]:
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
        {
            "mark": {"type": "bar", "color": "var(--s1)"},
            "encoding": {"x": x, "y": y, "description": TOLD},
        },
        _number(x, y, inside, align="right", dx=-5, color="var(--page)"),
        _number(x, y, f"!({inside})", align="left", dx=5, color="var(--text)"),
    ]
    if peaks:
        drawn.append(level_layer(max(peaks), "x", x))
    return drawn


def _number(x: Spec, y: Spec, condition: str, **settings: object) -> Spec:
    return {
        "transform": [{"filter": condition}],
        "mark": {"type": "text", "fontSize": 12, "baseline": "middle", "aria": False, **settings},
        "encoding": {"x": x, "y": y, "text": {"field": "short", "type": "nominal"}},
    }
