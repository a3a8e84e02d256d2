"""Lines over a setting: speed-up over ranks, bandwidth over sizes, throughput over batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from raybench.report.charts import Chart, ChartData, LineFigure, LinePoint, line_figure
from raybench.report.charts.grammar import SIZE_LABELS, Figure, Level, LineLayout, Spec, axis
from raybench.report.formatting import counted
from raybench.results.metrics import memory_peak_gb_s, nvlink_peak_gb_s

# Room for the numbers beside the last points, in px.
_NUMBER_PX = 34
# Settings in which the points of a line over sizes may differ. Small messages are often replayed
# from a graph, and large messages are not.
_SIZE_SETTINGS = (SIZE, *OPTIONAL)
_LINES_OVER_RANKS = ("batch", "scaling")


def speed_up_figure(data: ChartData) -> Figure | None:
    """Return speed-ups over ranks; None if the baseline names no number of ranks."""
    baseline = data.answer.data.run.baseline  # setting -> value
    base_ranks = baseline.get("world_size")
    if base_ranks is None:
        return None
    base_name = formatting.ranks_words(int(base_ranks), data.ranks)
    note = f"The {data.rate}, relative to the same settings on {base_name}."
    compared = [row for row in data.rows if row.speed_up is not None]
    world_sizes = _world_sizes(data.rows)
    ideal = [(world_size, world_size / float(base_ranks)) for world_size in world_sizes]
    if any(row.efficiency is None for row in compared):
        # Points that differ from the baseline in more than their devices have no ideal speed-up.
        ideal = []
        note = f"The {data.rate}, relative to the baseline ({formatting.settings(baseline)})."
        base_name = "the baseline"
    points = [_speed_up_point(data, row) for row in data.rows]
    figure = LineFigure(
        anchor="speed-up",
        title=f"Speed-up by number of {data.ranks}",
        note=f"{note} Both axes are logarithmic. Thin bars show 95 % intervals.",
        within_line=("world_size",),
        between_lines=_LINES_OVER_RANKS,
        layout=LineLayout(
            x=_ranks_axis(data.ranks, world_sizes),
            y=axis(f"times the {data.rate} of {base_name}", 2, format="~g"),
            ideal=ideal,
        ),
    )
    return line_figure(data, figure, points)


def _speed_up_point(data: ChartData, row: ScaledRow) -> LinePoint:
    """Return the speed-up of a point over its ranks; y is None if the speed-up is unknown."""
    x = float(row.world_size)
    if not row.speed_up:
        return LinePoint(row=row, x=x, y=None)
    return LinePoint(
        row=row,
        x=x,
        y=row.speed_up,
        low=row.speed_up_low,
        high=row.speed_up_high,
        number=formatting.ratio(row.speed_up),
        tip=_scaling_tip(data, row),
    )


def efficiency_figure(data: ChartData) -> Figure | None:
    """Return efficiencies over ranks; None if the baseline names no number of ranks."""
    if "world_size" not in data.answer.data.run.baseline:
        return None
    without_ideal = [
        row for row in data.rows if row.speed_up is not None and row.efficiency is None
    ]
    note = f"Speed-up divided by the ratio of {data.ranks}; 100 % is ideal."
    if without_ideal:
        note += f" Not drawn: {counted(len(without_ideal), 'point')} without an ideal speed-up."
    rows = [row for row in data.rows if row not in without_ideal]
    world_sizes = _world_sizes(rows)
    points = [_efficiency_point(data, row) for row in rows]
    figure = LineFigure(
        anchor="efficiency",
        title="Scaling efficiency",
        note=note,
        within_line=("world_size",),
        between_lines=_LINES_OVER_RANKS,
        layout=LineLayout(
            x=_ranks_axis(data.ranks, world_sizes),
            y=axis("efficiency", format="~%"),
            ideal=[(world_size, 1.0) for world_size in world_sizes],
        ),
    )
    return line_figure(data, figure, points)


def _efficiency_point(data: ChartData, row: ScaledRow) -> LinePoint:
    """Return the efficiency of a point over its ranks; y is None if the efficiency is unknown."""
    x = float(row.world_size)
    if not row.efficiency:
        return LinePoint(row=row, x=x, y=None)
    return LinePoint(
        row=row,
        x=x,
        y=row.efficiency,
        low=row.efficiency_low,
        high=row.efficiency_high,
        number=f"{row.efficiency:.0%}",
        tip=_scaling_tip(data, row),
    )


def _scaling_tip(data: ChartData, row: ScaledRow) -> str:
    share = formatting.percent(row.efficiency)
    text = f"speed-up {speed_up_words(row)}" + (f", efficiency {share}" if share else "")
    return f"{text}\n{formatting.step_time(row)}, {formatting.number(row.throughput)} {data.rate}"


def speed_up_words(row: ScaledRow) -> str:
    """Return a speed-up as `1.47 ±1.8%`, or `1.00` for a baseline; "" if it is unknown."""
    half_width = speed_up_half_width(row)
    if half_width is None or row.is_baseline:
        return formatting.ratio(row.speed_up)
    return f"{formatting.ratio(row.speed_up)} {formatting.half_width(half_width)}"


def _world_sizes(rows: Sequence[ScaledRow]) -> list[int]:
    """Return the world sizes of points with a speed-up, ascending."""
    return sorted({int(row.world_size) for row in rows if row.speed_up is not None})


def _ranks_axis(ranks_noun: str, world_sizes: Sequence[int]) -> Spec:
    return axis(ranks_noun, 2, values=list(world_sizes), format="~g", scale={"padding": _NUMBER_PX})


def bus_bandwidth_figure(data: ChartData) -> Figure | None:
    """Return bus bandwidths in GB/s over message sizes; None if no line has two sizes."""
    peak = _nvlink_peak_gb_s(data)
    note = (
        "Bus bandwidth as nccl-tests counts it: comparable with the bandwidth of a link, "
        "whatever the operation and the number of ranks. Both axes are logarithmic."
    )
    if peak:
        note += f" NVLink's datasheet has {2 * peak:,.0f} GB/s for both directions together."
    level = Level(value=peak, label=f"NVLink, {peak:,.0f} GB/s each way") if peak else None
    figure = LineFigure(
        anchor="busbw",
        title="Bus bandwidth by message size",
        note=note,
        within_line=_SIZE_SETTINGS,
        between_lines=_settings_of_lines(data, _bus_bandwidth),
        layout=LineLayout(x=_size_axis(), y=axis("GB/s", 10, format="~s"), level=level),
    )
    return line_figure(data, figure, _points_over_size(data, _bus_bandwidth))


def _bus_bandwidth(row: ScaledRow) -> float | None:
    return row.busbw_gb_s


def _nvlink_peak_gb_s(data: ChartData) -> float | None:
    """Return NVLink's peak in one direction; None with several models or nodes, or no NVLink."""
    devices = data.answer.data.devices
    models = {row.device_name for row in data.measured if row.busbw_gb_s}
    is_one_node = data.answer.data.node_counts.of_largest_point <= 1
    if len(models) != 1 or not is_one_node or "topology" not in devices:
        return None
    for topology in devices["topology"]:
        has_nvlink = isinstance(topology, str) and nvlinks(topology)
        if not has_nvlink:
            return None
    return nvlink_peak_gb_s(str(models.pop()))


