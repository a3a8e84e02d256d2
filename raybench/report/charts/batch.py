"""Throughput and memory over the batch size, with a cross on the axis where memory ran out."""

from __future__ import annotations

from collections.abc import Callable

from raybench.analysis.rows import ScaledRow
from raybench.records import Status
from raybench.report import formatting
from raybench.report.charts.data import ChartData, LineFigure, batch_title
from raybench.report.charts.grammar import Figure, Spec, axis
from raybench.report.charts.registry import Chart

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


def largest_batch_figure(data: ChartData) -> Figure | None:
    """Return the figure of peak memory where the largest batch was searched; else None."""
    return memory_figure(data) if data.summary.largest_batches else None


CHARTS = (
    Chart(draw=largest_batch_figure, place=50, answers=10, is_only_first=True),
    Chart(draw=throughput_figure, place=60, answers=55),
    Chart(draw=memory_figure, place=70),
)


def _over_batch(
    data: ChartData,
    value: Callable[[ScaledRow], float | None],
    *,
    anchor: str,
    title: str,
    note: str,
    y: Spec,
    level: tuple[float, str] | None = None,
) -> Figure | None:
    def tip(row: ScaledRow) -> str:
        if row.status != Status.OK:
            return formatting.STATUS_WORDS[row.status]
        peak = formatting.gib(row.peak_mem_allocated_bytes)
        return f"{formatting.number(row.throughput)} samples/s" + (
            f"\npeak {peak} GiB" * bool(peak)
        )

    sized = [row for row in data.rows if row.batch is not None]
    if any(row.status == Status.OOM for row in sized):
        note += " Crosses on the axis: out of memory."
    # What a search tried lies close together, and memory grows in proportion.
    base = None if data.summary.largest_batches else 2
    return LineFigure(
        anchor=anchor,
        title=title,
        note=note,
        over=("batch",),
        lines_by=("world_size",),
        x=axis(batch_title(sized), base, format="~s"),
        y=y,
        level=level,
        among=lambda row: row.batch is not None,
        along=lambda row: row.batch or 0,
        value=lambda row: value(row) if row.status == Status.OK else None,
        is_on_axis=lambda row: row.status == Status.OOM,
        tip=tip,
    ).draw(data)
