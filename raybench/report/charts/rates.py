"""Bandwidth and time over the size of messages or arrays, and bars of the outermost messages."""

from __future__ import annotations

from collections.abc import Callable

from raybench.analysis.settings import OPTIONAL, is_numeric, varying
from raybench.report import formatting
from raybench.report.charts.data import ChartData, Row, lines_over, point_name
from raybench.report.charts.grammar import (
    SIZE_LABELS,
    Figure,
    Panel,
    Spec,
    axis,
    bar_panels,
)
from raybench.report.charts.registry import Chart
from raybench.report.headline import SIZE, datasheet_gb_s, size_of

# Small messages are often replayed from a graph and large ones not: one line all the same.
_OVER = (SIZE, *OPTIONAL)
_BUS, _MEMORY = "busbw_gb_s", "memory_gb_s"


def messages_figure(data: ChartData) -> Figure | None:
    """Draw bars of the largest and of the smallest message; None where no messages are sent."""
    known = [row for row in data.measured if _rate(row, _BUS) is not None]
    if len({size_of(row) for row in known}) < 2:
        return None
    panels: list[Panel] = []
    kinds: tuple[tuple[Callable[..., int], str, str, Callable[[Row], float]], ...] = (
        (max, "Bus bandwidth", "GB/s", lambda row: float(row[_BUS])),
        (min, "Time", "µs", lambda row: float(row["step_ms_p50"]) * 1000),
    )
    for choose, what, unit, value in kinds:
        size = choose(map(size_of, known))
        rows = [row for row in known if size_of(row) == size]
        rows.sort(key=value, reverse=choose is max)
        names = varying(rows, _OVER)
        title = f"{what} with {formatting.size(size)}"
        bars = [
            (
                title,
                formatting.settings_words(row, names, data.ranks) or str(row["workload"]),
                [
                    {
                        "x": value(row),
                        "text": formatting.number(value(row)),
                        "tip": f"{point_name(row, [*names, SIZE], data.ranks)}\n{_words(row)}",
                    }
                ],
            )
            for row in rows
        ]
        panels += bar_panels(bars, axis(unit))
    return Figure(
        anchor="messages",
        title="The largest and the smallest messages",
        note="Bus bandwidth as nccl-tests counts it: comparable with the bandwidth of a link, "
        "whatever the operation and the number of ranks.",
        panels=panels,
    )


def bus_bandwidth_figure(data: ChartData) -> Figure | None:
    """Draw the bus bandwidth over the size of the message; None where there is none."""
    return _over_size(
        data,
        lambda row: _rate(row, _BUS),
        anchor="busbw",
        title="Bus bandwidth over the size",
        note="Bus bandwidth as nccl-tests counts it. Both axes are logarithmic.",
        y=axis("GB/s", 10, format="~s"),
    )


def memory_bandwidth_figure(data: ChartData) -> Figure | None:
    """Draw the memory bandwidth over the size of the arrays; None where there is none."""
    known = [row for row in data.measured if _rate(row, _MEMORY) is not None]
    peak = datasheet_gb_s(known) if known else None
    above = sorted({size_of(row) for row in known if peak and row[_MEMORY] > peak})
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
        lambda row: _rate(row, _MEMORY),
        anchor="memory-bandwidth",
        title="Memory bandwidth over the size",
        note=note,
        y=axis("GB/s", 10, format="~s"),
        level=(peak, f"datasheet, {peak:,.0f} GB/s") if peak else None,
    )


def time_figure(data: ChartData) -> Figure | None:
    """Draw the time of a step over the size; None where nothing is known of what it moves."""
    return _over_size(
        data,
        lambda row: (
            float(row["step_ms_p50"]) * 1000 if _rate(row, _BUS) or _rate(row, _MEMORY) else None
        ),
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


def _rate(row: Row, column: str) -> float | None:
    known = formatting.has_value(row[column]) and row[column] > 0 and size_of(row) > 0
    return float(row[column]) if known else None


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
    known = [row for row in data.measured if value(row) is not None]
    if len({size_of(row) for row in known}) < 2:
        return None
    # Parameters that are no numbers, as an operation, tell the lines apart.
    params = dict.fromkeys(param for row in known for param in row["params"])
    numbers = {param for param in params if is_numeric(known, param)}
    return lines_over(
        data,
        anchor=anchor,
        title=title,
        note=note,
        over=_OVER,
        lines_by=varying(known, {*numbers, "world_size", "precision"}),
        x=axis("size", 2, labelExpr=SIZE_LABELS),
        y=y,
        along=size_of,
        value=value,
        tip=lambda row: f"{_words(row)}\n{formatting.step_time(row)}",
        level=level,
    )


def _words(row: Row) -> str:
    rates = ((_BUS, "busbw"), ("algbw_gb_s", "algbw"), (_MEMORY, "memory"))
    return ", ".join(
        f"{noun} {formatting.number(row[name])} GB/s"
        for name, noun in rates
        if formatting.has_value(row[name])
    )
