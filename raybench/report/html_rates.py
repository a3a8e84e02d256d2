"""Rates over the size of what is moved or multiplied: bandwidth over message size, log-log."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.analysis.scaling import setting_order
from raybench.report import wording
from raybench.report.html_figure import Figure, Panel, Value, legend
from raybench.report.html_lines import decade_axis, line_chart, power_axis
from raybench.report.html_series import (
    Row,
    arrange,
    drawn_of,
    in_order,
    label,
    table,
    varying_settings,
)
from raybench.report.summary import Summary

_SIZE = "size_bytes"
# The rate, its title, the heading and what is to be known.
_RATES = {
    "busbw_gb_s": (
        "Bandwidth and message size",
        "busbw, GB/s",
        "Bus bandwidth as nccl-tests counts it: comparable with the bandwidth of a link, whatever "
        "the operation and the ranks. Both axes are logarithmic.",
    ),
    "memory_gb_s": (
        "Memory bandwidth and size",
        "memory, GB/s",
        "Bytes read and written over the step time. Both axes are logarithmic.",
    ),
}
_COLUMNS = (
    ("step", wording.step_time),
    ("algbw GB/s", lambda row: wording.number(row["algbw_gb_s"])),
    ("busbw GB/s", lambda row: wording.number(row["busbw_gb_s"])),
    ("memory GB/s", lambda row: wording.number(row["memory_gb_s"])),
)


def rate_figures(rows: Sequence[Row], summary: Summary) -> list[Figure]:
    """A figure for each rate that is known at two sizes or more."""
    found = [_figure(rows, summary, name) for name in _RATES]
    return [figure for figure in found if figure is not None]


def _figure(rows: Sequence[Row], summary: Summary, name: str) -> Figure | None:
    known = [r for r in rows if wording.known(r[name]) and r[name] > 0 and _size(r) > 0]
    if len({_size(row) for row in known}) < 2:
        return None
    # Small messages are often replayed from a graph and large ones not: one line all the same.
    over = (_SIZE, "cuda_graph")
    numbers = [
        param
        for param in dict.fromkeys(param for row in known for param in row["params"])
        if all(setting_order(row["params"].get(param))[0] == 0 for row in known)
    ]
    names = [n for n in varying_settings(known) if n not in (*numbers, "world_size", "precision")]
    series = arrange(known, over=over, lines_by=names, ranks=summary.ranks)
    title, y_title, note = _RATES[name]
    drawn = [row for members in series.panels.values() for _, row in members]
    x = power_axis("x", "size", [_size(row) for row in drawn], is_size=True)
    y = decade_axis("y", y_title, [row[name] for row in drawn])
    told = varying_settings(known)
    panels = [
        Panel(
            title=head, spec=line_chart(_values(members, name, told, summary), series.lines, x, y)
        )
        for head, members in series.panels.items()
    ]
    columns, cells, texts = table(in_order(known, (_SIZE,)), summary.ranks, _COLUMNS)
    return Figure(
        anchor=name.split("_")[0],
        title=title,
        note=note + drawn_of(series),
        legend=legend(series.lines),
        panels=panels,
        columns=columns,
        rows=cells,
        texts=texts,
    )


def _size(row: Row) -> int:
    text = str(row["params"].get(_SIZE, ""))
    return int(text) if text.isdecimal() else 0


def _values(
    members: Sequence[tuple[str, Row]], name: str, told: Sequence[str], summary: Summary
) -> list[Value]:
    return [
        {
            "x": _size(row),
            "y": float(row[name]),
            "line": line,
            "tip": f"{label(row, told, summary.ranks)}\n{wording.number(row[name])} GB/s\n"
            f"{wording.step_time(row)}",
        }
        for line, row in members
    ]
