"""Operations per second of products, burst beside sustained, against the datasheet."""

from __future__ import annotations

import math

from raybench.analysis.rows import ScaledRow, setting_order
from raybench.report import formatting
from raybench.report.charts.chart import Chart, ChartData, drawn_of, point_name
from raybench.report.charts.grammar import MOST_BARS, Figure, Mark, Panel, axis, bar_panels
from raybench.report.point_settings import distinguishing_settings

# As the formula of a product names its dimensions.
_SHAPE = ("m", "n", "k")
_SUSTAINED, _BURST = "sustained", "first 30 ms"
# A burst that is faster by less is no other figure.
_UNSURE = 1.01


def operations_figure(data: ChartData) -> Figure | None:
    """Return bars of TFLOP/s, the largest products first, with a panel for each precision.

    None where no point has TFLOP/s, and where any point finishes samples.
    """
    known = [row for row in data.measured if row.achieved_tflops_per_device]
    if not known or any(row.throughput is not None for row in data.rows):
        return None
    is_product = all(name in row.params for row in known for name in _SHAPE)

    def size(row: ScaledRow) -> float:
        return math.prod(float(row.params[name]) for name in _SHAPE) if is_product else 0.0

    known.sort(key=lambda row: (-size(row), -(row.achieved_tflops_per_device or 0.0)))
    names, shown = distinguishing_settings(known), known[:MOST_BARS]
    rest = [name for name in names if name != "precision"]
    has_burst = any(
        (row.burst_tflops_per_device or 0.0) > _UNSURE * (row.achieved_tflops_per_device or 0.0)
        for row in shown
    )
    panels: list[Panel] = []
    for precision in sorted({row.precision for row in shown}, key=setting_order):
        bars, peak = [], None
        for row in (row for row in shown if row.precision == precision):
            name = formatting.settings_words(row, rest, data.ranks) or row.workload
            if is_product:
                name = " × ".join(str(row.params[one]) for one in _SHAPE)
            marks = _marks(row, point_name(row, names, data.ranks))[: 1 + has_burst]
            bars.append((precision if "precision" in names else "", name, marks))
            peak = _peak_tflops(row) or peak
        panels += bar_panels(
            bars,
            axis("TFLOP/s"),
            series=(_SUSTAINED, _BURST) if has_burst else (),
            colors=("var(--s1)", "var(--s6)"),
            level=(peak, f"datasheet {peak:,.0f}") if peak else None,
        )
    note = "TFLOP/s of one device" + ("; products are m × n × k." if is_product else ".")
    has_peak = any(row.mfu_pct for row in shown)
    if not has_peak:
        note += " The peak of this device is not known to raybench."
    note += drawn_of(len(shown), len(known))
    title = "TFLOP/s against the datasheet" if has_peak else "TFLOP/s"
    return Figure(anchor="tflops", title=title, note=note, panels=panels)


CHARTS = (Chart(draw=operations_figure, place=45, answers=50),)


def _peak_tflops(row: ScaledRow) -> float | None:
    """Return the datasheet's peak in TFLOP/s, from the share that was reached; None if unknown."""
    reached = row.achieved_tflops_per_device or 0.0
    return reached / (row.mfu_pct / 100) if row.mfu_pct else None


def _marks(row: ScaledRow, name: str) -> list[Mark]:
    """Return the bar of the whole measurement, then that of its first 30 ms where that is known.

    name: the first lines of their tips.
    """
    reached, burst = row.achieved_tflops_per_device or 0.0, row.burst_tflops_per_device
    peak, text = _peak_tflops(row), formatting.number(reached)
    tip = f"{name}\n{text} TFLOP/s"
    if peak:
        tip += f", {reached / peak:.1%} of the datasheet's {peak:,.1f}"
        text += f" · {reached / peak:.0%}"
    tip += f"\n{formatting.step_time(row)}"
    marks: list[Mark] = [{"x": reached, "line": _SUSTAINED, "text": text, "tip": tip}]
    if burst:
        text = formatting.number(burst)
        tip = f"{name}\n{text} TFLOP/s in its first 30 ms"
        marks.append({"x": burst, "line": _BURST, "text": text, "tip": tip})
    return marks
