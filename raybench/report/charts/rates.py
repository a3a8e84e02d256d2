"""Bandwidth and time of a step over the size of what is moved, log-log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raybench.analysis.settings import OPTIONAL, is_numeric, varying
from raybench.report import formatting
from raybench.report.charts.figure import Entry, Figure, Panel, Spec, Value, legend, specification
from raybench.report.charts.lines import OTHER, decade_axis, layers, level_layer, power_axis
from raybench.report.charts.series import (
    Row,
    arrange,
    drawing_note,
    in_order,
    is_other,
    lines_of,
    missing,
    named,
)
from raybench.report.insights import SIZE, datasheet_gb_s, size_of
from raybench.report.summary import Summary

# Small messages are often replayed from a graph and large ones not: one line all the same.
_OVER = (SIZE, *OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rate:
    """A bandwidth that is drawn. noun: of the titles."""

    column: str
    noun: str
    note: str


_RATES = (
    _Rate(
        column="busbw_gb_s",
        noun="bus bandwidth",
        note="Bus bandwidth as nccl-tests counts it: comparable with the bandwidth of a link, "
        "whatever the operation and the number of ranks. All axes are logarithmic.",
    ),
    _Rate(
        column="memory_gb_s",
        noun="memory bandwidth",
        note="Bytes read and written over the time of a step. All axes are logarithmic.",
    ),
)


def rate_figures(rows: Sequence[Row], summary: Summary) -> list[Figure]:
    """Draw a figure for each bandwidth that is known at two sizes or more."""
    found = [_figure(rows, summary, rate) for rate in _RATES]
    return [figure for figure in found if figure is not None]


def _figure(rows: Sequence[Row], summary: Summary, rate: _Rate) -> Figure | None:
    def is_known(row: Row) -> bool:
        return bool(
            formatting.has_value(row[rate.column]) and row[rate.column] > 0 and size_of(row) > 0
        )

    known = [row for row in rows if is_known(row)]
    if len({size_of(row) for row in known}) < 2:
        return None
    series = arrange(
        in_order(rows, _OVER), over=_OVER, lines_by=_names_of_lines(known), ranks=summary.ranks
    )
    lines = lines_of(series, is_known)
    peak = datasheet_gb_s(known) if rate.column == "memory_gb_s" else None
    panels = [
        panel
        for title, members in series.panels.items()
        for panel in _panels(title, members, lines, is_known, rate, peak, summary)
    ]
    above = sorted({size_of(row) for row in known if peak and row[rate.column] > peak})
    return Figure(
        anchor=rate.column.split("_")[0],
        title=f"{rate.noun.capitalize()} and time over the size",
        note=rate.note + _cache_note(above) + drawing_note(series),
        legend=[
            *legend(lines),
            *([_of_datasheet(peak)] if peak else []),
            *([OTHER] if any(map(is_other, known)) else []),
        ],
        panels=panels,
    )


def _of_datasheet(peak: float) -> Entry:
    return Entry(label=f"datasheet, {peak:,.0f} GB/s", color="var(--axis)", shape="dash")


def _cache_note(sizes: Sequence[int]) -> str:
    """Memory cannot be faster than itself."""
    if not sizes:
        return ""
    text = ", ".join(formatting.size(size) for size in sizes)
    return (
        f" What lies above the datasheet's line ({text}) cannot come from the memory: it is read "
        "from the device's cache, into which such arrays fit."
    )


def _names_of_lines(known: Sequence[Row]) -> list[str]:
    """Parameters that are no numbers tell the lines, as an operation."""
    params = dict.fromkeys(param for row in known for param in row["params"])
    numbers = {param for param in params if is_numeric(known, param)}
    rest = {*numbers, "world_size", "precision"}
    return varying(known, rest)


def _panels(
    title: str,
    members: Sequence[tuple[str, Row]],
    lines: Sequence[str],
    is_known: Callable[[Row], bool],
    rate: _Rate,
    peak: float | None,
    summary: Summary,
) -> list[Panel]:
    """Bandwidth and, beside it, time."""
    known = [(line, row) for line, row in members if is_known(row)]
    lacking = missing(members, is_known, (SIZE,), summary.ranks)
    names = varying([row for _, row in members])
    x = power_axis("x", "size", [size_of(row) for _, row in known], is_size=True)
    rates, times = (
        _values(known, value, names, summary.ranks)
        for value in (
            lambda row: float(row[rate.column]),
            lambda row: float(row["step_ms_p50"]) * 1000,
        )
    )
    level = [peak] if peak else []
    by_rate = decade_axis("y", "GB/s", [*(value["y"] for value in rates), *level])
    by_time = decade_axis("y", "µs", [value["y"] for value in times])
    ending = f", {title}" if title else ""
    drawn: list[Spec] = [level_layer(one, "y", by_rate) for one in level]
    return [
        Panel(
            title=f"{rate.noun.capitalize()}{ending}",
            spec=specification(rates, [*drawn, *layers(rates, lines, x, by_rate)]),
            missing=lacking,
        ),
        Panel(
            title=f"Time of a step{ending}",
            spec=specification(times, layers(times, lines, x, by_time)),
        ),
    ]


def _values(
    members: Sequence[tuple[str, Row]],
    value: Callable[[Row], float],
    names: Sequence[str],
    ranks: str,
) -> list[Value]:
    return [
        {
            "x": size_of(row),
            "y": value(row),
            "line": line,
            "other": is_other(row),
            "tip": f"{named(row, names, ranks)}\n{_rate_words(row)}\n{formatting.step_time(row)}",
        }
        for line, row in members
    ]


def _rate_words(row: Row) -> str:
    rates = (("busbw_gb_s", "busbw"), ("algbw_gb_s", "algbw"), ("memory_gb_s", "memory"))
    return ", ".join(
        f"{noun} {formatting.number(row[name])} GB/s"
        for name, noun in rates
        if formatting.has_value(row[name])
    )
