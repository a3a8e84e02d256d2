"""Bandwidth and time over the size of messages or arrays, and bars of the outermost messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raybench.analysis.settings import OPTIONAL, is_numeric, varying
from raybench.hardware.peaks import memory_peak_gb_s
from raybench.report import formatting
from raybench.report.answers import SIZE, size_of
from raybench.report.charts.data import ChartData, LineFigure, Row, point_name
from raybench.report.charts.grammar import SIZE_LABELS, Figure, Panel, Spec, axis, bar_panels
from raybench.report.charts.registry import Chart

# Small messages are often replayed from a graph and large ones not: one line all the same.
_OVER = (SIZE, *OPTIONAL)


def messages_figure(data: ChartData) -> Figure | None:
    """Draw bars of the largest and of the smallest message; None where no messages are sent."""
    known = [row for row in data.measured if row.busbw_gb_s and size_of(row)]
    sizes = sorted({size_of(row) for row in known})
    if len(sizes) < 2:
        return None

    def panel(what: str, unit: str, size: int, value: Callable[[Row], float]) -> list[Panel]:
        rows = [row for row in known if size_of(row) == size]
        rows.sort(key=value, reverse=unit == "GB/s")
        names = varying(rows, _OVER)
        bars = []
        for row in rows:
            tip = f"{point_name(row, [*names, SIZE], data.ranks)}\n{_words(row)}"
            mark = {"x": value(row), "text": formatting.number(value(row)), "tip": tip}
            name = formatting.settings_words(row, names, data.ranks) or row.workload
            bars.append((f"{what} with {formatting.size(size)}", name, [mark]))
        return bar_panels(bars, axis(unit))

    return Figure(
        anchor="messages",
        title="The largest and the smallest messages",
        note="Bus bandwidth as nccl-tests counts it: comparable with the bandwidth of a link, "
        "whatever the operation and the number of ranks.",
        panels=[
            *panel("Bus bandwidth", "GB/s", sizes[-1], lambda row: row.busbw_gb_s or 0.0),
            *panel("Time", "µs", sizes[0], _time_us),
        ],
    )


def bus_bandwidth_figure(data: ChartData) -> Figure | None:
    """Draw the bus bandwidth over the size of the message; None where there is none."""
    return _over_size(
        data,
        lambda row: row.busbw_gb_s,
        anchor="busbw",
        title="Bus bandwidth over the size",
        note="Bus bandwidth as nccl-tests counts it. Both axes are logarithmic.",
        y=axis("GB/s", 10, format="~s"),
    )


def memory_bandwidth_figure(data: ChartData) -> Figure | None:
    """Draw the memory bandwidth over the size of the arrays; None where there is none."""
    known = [row for row in data.measured if row.memory_gb_s]
    peak = datasheet_gb_s(known) if known else None
    above = sorted({size_of(row) for row in known if peak and (row.memory_gb_s or 0) > peak})
    note = "Bytes read and written over the time of a step. Both axes are logarithmic."
    if above:
        # Memory cannot be faster than itself.
        note += (
            f" What lies above the datasheet's line ({', '.join(map(formatting.size, above))}) "
            "cannot come from the memory: it is read from the device's cache, into which such "
            "arrays fit."
        )
    return _over_size(
        data,
        lambda row: row.memory_gb_s,
        anchor="memory-bandwidth",
        title="Memory bandwidth over the size",
        note=note,
        y=axis("GB/s", 10, format="~s"),
        level=(peak, f"datasheet, {peak:,.0f} GB/s") if peak else None,
    )


def time_figure(data: ChartData) -> Figure | None:
    """Draw the time of a step over the size; None where no bandwidth is known."""
    return _over_size(
        data,
        lambda row: _time_us(row) if row.busbw_gb_s or row.memory_gb_s else None,
        anchor="time",
        title="Time of a step over the size",
        note="Both axes are logarithmic.",
        y=axis("µs", 10, format="~s"),
    )


CHARTS = (
    Chart(draw=messages_figure, place=10, answers=20),
    Chart(draw=bus_bandwidth_figure, place=11),
    Chart(draw=memory_bandwidth_figure, place=12, answers=21),
    Chart(draw=time_figure, place=13),
)


def _over_size(
    data: ChartData,
    value: Callable[[Row], float | None],
    *,
    anchor: str,
    title: str,
    note: str,
    y: Spec,
    level: tuple[float, str] | None = None,
) -> Figure | None:
    known = [row for row in data.measured if value(row) and size_of(row)]
    # Parameters that are no numbers, as an operation, tell the lines apart.
    numbers = {name for row in known for name in row.params if is_numeric(known, name)}
    return LineFigure(
        anchor=anchor,
        title=title,
        note=note,
        over=_OVER,
        lines_by=varying(known, {*numbers, "world_size", "precision"}),
        x=axis("size", 2, labelExpr=SIZE_LABELS),
        y=y,
        level=level,
        along=size_of,
        value=lambda row: value(row) or None if size_of(row) else None,
        tip=lambda row: f"{_words(row)}\n{formatting.step_time(row)}",
    ).draw(data)


def _time_us(row: Row) -> float:
    return (row.step_ms_p50 or 0.0) * 1000


def _words(row: Row) -> str:
    rates = {"busbw": row.busbw_gb_s, "algbw": row.algbw_gb_s, "memory": row.memory_gb_s}
    return ", ".join(f"{name} {formatting.number(one)} GB/s" for name, one in rates.items() if one)


def datasheet_gb_s(rows: Sequence[Row]) -> float | None:
    """Return the datasheet's memory bandwidth of the device that all points ran on, in GB/s.

    None where they ran on several, or on one that is not known.
    """
    peaks = {memory_peak_gb_s(str(row.device_name)) for row in rows}
    return peaks.pop() if len(peaks) == 1 else None
