"""What a step finishes, moves and computes, over its mean time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from raybench.hardware.peaks import dense_peak_tflops
from raybench.records import Measurement, Record
from raybench.records.metric import Column, combine_ranks
from raybench.results.metrics.steps import NS_PER_MS

NO_ITEMS = "no throughput: the workload does not set items_per_step"
_MS_PER_S = 1e3
_BYTES_PER_GB = 1e9
_FLOP_PER_TFLOP = 1e12
# Power limits act after some ten milliseconds.
_BURST_MS, _BURST_STEPS = 30.0, 3


@dataclass(frozen=True, kw_only=True)
class RateColumns:
    """What a step finishes, moves and computes, over its mean time."""

    throughput: Annotated[
        float | None,
        Column(
            "samples/s",
            "of all ranks, by the mean step",
            heading="samples/s",
            meaning="all {ranks} together",
        ),
    ] = None
    achieved_tflops_per_device: Annotated[
        float | None,
        Column("TFLOP/s", "FLOPs over step time", heading="TFLOP/s", meaning="of one device"),
    ] = None
    gemm_tflops_per_device: Annotated[
        float | None, Column("TFLOP/s", "of large matrix products, sustained")
    ] = None
    burst_tflops_per_device: Annotated[
        float | None,
        Column(
            "TFLOP/s",
            "first 30 ms of the warm-up",
            heading="burst",
            meaning="TFLOP/s in the first 30 ms of the warm-up, before a power limit acts",
        ),
    ] = None
    mfu_pct: Annotated[
        float | None,
        Column(
            "%", "TFLOP/s as a share of the datasheet's dense peak", heading="MFU", format="percent"
        ),
    ] = None
    mfu_6n_pct: Annotated[
        float | None,
        Column(
            "%",
            "of the peak, by 6 N and attention a token",
            heading="MFU 6N",
            meaning="as MFU, by 6 operations for each of all parameters and by attention, "
            "per token",
            format="percent",
        ),
    ] = None
    gemm_share_pct: Annotated[
        float | None,
        Column(
            "%",
            "achieved over gemm",
            heading="%GEMM",
            meaning="TFLOP/s as a share of what large matrix products reach on this device",
            format="percent",
        ),
    ] = None
    algbw_gb_s: Annotated[
        float | None,
        Column("GB/s", "bytes over step time, as nccl-tests counts them", heading="algbw GB/s"),
    ] = None
    busbw_gb_s: Annotated[
        float | None,
        Column(
            "GB/s",
            "algbw times the operation's factor, as nccl-tests counts it",
            heading="busbw GB/s",
        ),
    ] = None
    memory_gb_s: Annotated[
        float | None, Column("GB/s", "bytes read and written over step time", heading="memory GB/s")
    ] = None


def rate_columns(record: Record, step_ms: float) -> RateColumns:
    """Compute the columns for steps that take `step_ms` each."""
    measurements, step_s = record.measurements, step_ms / _MS_PER_S
    first = measurements[0]
    items = sum(m.items_per_step for m in measurements if m.items_per_step)
    algbw = _rate(first.message_bytes, step_s, _BYTES_PER_GB)
    factor = first.busbw_factor
    flops = combine_ranks("max", [m.flops_per_step for m in measurements])
    by_model = combine_ranks("max", [m.model_flops_per_step for m in measurements])
    achieved = _rate(flops, step_s, _FLOP_PER_TFLOP)
    product = combine_ranks("min", [m.gemm_tflops for m in measurements])
    burst_ms = _burst_ms(measurements) if record.point.batch_size is None else None
    peak = _peak_tflops(record)
    return RateColumns(
        throughput=_rate(items or None, step_s),
        achieved_tflops_per_device=achieved,
        gemm_tflops_per_device=product,
        burst_tflops_per_device=_rate(flops, (burst_ms or 0.0) / _MS_PER_S, _FLOP_PER_TFLOP),
        mfu_pct=_percent(achieved, peak),
        mfu_6n_pct=_percent(_rate(by_model, step_s, _FLOP_PER_TFLOP), peak),
        gemm_share_pct=_percent(achieved, product),
        algbw_gb_s=algbw,
        busbw_gb_s=algbw * factor if algbw is not None and factor is not None else None,
        memory_gb_s=_rate(first.memory_bytes, step_s, _BYTES_PER_GB),
    )


def _burst_ms(measurements: Sequence[Measurement]) -> float | None:
    """Return the median step in the first 30 ms of the warm-up, in ms, of the slowest rank.

    The very first step is left out. None where a rank has fewer than three steps after it.
    """
    medians = []
    for measurement in measurements:
        steps_ms = [ns / NS_PER_MS for ns in measurement.repetitions[0].warmup.step_ns[1:]]
        fitting = sum(at_ms <= _BURST_MS for at_ms in accumulate(steps_ms))
        first_ms = steps_ms[: max(_BURST_STEPS, fitting)]
        if len(first_ms) < _BURST_STEPS:
            return None
        medians.append(statistics.median(first_ms))
    return max(medians)


def _peak_tflops(record: Record) -> float | None:
    """Return the datasheet's peak of the slowest model; None where that of one is not known."""
    precision = record.point.precision
    models = [device for device in record.devices if device.kind == "cuda"]
    peaks = [dense_peak_tflops(device.name, precision) for device in models]
    return min((p for p in peaks if p is not None), default=None) if all(peaks) else None


def rate_warnings(row: RateColumns) -> Iterator[str]:
    """Yield that more was computed than the device can."""
    if row.mfu_pct is not None and row.mfu_pct > 100:
        yield (
            f"{row.mfu_pct:.0f}% of the device's peak is impossible: the operations or the "
            "peak are counted wrong, or the precision is not what was asked for"
        )


def _rate(amount: float | None, step_s: float, unit: float = 1.0) -> float | None:
    return amount / step_s / unit if amount is not None and step_s > 0 else None


def _percent(part: float | None, whole: float | None) -> float | None:
    return part / whole * 100 if part is not None and whole else None
