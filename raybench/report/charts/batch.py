"""Throughput and memory over the batch size, with a cross on the axis where memory ran out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raybench.analysis.rows import ScaledRow, batch_column
from raybench.records import Status
from raybench.report import formatting
from raybench.report.charts.chart import Chart, ChartData, line_figure
from raybench.report.charts.grammar import Figure, axis

_GIB = 2**30


def throughput_figure(data: ChartData) -> Figure | None:
    """Return the figure of samples/s; None where no line has two batch sizes with a throughput."""
    return _over_batch(
        data,
        lambda row: row.throughput,
        anchor="throughput",
        title="Throughput over the batch size",
        note=f"Samples per second of all {data.ranks} together.",
        y=axis("samples/s", format="~s"),
    )


def memory_figure(data: ChartData) -> Figure | None:
    """Return the figure of peak memory; None where all batches fitted and none was searched."""
    ran_out = any(row.status == Status.OOM for row in data.rows)
    if not (ran_out or data.summary.largest_batches):
        return None
    sizes = data.devices["memory_bytes"].dropna() if "memory_bytes" in data.devices else ()
    size = min(sizes, default=0) / _GIB
    return _over_batch(
        data,
        lambda row: row.peak_mem_allocated_bytes and row.peak_mem_allocated_bytes / _GIB,
        anchor="memory",
        title="Memory over the batch size",
        note="Peak of the memory that is allocated on the device that needs most.",
        y=axis("GiB"),
        level=(size, f"memory of a device, {size:.1f} GiB") if size else None,
    )


def _asks_for_throughput(data: ChartData) -> bool:
    """Return whether points are ranked by their throughput."""
    return data.summary.ranked_by.metric == "throughput"


CHARTS = (
    Chart(
        draw=lambda data: memory_figure(data) if data.summary.largest_batches else None,
        place=50,
        answers=10,
        is_only_first=True,
    ),
    Chart(
        draw=lambda data: throughput_figure(data) if _asks_for_throughput(data) else None,
        place=60,
        answers=55,
        is_only_first=True,
    ),
    Chart(draw=throughput_figure, place=60),
    Chart(draw=memory_figure, place=70),
)


def _over_batch(
    data: ChartData, value: Callable[[ScaledRow], float | None], *, note: str, **rest: Any
) -> Figure | None:
    """Return a `line_figure` of a value over the batch size; None without two on a line.

    A point out of memory is a cross on the axis. rest: further arguments of `line_figure`.
    """

    def tip(row: ScaledRow) -> str:
        """Return samples/s and peak memory of a point; of one that is not ok its status."""
        if row.status != Status.OK:
            return formatting.STATUS_WORDS[row.status]
        peak = formatting.gib(row.peak_mem_allocated_bytes)
        memory = f"\npeak {peak} GiB" if peak else ""
        return f"{formatting.number(row.throughput)} samples/s{memory}"

    sized = [row for row in data.rows if row.batch is not None]
    if any(row.status == Status.OOM for row in sized):
        note += " Crosses on the axis: out of memory."
    is_global = {batch_column(row) for row in sized} == {"global_batch_size"}
    # What a search tried lies close together, and memory grows in proportion.
    base = None if data.summary.largest_batches else 2
    return line_figure(
        data,
        sized,
        lambda row: value(row) if row.status == Status.OK else None,
        note=note,
        over=("batch",),
        lines_by=("world_size",),
        x=axis("global batch size" if is_global else "batch size per device", base, format="~s"),
        along=lambda row: row.batch or 0,
        is_on_axis=lambda row: row.status == Status.OOM,
        tip=tip,
        **rest,
    )
