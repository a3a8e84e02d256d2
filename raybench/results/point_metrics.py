"""The numbers of a point's row, computed from the measurements of its ranks. Pure.

docs/method.md explains each of them to the reader.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from raybench.hardware.peaks import dense_peak_tflops
from raybench.records import Measurement, Record
from raybench.records.metric import combine_ranks
from raybench.results.metrics import combine_measurements
from raybench.results.step_parts import data_wait_ms, step_parts
from raybench.stats import steady
from raybench.stats import summary as stats

Numbers = dict[str, Any]

_NS_PER_MS = 1e6
_MS_PER_S = 1e3
_BYTES_PER_GB = 1e9
_FLOP_PER_TFLOP = 1e12
# NVML's counter of energy moves on every 20 to 100 ms: so much may be missing at either end.
_ENERGY_PERIOD_S = 0.1
# Power limits act after some ten milliseconds.
_BURST_MS, _BURST_STEPS = 30.0, 3


def compute_metrics(record: Record) -> Numbers:
    """All columns of `points` that come from measurements.

    Raises ValueError when ranks differ in their sample counts: our bug, never the user's.
    """
    measurements = record.measurements
    found = _step_times(record)
    parts = step_parts(measurements, found["step_ms_p50"])
    own = {m.name: m.description for one in measurements for m in one.workload_metrics}
    return {
        **combine_measurements(measurements),
        **found,
        **rates(record, found["step_ms_mean"]),
        **parts,
        "methods": {**(parts["methods"] or {}), **own} or None,
        **_state(measurements, found["trend"]),
        "energy_j_error": _energy_error_j(measurements),
    }


def rates(record: Record, step_ms: float) -> Numbers:
    """Compute what a step of `step_ms` finishes, moves and computes, over its time."""
    return {
        **_sizes(record.measurements, step_ms),
        **_arithmetic(record.measurements, record, step_ms),
    }


def _step_times(record: Record) -> Numbers:
    measurements = record.measurements
    repeats = [_repeat_ms(measurements, index) for index in _repeats(measurements)]
    ranks = [_steps_ms(measurement) for measurement in measurements]
    steps_ms = [ms for repeat in repeats for ms in repeat]
    summary = replace(stats.summarize(steps_ms), mean=stats.mean_step_ns(measurements) / _NS_PER_MS)
    interval = _interval(record, repeats)
    return {
        "repeats": len(repeats),
        "warmup_iterations": sum(
            len(repetition.warmup.step_ns) for repetition in measurements[0].repetitions
        ),
        "iterations": len(steps_ms),
        "inner_iterations": max(r.inner_iterations for r in measurements[0].repetitions),
        **{f"step_ms_{name}": getattr(summary, name) for name in summary.__slots__},
        "step_ms_ci_low": interval.low if interval else None,
        "step_ms_ci_high": interval.high if interval else None,
        "step_ms_repeat_std": stats.repeat_std(repeats),
        "autocorrelation": stats.autocorrelation(repeats),
        "trend": steady.worst_trend(repeats),
        "skew_ms_p50": stats.median_skew(ranks) if len(ranks) > 1 else None,
        "data_ms": data_wait_ms(measurements),
    }


def _interval(record: Record, repeats: Sequence[Sequence[float]]) -> stats.Interval | None:
    """Compute the interval of the median, up to where the steps of a repeat seem to be heading."""
    interval = stats.median_interval(repeats)
    if interval is None:
        return None
    headings = [
        steady.heading(samples, _warmup_ms(record, index)) for index, samples in enumerate(repeats)
    ]
    return interval.towards(sum(headings) / len(headings))


def _warmup_ms(record: Record, index: int) -> Sequence[float]:
    """Step times of the warm-up of one repeat; none where they are not measured as samples are."""
    repetitions = [m.repetitions[index] for m in record.measurements]
    if repetitions[0].inner_iterations > 1 or record.point.cuda_graph:
        return ()
    warm = [r.warmup.step_ns[1:] for r in repetitions]
    return [ns / _NS_PER_MS for ns in stats.step_series(warm)] if all(warm) else ()


def _repeats(measurements: Sequence[Measurement]) -> range:
    return range(len(measurements[0].repetitions))


def _repeat_ms(measurements: Sequence[Measurement], index: int) -> list[float]:
    """List the point's step times in one repeat."""
    ranks = [m.repetitions[index].timed.step_ns for m in measurements]
    return [float(ns) / _NS_PER_MS for ns in stats.step_series(ranks)]


def _steps_ms(measurement: Measurement) -> list[float]:
    return [ns / _NS_PER_MS for ns in stats.step_ns_in_order(measurement)]