def memory_bandwidth_figure(data: ChartData) -> Figure | None:
    """Return memory bandwidths in GB/s over array sizes; None if no line has two sizes."""
    rows = [row for row in data.measured if row.memory_gb_s]
    peaks = {memory_peak_gb_s(str(row.device_name)) for row in rows}
    peak = peaks.pop() if len(peaks) == 1 else None
    # Only a cache can be faster than the memory's peak.
    cached_sizes = sorted({size_of(row) for row in rows if peak and (row.memory_gb_s or 0) > peak})
    note = "Bytes read and written in a step, divided by its time. Both axes are logarithmic."
    if cached_sizes:
        note += (
            f" Arrays of {', '.join(map(formatting.size, cached_sizes))} fit into the device's "
            "cache, so they are faster than its memory."
        )
    level = Level(value=peak, label=f"datasheet, {peak:,.0f} GB/s") if peak else None
    figure = LineFigure(
        anchor="memory-bandwidth",
        title="Memory bandwidth by array size",
        note=note,
        within_line=_SIZE_SETTINGS,
        between_lines=_settings_of_lines(data, _memory_bandwidth),
        layout=LineLayout(x=_size_axis(), y=axis("GB/s", 10, format="~s"), level=level),
    )
    return line_figure(data, figure, _points_over_size(data, _memory_bandwidth))


def _memory_bandwidth(row: ScaledRow) -> float | None:
    return row.memory_gb_s


def time_figure(data: ChartData) -> Figure | None:
    """Return step times over sizes of points with a bandwidth; None if no line has two sizes."""
    figure = LineFigure(
        anchor="time",
        title="Step time by size",
        note="Both axes are logarithmic.",
        within_line=_SIZE_SETTINGS,
        between_lines=_settings_of_lines(data, _microseconds),
        layout=LineLayout(x=_size_axis(), y=axis("µs", 10, format="~s")),
    )
    return line_figure(data, figure, _points_over_size(data, _microseconds))


def _microseconds(row: ScaledRow) -> float | None:
    """Return the step time in µs; None for a point without a bandwidth."""
    has_bandwidth = row.busbw_gb_s or row.memory_gb_s
    return (row.step_ms_p50 or 0.0) * 1000 if has_bandwidth else None


def _size_axis() -> Spec:
    return axis("size", 2, labelExpr=SIZE_LABELS)


# Returns the value of a point along y; None if it is unknown.
_ValueOf = Callable[[ScaledRow], float | None]


def _settings_of_lines(data: ChartData, value_of: _ValueOf) -> list[str]:
    """Return the settings whose values are lines over sizes: words, except the precision."""
    rows = [row for row in data.measured if value_of(row) and size_of(row)]
    numeric = {name for row in rows for name in row.params if is_numeric(rows, name)}
    return varying(rows, left_out={*numeric, "world_size", "precision"})


