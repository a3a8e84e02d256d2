"""Throughput and memory over the batch size, with marks where memory ran out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from raybench.report import wording
from raybench.report.html_figure import (
    TOLD,
    Entry,
    Figure,
    Panel,
    Spec,
    Value,
    legend,
    specification,
)
from raybench.report.html_lines import layers, linear_axis, power_axis
from raybench.report.html_series import (
    Row,
    Series,
    arrange,
    batch_title,
    drawn_of,
    in_order,
    label,
    table,
    varying_settings,
)
from raybench.report.summary import Summary

_GIB = 2**30
_OOM = Entry(label="out of memory", color="var(--bad)", shape="cross-out")
_CAPACITY = Entry(label="memory of a device", color="var(--axis)", shape="dash")


def throughput_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """None where there are fewer than two batch sizes with a throughput."""
    return _figure(
        rows,
        summary,
        anchor="throughput",
        title="Throughput and batch size",
        note=f"Samples per second of all {summary.ranks} together, the batch doubling from tick "
        "to tick.",
        value=lambda row: row["throughput"],
        y_title="samples/s",
        capacity=None,
    )


def memory_figure(rows: Sequence[Row], summary: Summary, devices: pd.DataFrame) -> Figure | None:
    """None where there are fewer than two batch sizes with a known peak, as on CPU workers."""
    known = devices["memory_bytes"].dropna()
    return _figure(
        rows,
        summary,
        anchor="memory",
        title="Memory and batch size",
        note="Peak of the memory that was allocated on the device that needs most.",
        value=lambda row: row["peak_mem_allocated_bytes"] / _GIB,
        y_title="GiB",
        capacity=float(known.min()) / _GIB if len(known) else None,
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
    ok = [r for r in rows if r["status"] == "ok" and wording.known(r["batch"])]
    ok = [row for row in ok if wording.known(value(row))]
    if len({row["batch"] for row in ok}) < 2:
        return None
    ran_out = [row for row in rows if row["status"] == "oom" and wording.known(row["batch"])]
    shown = in_order([*ok, *ran_out], ("batch",))
    series = arrange(shown, over=("batch",), lines_by=("world_size",), ranks=summary.ranks)
    drawn = [row for members in series.panels.values() for _, row in members]
    x = power_axis("x", batch_title(shown), [row["batch"] for row in drawn])
    told = varying_settings(shown)
    has_ran_out = any(row["status"] == "oom" for row in drawn)
    line = capacity if has_ran_out else None
    panels = [
        Panel(
            title=head,
            spec=_spec(_values(members, value, told, summary.ranks), series, x, y_title, line),
        )
        for head, members in series.panels.items()
    ]
    columns, cells, texts = table(shown, summary.ranks, _COLUMNS)
    marks = [*([_OOM] if has_ran_out else []), *([_CAPACITY] if line is not None else [])]
    return Figure(
        anchor=anchor,
        title=title,
        note=note + drawn_of(series),
        legend=[*legend(series.lines), *marks],
        panels=panels,
        columns=columns,
        rows=cells,
        texts=texts,
    )


def _values(
    members: Sequence[tuple[str, Row]],
    value: Callable[[Row], float],
    told: Sequence[str],
    ranks: str,
) -> list[Value]:
    return [
        {
            "x": int(row["batch"]),
            "y": float(value(row)) if row["status"] == "ok" else None,
            "line": line,
            "tip": _tip(row, told, ranks),
        }
        for line, row in members
    ]


def _spec(
    values: Sequence[Value], series: Series, x: Spec, y_title: str, capacity: float | None
) -> Spec:
    y = linear_axis("y", y_title, axis={"format": "~s"} if y_title == "samples/s" else {})
    ok = [value for value in values if value["y"] is not None]
    ran_out = [value for value in values if value["y"] is None]
    drawn = layers(series.lines, x, y)
    if capacity is not None:
        drawn.append(_capacity_layer(capacity))
    if ran_out:
        drawn.append(_ran_out_layer(ran_out, x))
    return specification(ok, drawn)


def _capacity_layer(capacity: float) -> Spec:
    mark = {"type": "rule", "color": "var(--axis)", "strokeDash": [5, 4], "aria": False}
    return {"data": {"values": [{"y": capacity}]}, "mark": mark, "encoding": {"y": _plain("y")}}


def _plain(field: str) -> Spec:
    return {"field": field, "type": "quantitative"}


def _ran_out_layer(ran_out: Sequence[Value], x: Spec) -> Spec:
    """Crosses on the upper edge: how much they would have needed is not known."""
    return {
        "data": {"values": [{**value, "y": 0} for value in ran_out]},
        "mark": {
            "type": "point",
            "shape": "M-1,-1L1,1M1,-1L-1,1",
            "size": 60,
            "strokeWidth": 2,
            "opacity": 1,
            "color": "var(--bad)",
            "yOffset": 8,
        },
        "encoding": {"x": x, "y": {"value": 0}, "description": TOLD},
    }


def _tip(row: Row, told: Sequence[str], ranks: str) -> str:
    name = label(row, told, ranks)
    if row["status"] != "ok":
        return f"{name}\nout of memory"
    memory = row["peak_mem_allocated_bytes"]
    peak = f"\npeak {wording.gib(memory)} GiB" if wording.known(memory) else ""
    return f"{name}\n{wording.number(row['throughput'])} samples/s{peak}"


def _step(row: Row) -> str:
    return wording.step_ms(row) if row["status"] == "ok" else wording.STATUS_WORDS[row["status"]]


def _peak(row: Row) -> Any:
    return wording.gib(row["peak_mem_allocated_bytes"])


_COLUMNS = (
    ("step ms", _step),
    ("samples/s", lambda row: wording.number(row["throughput"])),
    ("GiB", _peak),
)