def _sizes(measurements: Sequence[Measurement], step_ms: float) -> Numbers:
    """Compute what a step finishes or moves, over its time."""
    step_s, first = step_ms / _MS_PER_S, measurements[0]
    items = [m.items_per_step for m in measurements if m.items_per_step]
    algbw = _rate(first.message_bytes, step_s, _BYTES_PER_GB)
    factor = first.busbw_factor
    return {
        "throughput": _rate(sum(items) or None, step_s),
        "algbw_gb_s": algbw,
        "busbw_gb_s": algbw * factor if algbw is not None and factor is not None else None,
        "memory_gb_s": _rate(first.memory_bytes, step_s, _BYTES_PER_GB),
    }


def _arithmetic(measurements: Sequence[Measurement], record: Record, step_ms: float) -> Numbers:
    flops = combine_ranks("max", [m.flops_per_step for m in measurements])
    achieved = _rate(flops, step_ms / _MS_PER_S, _FLOP_PER_TFLOP)
    product = combine_ranks("min", [m.gemm_tflops for m in measurements])
    burst_ms = _burst_ms(measurements) if record.point.batch_size is None else None
    return {
        "achieved_tflops_per_device": achieved,
        "gemm_tflops_per_device": product,
        "burst_tflops_per_device": (
            _rate(flops, burst_ms / _MS_PER_S, _FLOP_PER_TFLOP) if burst_ms else None
        ),
        "mfu_pct": _percent(achieved, _peak_tflops(record)),
        "gemm_share_pct": _percent(achieved, product),
    }


def _burst_ms(measurements: Sequence[Measurement]) -> float | None:
    """Measure the step in the first 30 ms of the warm-up, but for its cold first one, on the
    slowest rank.

    None where the warm-up had fewer than three steps more.
    """
    medians = []
    for measurement in measurements:
        steps_ms = [ns / _NS_PER_MS for ns in measurement.repetitions[0].warmup.step_ns[1:]]
        fitting = sum(at_ms <= _BURST_MS for at_ms in accumulate(steps_ms))
        first_ms = steps_ms[: max(_BURST_STEPS, fitting)]
        medians.append(statistics.median(first_ms) if len(first_ms) >= _BURST_STEPS else None)
    known = [ms for ms in medians if ms is not None]
    return max(known) if len(known) == len(measurements) else None


def _peak_tflops(record: Record) -> float | None:
    """Look up the peak of the slowest device model of the point."""
    precision = record.point.precision
    models = [device for device in record.devices if device.kind == "cuda"]
    peaks = [dense_peak_tflops(device.name, precision) for device in models]
    return min((p for p in peaks if p is not None), default=None) if all(peaks) else None


def _state(measurements: Sequence[Measurement], trend: str) -> Numbers:
    """Find what makes a number doubtful."""
    repetitions = [r for m in measurements for r in m.repetitions]
    is_known = any(r.timed.throttled for r in repetitions)
    reasons = dict.fromkeys(reason for m in measurements for reason in m.throttle_reasons)
    return {
        "stable": all(r.settled is not False for r in repetitions) and trend == steady.FLAT,
        "throttled": any(any(r.timed.throttled) for r in repetitions) if is_known else None,
        "throttle_reasons": list(reasons) if is_known else None,
        "sm_clock_mhz_p50": _clock_mhz(measurements),
    }


def _clock_mhz(measurements: Sequence[Measurement]) -> float | None:
    """Take the median of the device where it is lowest: it sets the pace. None where one is
    unknown.
    """
    medians = [statistics.median(m.sm_clocks_mhz) for m in measurements if m.sm_clocks_mhz]
    return min(medians) if medians and len(medians) == len(measurements) else None


def _energy_error_j(measurements: Sequence[Measurement]) -> float | None:
    """Of the energy of all devices, as if all counters were late in the same way."""
    if any(m.energy_j is None for m in measurements):
        return None
    timed = [((m.energy_j or 0.0) / s, m) for m in measurements if (s := _phase_s(m)) > 0]
    return sum(watts * 2 * _ENERGY_PERIOD_S * len(m.repetitions) for watts, m in timed)


def _phase_s(measurement: Measurement) -> float:
    """From the first timed step to the end of the last, of all repeats."""
    phases = [(r.timed, r.inner_iterations) for r in measurement.repetitions]
    return sum(
        timed.start_ns[-1] + inner * timed.step_ns[-1] - timed.start_ns[0]
        for timed, inner in phases
    ) / (_NS_PER_MS * _MS_PER_S)


def _rate(amount: float | None, step_s: float, unit: float = 1.0) -> float | None:
    return amount / step_s / unit if amount is not None and step_s > 0 else None


def _percent(part: float | None, whole: float | None) -> float | None:
    return part / whole * 100 if part is not None and whole else None
