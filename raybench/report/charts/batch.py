"""Throughput and memory over the batch size, with a cross on the axis where memory ran out."""

from __future__ import annotations

from collections.abc import Callable

from raybench.analysis.settings import setting, varying
from raybench.records import Status
from raybench.report import formatting
from raybench.report.charts.data import ChartData, LineFigure, Row, batch_title
from raybench.report.charts.grammar import Figure, Spec, axis
from raybench.report.charts.registry import Chart

_GIB = 2**30
# The memory of a device is drawn where it ran out, or where it is at most so many times the peak.
_NEAR = 2.5
# Memory that grows by less over the batch sizes makes no picture.
_FLAT = 1.05


def throughput_figure(data: ChartData) -> Figure | None:
    """Draw samples/s; None where no series has two batch sizes with a throughput."""
    return _over_batch(
        data,
        lambda row: row.throughput,
        anchor="throughput",
        title="Throughput over the batch size",
        note=f"Samples per second of all {data.ranks} together.",
        y=axis("samples/s", format="~s"),
    )


def memory_figure(data: ChartData) -> Figure | None:
    """Draw peak memory; None where it is not known, as on CPUs, or hardly depends on the batch."""
    known = [row for row in data.measured if row.peak_mem_allocated_bytes]
    names = varying(known, ("batch",))
    peaks: dict[tuple[str, ...], list[int]] = {}
    for row in known:
        line = tuple(str(setting(row, name)) for name in names)
        peaks.setdefault(line, []).append(row.peak_mem_allocated_bytes or 0)
    ran_out = any(row.status == Status.OOM for row in data.rows)
    if not ran_out and all(max(some) < _FLAT * min(some) for some in peaks.values()):
        return None
    sizes = data.devices["memory_bytes"].dropna() if "memory_bytes" in data.devices else ()
    size = min(sizes, default=0)
    is_near = ran_out or size < _NEAR * max((max(some) for some in peaks.values()), default=0)
    label = f"memory of a device, {size / _GIB:.1f} GiB"
    return _over_batch(
        data,
        lambda row: (
            None if row.peak_mem_allocated_bytes is None else row.peak_mem_allocated_bytes / _GIB
        ),
        anchor="memory",
        title="Memory over the batch size",
        note="Peak of the memory that is allocated on the device that needs most.",
        y=axis("GiB"),
        level=(size / _GIB, label) if size and is_near else None,
    )


def largest_batch_figure(data: ChartData) -> Figure | None:
    """Draw peak memory where the run searched for the largest batch; else None."""
    return memory_figure(data) if data.summary.largest_batches else None


CHARTS = (
    Chart(draw=largest_batch_figure, place=50, answers=10, is_only_first=True),
    Chart(draw=throughput_figure, place=60, answers=55),
    Chart(draw=memory_figure, place=70),
)


def _over_batch(
    data: ChartData,
    value: Callable[[Row], float | None],
    *,
    anchor: str,
    title: str,
    note: str,
    y: Spec,
    level: tuple[float, str] | None = None,
) -> Figure | None:
    def tip(row: Row) -> str:
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
