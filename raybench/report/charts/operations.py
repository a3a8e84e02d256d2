"""Operations per second of products, burst beside sustained, against the datasheet."""

from __future__ import annotations

import math

from raybench.analysis.settings import setting_order
from raybench.report import formatting
from raybench.report.charts.data import ChartData, Row, distinguishing_settings, point_name
from raybench.report.charts.grammar import MOST_BARS, Figure, Mark, axis, bar_panels
from raybench.report.charts.registry import Chart

_REACHED, _BURST = "achieved_tflops_per_device", "burst_tflops_per_device"
# As the formula of a product names its dimensions.
_SHAPE = ("m", "n", "k")
# A burst that is faster by less is no other figure.
_UNSURE = 1.01


def operations_figure(data: ChartData) -> Figure | None:
    """Draw TFLOP/s, the largest products first; None where a step finishes samples instead."""
    known = [row for row in data.measured if formatting.has_value(row[_REACHED])]
    if not known or any(formatting.has_value(row["throughput"]) for row in data.rows):
        return None
    is_product = all(name in row["params"] for row in known for name in _SHAPE)

    def size(row: Row) -> float:
        return math.prod(float(row["params"][name]) for name in _SHAPE) if is_product else 0.0

    known.sort(key=lambda row: (setting_order(row["precision"]), -size(row), -row[_REACHED]))
    names = distinguishing_settings(known)
    has_burst = any(
        formatting.has_value(row[_BURST]) and row[_BURST] > _UNSURE * row[_REACHED] for row in known
    )
    peaks = {row["precision"]: peak for row in known if (peak := peak_tflops(row))}
    panels = []
    for precision in dict.fromkeys(row["precision"] for row in known[:MOST_BARS]):
        rows = [row for row in known[:MOST_BARS] if row["precision"] == precision]
        rest = [name for name in names if name != "precision"]
        bars = [
            (
                str(precision) if len(peaks) > 1 or "precision" in names else "",
                " × ".join(str(row["params"][name]) for name in _SHAPE)
                if is_product
                else formatting.settings_words(row, rest, data.ranks) or str(row["workload"]),
                _marks(row, names, data, has_burst=has_burst),
            )
            for row in rows
        ]
        peak = peaks.get(precision)
        panels += bar_panels(
            bars,
            axis("TFLOP/s"),
            series=("sustained", "first 30 ms") if has_burst else (),
            colors=("var(--s1)", "var(--s6)"),
            level=(peak, f"datasheet {peak:,.0f}") if peak else None,
        )
    note = "TFLOP/s of one device" + ("; products are m × n × k." if is_product else ".")
    if not peaks:
        note += " The peak of this device is not known to raybench."
    if len(known) > MOST_BARS:
        note += f" {MOST_BARS} of {len(known)} points are drawn; the table has all."
    title = "TFLOP/s against the datasheet" if peaks else "TFLOP/s"
    return Figure(anchor="tflops", title=title, note=note, panels=panels)


CHARTS = (Chart(draw=operations_figure, place=45, answers=50),)


def peak_tflops(row: Row) -> float | None:
    """Return the datasheet's peak, from the share of it that was reached; None where unknown."""
    if not formatting.has_value(row["mfu_pct"]) or not row["mfu_pct"]:
        return None
    return float(row[_REACHED] / (row["mfu_pct"] / 100))


def _marks(row: Row, names: list[str], data: ChartData, *, has_burst: bool) -> list[Mark]:
    reached, peak = float(row[_REACHED]), peak_tflops(row)
    share = f", {reached / peak:.1%} of the datasheet's {peak:,.1f}" if peak else ""
    tip = f"{point_name(row, names, data.ranks)}\n{formatting.number(reached)} TFLOP/s{share}"
    text = formatting.number(reached) + (f" · {reached / peak:.0%}" if peak else "")
    tip += f"\n{formatting.step_time(row)}"
    marks: list[Mark] = [{"x": reached, "line": "sustained", "text": text, "tip": tip}]
    if has_burst and formatting.has_value(row[_BURST]):
        burst = float(row[_BURST])
        words = f"{formatting.number(burst)} TFLOP/s in its first 30 ms"
        tip = f"{point_name(row, names, data.ranks)}\n{words}"
        text = formatting.number(burst)
        marks.append({"x": burst, "line": "first 30 ms", "text": text, "tip": tip})
    return marks
