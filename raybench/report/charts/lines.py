"""Lines over a setting: speed-up over ranks, bandwidth over sizes, throughput over batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raybench.analysis.answer import speed_up_half_width
from raybench.analysis.rows import (
    OPTIONAL,
    SIZE,
    ScaledRow,
    batch_column,
    is_numeric,
    size_of,
    varying,
)
from raybench.conversion import GIB
from raybench.records.devices import nvlinks
from raybench.records.status import Status
from raybench.report import formatting
from raybench.report.charts import Chart, ChartData, line_figure
from raybench.report.charts.grammar import SIZE_LABELS, Figure, Mark, axis
from raybench.report.formatting import counted
from raybench.results.metrics import memory_peak_gb_s, nvlink_peak_gb_s

# Room for the numbers beside the last points.
_ROOM = 34
# Small messages are often replayed from a graph and large ones not: one line all the same.
_OVER = (SIZE, *OPTIONAL)


def speed_up_figure(data: ChartData) -> Figure | None:
    """Return speed-ups over ranks; None if baseline lacks world_size or no drawn line has two."""
    baseline = data.answer.data.run.baseline
    base = baseline.get("world_size")
    if base is None:
        return None
    of = formatting.ranks_words(int(base), data.ranks)
    note = f"The {data.rate}, relative to the same settings on {of}."
    compared = [row for row in data.rows if row.speed_up is not None]
    ideal = [(size, size / float(base)) for size in _sizes(data.rows)]
    if any(row.efficiency is None for row in compared):
        # Some points differ from the baseline in more than their devices: nothing is their ideal.
        ideal = []
        note = f"The {data.rate}, relative to the baseline ({formatting.settings(baseline)})."
        of = "the baseline"
    return _over_ranks(
        data,
        data.rows,
        "speed_up",
        title=f"Speed-up by number of {data.ranks}",
        note=f"{note} Both axes are logarithmic. Thin bars show 95 % intervals.",
        y=axis(f"times the {data.rate} of {of}", 2, format="~g"),
        ideal=ideal,
        number=lambda row: formatting.ratio(row.speed_up),
    )


def efficiency_figure(data: ChartData) -> Figure | None:
    """Return efficiencies over ranks; None if baseline lacks world_size or no drawn line has 2."""
    if "world_size" not in data.answer.data.run.baseline:
        return None
    without = [row for row in data.rows if row.speed_up is not None and row.efficiency is None]
    note = f"Speed-up divided by the ratio of {data.ranks}; 100 % is ideal."
    if without:
        note += f" Not drawn: {counted(len(without), 'point')} without an ideal speed-up."
    rows = [row for row in data.rows if row not in without]
    return _over_ranks(
        data,
        rows,
        "efficiency",
        title="Scaling efficiency",
        note=note,
        y=axis("efficiency", format="~%"),
        ideal=[(size, 1.0) for size in _sizes(rows)],
        number=lambda row: f"{row.efficiency:.0%}",
    )


def speed_up_words(row: ScaledRow) -> str:
    """Return a speed-up as `1.47 ±1.8%`, with half of its 95 % interval if that is known.

    "" if the point has no speed-up; that of a baseline point has no interval.
    """
    sure = speed_up_half_width(row)
    text = "" if sure is None or row.is_baseline else f" {formatting.half_width(sure)}"
    return formatting.ratio(row.speed_up) + text


def _sizes(rows: Sequence[ScaledRow]) -> list[int]:
    """Return the numbers of ranks of the points with a speed-up, ascending."""
    return sorted({int(row.world_size) for row in rows if row.speed_up is not None})


def _over_ranks(
    data: ChartData,
    rows: Sequence[ScaledRow],
    name: str,
    *,
    number: Callable[[ScaledRow], str],
    **rest: Any,
) -> Figure | None:
    """Return a `line_figure` of the column `name` over ranks; None without two points on a line.

    number: returns the text that stands at the end of a line. rest: further arguments of
    `line_figure`.
    """

    def value(row: ScaledRow) -> float | None:
        return getattr(row, name) or None

    def more(row: ScaledRow) -> Mark:
        ends = {"low": getattr(row, f"{name}_low"), "high": getattr(row, f"{name}_high")}
        return {"number": number(row), **ends} if value(row) else {}

    def tip(row: ScaledRow) -> str:
        share = formatting.percent(row.efficiency)
        text = f"speed-up {speed_up_words(row)}" + (f", efficiency {share}" if share else "")
        return (
            f"{text}\n{formatting.step_time(row)}, {formatting.number(row.throughput)} {data.rate}"
        )

    return line_figure(
        data,
        rows,
        value,
        anchor=name.replace("_", "-"),
        over=("world_size",),
        lines_by=("batch", "scaling"),
        x=axis(data.ranks, 2, values=_sizes(rows), format="~g", scale={"padding": _ROOM}),
        along=lambda row: int(row.world_size),
        more=more,
        tip=tip,
        **rest,
    )


def bus_bandwidth_figure(data: ChartData) -> Figure | None:
    """Return bus bandwidths in GB/s over message sizes; None if no drawn line has two above 0."""
    peak = _nvlink_peak_gb_s(data)
    note = (
        "Bus bandwidth as nccl-tests counts it: comparable with the bandwidth of a link, "
        "whatever the operation and the number of ranks. Both axes are logarithmic."
    )
    if peak:
        note += f" NVLink's datasheet has {2 * peak:,.0f} GB/s for both directions together."
    return _over_size(
        data,
        lambda row: row.busbw_gb_s,
        anchor="busbw",
        title="Bus bandwidth by message size",
        note=note,
        y=axis("GB/s", 10, format="~s"),
        level=(peak, f"NVLink, {peak:,.0f} GB/s each way") if peak else None,
    )


def _nvlink_peak_gb_s(data: ChartData) -> float | None:
    """Return the peak in one direction; None where devices differ, or not all use NVLink."""
    devices = data.answer.data.devices
    names = {row.device_name for row in data.measured if row.busbw_gb_s}
    if len(names) != 1 or data.answer.data.node_counts[1] > 1 or "topology" not in devices:
        return None
    for text in devices["topology"]:
        if not (isinstance(text, str) and nvlinks(text)):
            return None
    return nvlink_peak_gb_s(str(names.pop()))


def memory_bandwidth_figure(data: ChartData) -> Figure | None:
    """Return memory bandwidths in GB/s over array sizes; None if no drawn line has two sizes."""
    known = [row for row in data.measured if row.memory_gb_s]
    peaks = {memory_peak_gb_s(str(row.device_name)) for row in known}
    peak = peaks.pop() if len(peaks) == 1 else None
    above = sorted({size_of(row) for row in known if peak and (row.memory_gb_s or 0) > peak})
    note = "Bytes read and written in a step, divided by its time. Both axes are logarithmic."
    if above:
        # Memory cannot be faster than itself.
        note += (
            f" Arrays of {', '.join(map(formatting.size, above))} fit into the device's cache, so "
            "they are faster than its memory."
        )
    return _over_size(
        data,
        lambda row: row.memory_gb_s,
        anchor="memory-bandwidth",
        title="Memory bandwidth by array size",
        note=note,
        y=axis("GB/s", 10, format="~s"),
        level=(peak, f"datasheet, {peak:,.0f} GB/s") if peak else None,
    )


def time_figure(data: ChartData) -> Figure | None:
    """Return µs per step over sizes, of points with a bandwidth; None if no drawn line has two."""
    return _over_size(
        data,
        lambda row: (row.step_ms_p50 or 0.0) * 1000 if row.busbw_gb_s or row.memory_gb_s else None,
        anchor="time",
        title="Step time by size",
        note="Both axes are logarithmic.",
        y=axis("µs", 10, format="~s"),
    )


def _over_size(
    data: ChartData, value: Callable[[ScaledRow], float | None], **rest: Any
) -> Figure | None:
    """Return a `line_figure` of a value over the size; None without two points on a line.

    Each operation is a line, each precision a panel. rest: further arguments of `line_figure`.
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


