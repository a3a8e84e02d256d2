"""Operations per second of products, burst beside sustained, against the datasheet."""

from __future__ import annotations

import math

from raybench.analysis.settings import setting_order
from raybench.report import formatting
from raybench.report.charts.data import ChartData, Row, point_name
from raybench.report.charts.grammar import MOST_BARS, Figure, Mark, Panel, axis, bar_panels
from raybench.report.charts.registry import Chart
from raybench.report.point_settings import distinguishing_settings

# As the formula of a product names its dimensions.
_SHAPE = ("m", "n", "k")
# A burst that is faster by less is no other figure.
_UNSURE = 1.01
_SUSTAINED, _BURST = "sustained", "first 30 ms"


def operations_figure(data: ChartData) -> Figure | None:
    """Draw TFLOP/s, the largest products first; None where a step finishes samples instead."""
    known = [row for row in data.measured if row.achieved_tflops_per_device]
    if not known or any(row.throughput is not None for row in data.rows):
        return None
    is_product = all(name in row.params for row in known for name in _SHAPE)

    def size(row: Row) -> float:
        return math.prod(float(row.params[name]) for name in _SHAPE) if is_product else 0.0

    known.sort(key=lambda row: (-size(row), -_reached(row)))
    names, shown = distinguishing_settings(known), known[:MOST_BARS]
    rest = [name for name in names if name != "precision"]
    has_burst = any((row.burst_tflops_per_device or 0) > _UNSURE * _reached(row) for row in shown)
    peaks = {row.precision: peak for row in shown if (peak := peak_tflops(row))}
    panels: list[Panel] = []
    for precision in sorted({row.precision for row in shown}, key=setting_order):
        bars = []
        for row in (row for row in shown if row.precision == precision):
            name = formatting.settings_words(row, rest, data.ranks) or row.workload
            if is_product:
                name = " × ".join(str(row.params[one]) for one in _SHAPE)
            marks = _marks(row, point_name(row, names, data.ranks), has_burst=has_burst)
            bars.append((precision if "precision" in names else "", name, marks))
        peak = peaks.get(precision)
        panels += bar_panels(
            bars,
            axis("TFLOP/s"),
            series=(_SUSTAINED, _BURST) if has_burst else (),
            colors=("var(--s1)", "var(--s6)"),
            level=(peak, f"datasheet {peak:,.0f}") if peak else None,
        )
    note = "TFLOP/s of one device" + ("; products are m × n × k." if is_product else ".")
    if not peaks:
        note += " The peak of this device is not known to raybench."
    if len(shown) < len(known):
        note += f" {len(shown)} of {len(known)} points are drawn; the table has all."
    title = "TFLOP/s against the datasheet" if peaks else "TFLOP/s"
    return Figure(anchor="tflops", title=title, note=note, panels=panels)


CHARTS = (Chart(draw=operations_figure, place=45, answers=50),)


def peak_tflops(row: Row) -> float | None:
    """Return the datasheet's peak, from the share of it that was reached; None where unknown."""
    return _reached(row) / (row.mfu_pct / 100) if row.mfu_pct else None


def _reached(row: Row) -> float:
    return row.achieved_tflops_per_device or 0.0


def _marks(row: Row, name: str, *, has_burst: bool) -> list[Mark]:
    reached, peak, burst = _reached(row), peak_tflops(row), row.burst_tflops_per_device
    share = f", {reached / peak:.1%} of the datasheet's {peak:,.1f}" if peak else ""
    tip = f"{name}\n{formatting.number(reached)} TFLOP/s{share}\n{formatting.step_time(row)}"
    text = formatting.number(reached) + (f" · {reached / peak:.0%}" if peak else "")
    marks: list[Mark] = [{"x": reached, "line": _SUSTAINED, "text": text, "tip": tip}]
    if has_burst and burst:
        text = formatting.number(burst)
        tip = f"{name}\n{text} TFLOP/s in its first 30 ms"
        marks.append({"x": burst, "line": _BURST, "text": text, "tip": tip})
    return marks
