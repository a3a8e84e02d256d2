"""Bandwidth and time over the size of messages or arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raybench.analysis.rows import OPTIONAL, ScaledRow, is_numeric, varying
from raybench.hardware.peaks import memory_peak_gb_s
from raybench.report import formatting
from raybench.report.answers import SIZE, size_of
from raybench.report.charts.chart import Chart, ChartData, line_figure
from raybench.report.charts.grammar import SIZE_LABELS, Figure, axis

# Small messages are often replayed from a graph and large ones not: one line all the same.
_OVER = (SIZE, *OPTIONAL)


def bus_bandwidth_figure(data: ChartData) -> Figure | None:
    """Return the figure of bus bandwidth over the size of the message.

    None where no line has two sizes with one.
    """
    return _over_size(
        data,
        lambda row: row.busbw_gb_s,
        anchor="busbw",
        title="Bus bandwidth over the size",
        note="Bus bandwidth as nccl-tests counts it: comparable with the bandwidth of a link, "
        "whatever the operation and the number of ranks. Both axes are logarithmic.",
        y=axis("GB/s", 10, format="~s"),
    )


def memory_bandwidth_figure(data: ChartData) -> Figure | None:
    """Return the figure of memory bandwidth over the size of arrays.

    None where no line has two sizes with one.
    """
    known = [row for row in data.measured if row.memory_gb_s]
    peaks = {memory_peak_gb_s(str(row.device_name)) for row in known}
    peak = peaks.pop() if len(peaks) == 1 else None
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
    """Return the figure of step times over the size of messages or arrays, in µs.

    None where no line has two sizes with a bandwidth.
    """
    return _over_size(
        data,
        lambda row: (row.step_ms_p50 or 0.0) * 1000 if row.busbw_gb_s or row.memory_gb_s else None,
        anchor="time",
        title="Time of a step over the size",
        note="Both axes are logarithmic.",
        y=axis("µs", 10, format="~s"),
    )


CHARTS = (
    Chart(draw=bus_bandwidth_figure, place=11, answers=20),
    Chart(draw=memory_bandwidth_figure, place=12, answers=21),
    Chart(draw=time_figure, place=13),
)


def _over_size(
    data: ChartData, value: Callable[[ScaledRow], float | None], **rest: Any
) -> Figure | None:
    """Return a `line_figure` of a value over the size; None without two points on a line.

    Each operation and precision is a line. rest: further arguments of `line_figure`.
    """
    known = [row for row in data.measured if value(row) and size_of(row)]
    # Parameters that are no numbers, as an operation, tell the lines apart.
    numbers = {name for row in known for name in row.params if is_numeric(known, name)}

    def tip(row: ScaledRow) -> str:
        """Return the bandwidths of a point that are known, and its step time."""
        rates = {"busbw": row.busbw_gb_s, "algbw": row.algbw_gb_s, "memory": row.memory_gb_s}
        words = [f"{name} {formatting.number(one)} GB/s" for name, one in rates.items() if one]
        return f"{', '.join(words)}\n{formatting.step_time(row)}"

    return line_figure(
        data,
        data.rows,
        lambda row: value(row) or None if size_of(row) else None,
        over=_OVER,
        lines_by=varying(known, {*numbers, "world_size", "precision"}),
        x=axis("size", 2, labelExpr=SIZE_LABELS),
        along=size_of,
        tip=tip,
        **rest,
    )