def throughput_figure(data: ChartData) -> Figure | None:
    """Return samples/s of ok points over the batch size; None if no drawn line has two sizes."""
    return _over_batch(
        data,
        lambda row: row.throughput,
        anchor="throughput",
        title="Throughput by batch size",
        note=f"The {data.rate} of all {data.ranks} together.",
        y=axis(data.rate, format="~s"),
    )


def memory_figure(data: ChartData) -> Figure | None:
    """Return the figure of peak memory in GiB over the batch size.

    None if no point ran out of memory, or no drawn line has two ok batch sizes with a known peak.
    """
    if all(row.status != Status.OOM for row in data.rows):
        return None
    sizes = data.devices["memory_bytes"].dropna() if "memory_bytes" in data.devices else ()
    size = min(sizes, default=0) / GIB
    return _over_batch(
        data,
        lambda row: row.peak_mem_allocated_bytes and row.peak_mem_allocated_bytes / GIB,
        anchor="memory",
        title="Memory by batch size",
        note="Peak memory allocated on the device that needs most.",
        y=axis("GiB"),
        level=(size, f"memory of a device, {size:.1f} GiB") if size else None,
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
        return f"{formatting.number(row.throughput)} {data.rate}{memory}"

    sized = [row for row in data.rows if row.batch is not None]
    if any(row.status == Status.OOM for row in sized):
        note += " Crosses on the axis are points that ran out of memory."
    is_global = {batch_column(row) for row in sized} == {"global_batch_size"}
    # What a search tried lies close together, and memory grows in proportion.
    base = None if data.answer.largest_batches else 2
    return line_figure(
        data,
        sized,
        lambda row: value(row) if row.status == Status.OK else None,
        note=note,
        over=("batch",),
        lines_by=("world_size",),
        x=axis("global batch size" if is_global else "batch size per device", base, format=",~f"),
        along=lambda row: row.batch or 0,
        is_on_axis=lambda row: row.status == Status.OOM,
        tip=tip,
        **rest,
    )


CHARTS = (
    Chart(draw=speed_up_figure, place=20, answers=30, is_of_ratios=True),
    Chart(draw=efficiency_figure, place=30),
    Chart(draw=bus_bandwidth_figure, place=11, answers=20),
    Chart(draw=memory_bandwidth_figure, place=12, answers=21),
    Chart(draw=time_figure, place=13),
    Chart(
        draw=lambda data: memory_figure(data) if data.answer.largest_batches else None,
        place=50,
        answers=10,
        is_only_first=True,
    ),
    Chart(
        # Points are ranked by their throughput.
        draw=lambda data: (
            throughput_figure(data) if data.answer.ranked_by.metric == "throughput" else None
        ),
        place=60,
        answers=55,
        is_only_first=True,
    ),
    Chart(draw=throughput_figure, place=60),
    Chart(draw=memory_figure, place=70),
)
