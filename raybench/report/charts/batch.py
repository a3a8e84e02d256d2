"""Throughput and memory over the batch size, with marks where memory ran out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pandas as pd

from raybench.analysis.settings import varying
from raybench.report import formatting
from raybench.report.charts.figure import (
    TIP,
    Entry,
    Figure,
    Panel,
    Spec,
    Value,
    by_line,
    legend,
    specification,
)
from raybench.report.charts.lines import OTHER, layers, level_layer, linear_axis, power_axis
from raybench.report.charts.series import (
    Row,
    arrange,
    batch_title,
    drawing_note,
    in_order,
    is_other,
    lines_of,
    missing,
    named,
)
from raybench.report.summary import Summary

_GIB = 2**30
_OOM = Entry(label="out of memory", color="var(--axis)", shape="cross-out")
# An axis beyond twice what is drawn would say more of the device than of the run.
_FAR = 2.5


def throughput_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """None where there are fewer than two batch sizes with a throughput."""
    return _figure(
        rows,
        summary,
        anchor="throughput",
        title="Throughput over the batch size",
        note=f"Samples per second of all {summary.ranks} together.",
        value=lambda row: row["throughput"],
        y_title="samples/s",
        capacity=None,
    )


def memory_figure(rows: Sequence[Row], summary: Summary, devices: pd.DataFrame) -> Figure | None:
    """None where there are fewer than two batch sizes with a known peak, as on CPU workers."""
    known = list(devices["memory_bytes"].dropna()) if "memory_bytes" in devices else []
    return _figure(
        rows,
        summary,
        anchor="memory",
        title="Memory over the batch size",
        note="Peak of the memory that is allocated on the device that needs most. A line that lies "
        "under another is drawn wider.",
        value=lambda row: (row["peak_mem_allocated_bytes"] or math.nan) / _GIB,
        y_title="GiB",
        capacity=float(min(known)) / _GIB if known else None,
    )


def _figure(
    rows: Sequence[Row],
    summary: Summary,
    *,
    anchor: str,
    title: str,
    note: str,
    value: Callable[[Row], float],
    y_title: str,
    capacity: float | None,
) -> Figure | None:
    def is_known(row: Row) -> bool:
        return row["status"] == "ok" and formatting.has_value(value(row))

    def is_drawn(row: Row) -> bool:
        return is_known(row) or row["status"] == "oom"

    sized = [row for row in rows if formatting.has_value(row["batch"])]
    ok = [row for row in sized if is_known(row)]
    if len({row["batch"] for row in ok}) < 2:
        return None
    series = arrange(
        in_order(sized, ("batch",)), over=("batch",), lines_by=("world_size",), ranks=summary.ranks
    )
    drawn = [row for members in series.panels.values() for _, row in members]
    shown = list(filter(is_drawn, drawn))
    # What a search tried lies close together, and memory grows in proportion.
    x = (
        linear_axis("x", batch_title(sized), axis={"tickCount": 6})
        if summary.largest_batches
        else power_axis("x", batch_title(sized), [row["batch"] for row in shown])
    )
    lines = lines_of(series, is_drawn)
    names = varying(sized)
    ran_out = any(row["status"] == "oom" for row in drawn)
    highest = max(value(row) for row in drawn if is_known(row))
    line = capacity if capacity and (ran_out or capacity < _FAR * highest) else None
    panels = [
        Panel(
            title=head,
            spec=_spec(_values(members, value, names, summary.ranks), lines, x, y_title, line),
            missing=missing(members, is_drawn, ("batch",), summary.ranks),
        )
        for head, members in series.panels.items()
    ]
    return Figure(
        anchor=anchor,
        title=title,
        note=note + drawing_note(series),
        legend=[*legend(lines), *_marks(drawn, line, ran_out)],
        panels=panels,
    )


def _marks(drawn: Sequence[Row], capacity: float | None, ran_out: bool) -> list[Entry]:
    all_of_it = Entry(
        label=f"memory of a device, {capacity or 0:.1f} GiB", color="var(--axis)", shape="dash"
    )
    return [
        *([_OOM] if ran_out else []),
        *([all_of_it] if capacity is not None else []),
        *([OTHER] if any(map(is_other, drawn)) else []),
    ]


def _values(
    members: Sequence[tuple[str, Row]],
    value: Callable[[Row], float],
    names: Sequence[str],
    ranks: str,
) -> list[Value]:
    return [
        {
            "x": int(row["batch"]),
            "y": float(value(row)) if row["status"] == "ok" else None,
            "line": line,
            "other": is_other(row),
            "tip": _tip(row, names, ranks),
        }
        for line, row in members
        if row["status"] == "oom" or (row["status"] == "ok" and formatting.has_value(value(row)))
    ]


def _spec(
    values: Sequence[Value], lines: Sequence[str], x: Spec, y_title: str, capacity: float | None
) -> Spec:
    y = linear_axis("y", y_title, axis={"format": "~s"} if y_title == "samples/s" else {})
    ok = [value for value in values if value["y"] is not None]
    ran_out = [value for value in values if value["y"] is None]
    drawn = layers(ok, lines, x, y)
    if capacity is not None:
        drawn.insert(0, level_layer(capacity, "y", y))
    if ran_out:
        drawn.append(_ran_out_layer(ran_out, lines, x))
    return specification(ok, drawn)


def _ran_out_layer(ran_out: Sequence[Value], lines: Sequence[str], x: Spec) -> Spec:
    """Draw crosses under the upper edge, a row for each line.

    How much they would have needed is not known.
    """
    rows = list(dict.fromkeys(value["line"] for value in ran_out))
    places = {line: 12 + 13 * place for place, line in enumerate(rows)}
    return {
        "data": {"values": [{**value, "y": places[value["line"]]} for value in ran_out]},
        "mark": {
            "type": "point",
            "shape": "M-1,-1L1,1M1,-1L-1,1",
            "size": 60,
            "strokeWidth": 2,
            "opacity": 1,
        },
        "encoding": {
            "x": x,
            # In pixels.
            "y": {"field": "y", "type": "quantitative", "scale": None},
            "color": by_line(lines, "color"),
            "description": TIP,
        },
    }


def _tip(row: Row, names: Sequence[str], ranks: str) -> str:
    name = named(row, names, ranks)
    if row["status"] != "ok":
        return f"{name}\nout of memory"
    memory = row["peak_mem_allocated_bytes"]
    peak = f"\npeak {formatting.gib(memory)} GiB" if formatting.has_value(memory) else ""
    return f"{name}\n{formatting.number(row['throughput'])} samples/s{peak}"