def _points_over_size(data: ChartData, value_of: _ValueOf) -> list[LinePoint]:
    """Return each point with its value over its size; y is None without size or value."""
    points = []
    for row in data.rows:
        size = size_of(row)
        y = value_of(row) if size else None
        tip = _bandwidth_tip(row) if y else ""
        # A logarithmic axis has no 0.
        points.append(LinePoint(row=row, x=size, y=y or None, tip=tip))
    return points


def _bandwidth_tip(row: ScaledRow) -> str:
    rates = {"busbw": row.busbw_gb_s, "algbw": row.algbw_gb_s, "memory": row.memory_gb_s}
    words = [f"{name} {formatting.number(rate)} GB/s" for name, rate in rates.items() if rate]
    return f"{', '.join(words)}\n{formatting.step_time(row)}"


def throughput_figure(data: ChartData) -> Figure | None:
    """Return throughputs over the batch size; None if no line has two batch sizes."""
    points = []
    for row in _rows_with_batch(data):
        throughput = row.throughput if row.status == Status.OK else None
        points.append(_batch_point(data, row, throughput))
    figure = LineFigure(
        anchor="throughput",
        title="Throughput by batch size",
        note=f"The {data.rate} of all {data.ranks} together.{_note_on_crosses(data)}",
        within_line=("batch",),
        between_lines=("world_size",),
        layout=LineLayout(x=_batch_axis(data), y=axis(data.rate, format="~s")),
    )
    return line_figure(data, figure, points)


def memory_figure(data: ChartData) -> Figure | None:
    """Return peak memory over the batch size; None if no point ran out of memory."""
    if all(row.status != Status.OOM for row in data.rows):
        return None
    has_capacities = "memory_bytes" in data.devices
    capacities = data.devices["memory_bytes"].dropna() if has_capacities else ()
    smallest_gib = min(capacities, default=0) / GIB
    level = None
    if smallest_gib:
        level = Level(value=smallest_gib, label=f"memory of a device, {smallest_gib:.1f} GiB")
    points = []
    for row in _rows_with_batch(data):
        peak = row.peak_mem_allocated_bytes if row.status == Status.OK else None
        peak_gib = None if peak is None else peak / GIB
        points.append(_batch_point(data, row, peak_gib))
    figure = LineFigure(
        anchor="memory",
        title="Memory by batch size",
        note=f"Peak memory allocated on the device that needs most.{_note_on_crosses(data)}",
        within_line=("batch",),
        between_lines=("world_size",),
        layout=LineLayout(x=_batch_axis(data), y=axis("GiB"), level=level),
    )
    return line_figure(data, figure, points)


def _rows_with_batch(data: ChartData) -> list[ScaledRow]:
    return [row for row in data.rows if row.batch is not None]


def _note_on_crosses(data: ChartData) -> str:
    """Return the meaning of crosses on the axis; "" if no point ran out of memory."""
    if all(row.status != Status.OOM for row in _rows_with_batch(data)):
        return ""
    return " Crosses on the axis are points that ran out of memory."


def _batch_axis(data: ChartData) -> Spec:
    """Return the axis of batch sizes: global sizes, or sizes per device if any point has these."""
    batch_columns = {batch_column(row) for row in _rows_with_batch(data)}
    is_global = batch_columns == {"global_batch_size"}
    # A search tries batch sizes close together, which need a linear axis.
    log_base = None if data.answer.largest_batches else 2
    title = "global batch size" if is_global else "batch size per device"
    return axis(title, log_base, format=",~f")


def _batch_point(data: ChartData, row: ScaledRow, y: float | None) -> LinePoint:
    """Return a point of `y` over its batch; a point out of memory is a cross on the axis."""
    if row.status == Status.OK:
        peak = formatting.gib(row.peak_mem_allocated_bytes)
        tip = f"{formatting.number(row.throughput)} {data.rate}"
        tip += f"\npeak {peak} GiB" if peak else ""
    else:
        tip = formatting.STATUS_WORDS[row.status]
    is_oom = row.status == Status.OOM
    return LinePoint(row=row, x=row.batch or 0, y=y, tip=tip, is_on_axis=is_oom)


def _memory_of_search_figure(data: ChartData) -> Figure | None:
    return memory_figure(data) if data.answer.largest_batches else None


def _throughput_of_ranking_figure(data: ChartData) -> Figure | None:
    """Return throughputs only where points are ranked by throughput."""
    return throughput_figure(data) if data.answer.ranked_by.metric == "throughput" else None


CHARTS = (
    Chart(draw=speed_up_figure, position=20, answer_order=30, is_of_ratios=True),
    Chart(draw=efficiency_figure, position=30),
    Chart(draw=bus_bandwidth_figure, position=11, answer_order=20),
    Chart(draw=memory_bandwidth_figure, position=12, answer_order=21),
    Chart(draw=time_figure, position=13),
    Chart(draw=_memory_of_search_figure, position=50, answer_order=10, is_only_first=True),
    Chart(draw=_throughput_of_ranking_figure, position=60, answer_order=55, is_only_first=True),
    Chart(draw=throughput_figure, position=60),
    Chart(draw=memory_figure, position=70),
)
