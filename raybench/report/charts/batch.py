"""Throughput and memory over the batch size, with a cross on the axis where memory ran out."""

from __future__ import annotations

from raybench.analysis.settings import setting, varying
from raybench.report import formatting
from raybench.report.charts.data import ChartData, Row, batch_title, lines_over
from raybench.report.charts.grammar import Figure, Spec, axis
from raybench.report.charts.registry import Chart

_GIB = 2**30
_PEAK = "peak_mem_allocated_bytes"
# The limit of the device is drawn where memory ran out, or came as near to it as this.
_NEAR = 2.5
# Memory that grows by less over the batch sizes makes no picture.
_FLAT = 1.05


def throughput_figure(data: ChartData) -> Figure | None:
    """Draw samples/s; None where no series has two batch sizes with a throughput."""
    return _over_batch(
        data,
        "throughput",
        unit=1,
        anchor="throughput",
        title="Throughput over the batch size",
        note=f"Samples per second of all {data.ranks} together.",
        y=axis("samples/s", format="~s"),
    )


def memory_figure(data: ChartData) -> Figure | None:
    """Draw peak memory; None where it is not known, as on CPUs, or hardly depends on the batch."""
    known = [row for row in data.measured if formatting.has_value(row[_PEAK])]
    ran_out = any(row["status"] == "oom" for row in data.rows)
    names = varying(known, ("batch",))
    by_line: dict[tuple[str, ...], list[float]] = {}
    for row in known:
        key = tuple(str(setting(row, name)) for name in names)
        by_line.setdefault(key, []).append(row[_PEAK])
    if all(max(peaks) < _FLAT * min(peaks) for peaks in by_line.values()) and not ran_out:
        return None
    devices = data.devices
    sizes = list(devices["memory_bytes"].dropna()) if "memory_bytes" in devices else []
    most = max((row[_PEAK] for row in known), default=0)
    is_near = sizes and (ran_out or min(sizes) < _NEAR * most)
    size_gib = float(min(sizes)) / _GIB if is_near else 0.0
    return _over_batch(
        data,
        _PEAK,
        unit=_GIB,
        anchor="memory",
        title="Memory over the batch size",
        note="Peak of the memory that is allocated on the device that needs most.",
        y=axis("GiB"),
        level=(size_gib, f"memory of a device, {size_gib:.1f} GiB") if size_gib else None,
    )


def largest_batch_figure(data: ChartData) -> Figure | None:
    """Draw peak memory as the answer of a run that searched for the largest batch."""
    return memory_figure(data) if data.summary.largest_batches else None


CHARTS = (
    Chart(draw=largest_batch_figure, place=50, answers=10, is_only_first=True),
    Chart(draw=throughput_figure, place=60, answers=70),
    Chart(draw=memory_figure, place=70),
)


def _over_batch(
    data: ChartData,
    column: str,
    *,
    unit: int,
    anchor: str,
    title: str,
    note: str,
    y: Spec,
    level: tuple[float, str] | None = None,
) -> Figure | None:
    def value(row: Row) -> float | None:
        known = row["status"] == "ok" and formatting.has_value(row[column])
        return float(row[column]) / unit if known else None

    def tip(row: Row) -> str:
        if row["status"] != "ok":
            return formatting.STATUS_WORDS[row["status"]]
        peak = (
            f"\npeak {formatting.gib(row[_PEAK])} GiB" if formatting.has_value(row[_PEAK]) else ""
        )
        return f"{formatting.number(row['throughput'])} samples/s{peak}"

    # What a search tried lies close together, and memory grows in proportion.
    is_searched = bool(data.summary.largest_batches)
    sized = [row for row in data.rows if formatting.has_value(row["batch"])]
    ran_out = any(row["status"] == "oom" for row in sized)
    return lines_over(
        data,
        anchor=anchor,
        title=title,
        note=note + (" Crosses on the axis: out of memory." if ran_out else ""),
        over=("batch",),
        lines_by=("world_size",),
        x=axis(batch_title(sized), None if is_searched else 2, format="~s"),
        y=y,
        among=lambda row: formatting.has_value(row["batch"]),
        along=lambda row: int(row["batch"]),
        value=value,
        is_on_axis=lambda row: row["status"] == "oom",
        tip=tip,
        level=level,
    )
