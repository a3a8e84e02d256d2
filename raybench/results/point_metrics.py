"""The numbers of a point's row, computed from the measurements of its ranks. Pure.

docs/explanation/numbers.md explains each of them to the reader.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import accumulate, chain
from statistics import fmean, median
from typing import Any

from raybench.hardware.peaks import dense_peak_tflops
from raybench.job.point import SCRIPT
from raybench.records import Breakdown, Measurement, Record, Traffic
from raybench.records.metric import combine_ranks
from raybench.results.metrics import combine_measurements
from raybench.stats import summary as stats
from raybench.stats.stragglers import (
    NEARLY_ALL,
    Straggler,
    borne_out_ms,
    find_straggler,
    host_error_ms,
    late_in_turn_ms,
    stands_out,
)

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
    shares = _shares(record.measurements)
    record = of_working_ranks(record)
    measurements = record.measurements
    found = _step_times(record)
    parts = step_parts(measurements, found["step_ms_p50"])
    own = {m.name: m.meaning or m.description for one in measurements for m in one.workload_metrics}
    return {
        **combine_measurements(
            measurements, typical_ms=found["step_ms_p50"], mean_ms=found["step_ms_mean"]
        ),
        **found,
        **rates(record, found["step_ms_mean"]),
        **parts,
        "methods": {**(parts["methods"] or {}), **own} or None,
        **_state(measurements),
        "energy_j_error": _energy_error_j(measurements),
        **shares,
    }


def of_working_ranks(record: Record) -> Record:
    """Leave out the ranks that have no share of an uneven step: their steps take no time."""
    working = tuple(m for m in record.measurements if m.share is None or m.share.items)
    return replace(record, measurements=working)


def _shares(measurements: Sequence[Measurement]) -> Numbers:
    """Collect what each rank did of an uneven step, and what its probe found; {} of another."""
    shares = [measurement.share for measurement in measurements if measurement.share]
    if len(shares) < len(measurements):
        return {}
    return {
        "share_by_rank": [share.items for share in shares],
        "own_step_ms_by_rank": [share.own_ms for share in shares],
        "fixed_ms_by_rank": [share.fixed_ms for share in shares],
        "fixed_ms_error_by_rank": [share.fixed_ms_error for share in shares],
        "speed_by_rank": [share.items_per_s for share in shares],
        "speed_error_by_rank": [share.items_per_s_error for share in shares],
        "slow_ratio_by_rank": [share.slow_ratio for share in shares],
        "exchange_ms": shares[0].exchange_ms,
        "predicted_step_ms": shares[0].predicted_step_ms,
        "crossover_batch": shares[0].crossover_batch,
        "gradient_error": shares[0].gradient_error,
    }


def typical_step_ms(record: Record) -> float:
    """Return the step time of a point that was measured, in ms."""
    return stats.step_time([m.step_ns for m in record.measurements]) / _NS_PER_MS


def mean_step_ms(record: Record) -> float:
    """Divide the time of the timed phase by its steps, on the rank that took longest.

    In ms; the throughput is of that.
    """
    return max(fmean(m.step_ns) for m in record.measurements) / _NS_PER_MS


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
    summary = replace(stats.summarize(steps_ms), mean=mean_step_ms(record))
    interval = stats.median_interval(repeats)
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
        "skew_ms_p50": stats.median_skew(ranks) if len(ranks) > 1 else None,
        "data_ms": data_wait_ms(measurements),
        # A script's first step is part of its set-up.
        **(_cold_steps(measurements) if record.point.workload != SCRIPT else {}),
    }


def _cold_steps(measurements: Sequence[Measurement]) -> Numbers:
    """Find the first step after the first build, and the first one that compiled nothing more.

    Of the rank where it took longest; None where there is none. And whether all processes were new.
    """
    repetitions = [measurement.repetitions[0] for measurement in measurements]
    first_ns = [ns for r in repetitions for ns in r.warmup.step_ns[:1]]
    compiled_ns = [
        ns
        for r in repetitions
        if r.compiling_steps
        for ns in r.warmup.step_ns[r.compiling_steps :][:1]
    ]
    news = [measurement.is_of_new_process for measurement in measurements]
    return {
        "new_processes": None if None in news else all(news),
        "first_step_ms": max(first_ns) / _NS_PER_MS if first_ns else None,
        "compiled_step_ms": max(compiled_ns) / _NS_PER_MS if compiled_ns else None,
    }


def _repeats(measurements: Sequence[Measurement]) -> range:
    return range(len(measurements[0].repetitions))


def _repeat_ms(measurements: Sequence[Measurement], index: int) -> list[float]:
    """List the point's step times in one repeat."""
    ranks = [m.repetitions[index].timed.step_ns for m in measurements]
    return [float(ns) / _NS_PER_MS for ns in stats.step_series(ranks)]


def _steps_ms(measurement: Measurement) -> list[float]:
    return [ns / _NS_PER_MS for ns in measurement.step_ns]


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
    by_model = combine_ranks("max", [m.model_flops_per_step for m in measurements])
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
        "mfu_6n_pct": _percent(
            _rate(by_model, step_ms / _MS_PER_S, _FLOP_PER_TFLOP), _peak_tflops(record)
        ),
        "gemm_share_pct": _percent(achieved, product),
    }


def _burst_ms(measurements: Sequence[Measurement]) -> float | None:
    """Measure the step in the first 30 ms of the warm-up on the slowest rank, but for its first.

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


def _state(measurements: Sequence[Measurement]) -> Numbers:
    """Find what makes a number doubtful."""
    repetitions = [r for m in measurements for r in m.repetitions]
    is_known = any(r.timed.throttled for r in repetitions)
    reasons = dict.fromkeys(reason for m in measurements for reason in m.throttle_reasons)
    return {
        "stable": _all_settled([r.settled for r in repetitions]),
        "throttled": any(any(r.timed.throttled) for r in repetitions) if is_known else None,
        "throttle_reasons": list(reasons) if is_known else None,
        "transports": sorted({way for m in measurements for way in m.transports}) or None,
        "nccl_choices": list(dict.fromkeys(c for m in measurements for c in m.nccl_choices))
        or None,
        "attention_kernels": sorted({k for m in measurements for k in m.attention_kernels}) or None,
        "sm_clock_mhz_p50": _clock_mhz(measurements),
    }


def _all_settled(answers: Sequence[bool | None]) -> bool | None:
    """Whether all settled; False where one did not, else None where of one nobody can tell."""
    return False if False in answers else None if None in answers else True


def _clock_mhz(measurements: Sequence[Measurement]) -> float | None:
    """Take the lowest median of a device: it sets the pace. None where one is unknown."""
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


# Below this share of a step the device's idle time may be noise.
_HOST_BOUND_SHARE = 0.05
# A step with timed communication that differs by more is another step: its waits are not the
# timed one's.
_SAME_STEP_SHARE = 0.03


def step_parts(measurements: Sequence[Measurement], step_ms: float) -> Numbers:
    """Compute the columns of the breakdown.

    All parts are those of the rank whose own step is longest: on it they follow each other, and
    with the exposed communication they add up to the step.

    step_ms: the point's step time. `data_ms` of the timed steps is not among the columns.
    """
    broken_down = _breakdowns(measurements)
    local_ms = _local_ms(broken_down)
    straggler = find_straggler([b.local_ms for b in broken_down]) if local_ms else None
    slowest = local_ms.index(max(local_ms)) if local_ms else 0
    of_slowest = broken_down[slowest] if broken_down else Breakdown()
    data_ms = data_wait_ms(measurements[slowest : slowest + 1])
    straggling = _straggler(broken_down, straggler, measurements)
    return {
        "local_step_ms": max(local_ms, default=None),
        "compute_ms": _compute_ms(of_slowest, data_ms),
        "optimizer_ms": of_slowest.optimizer_ms,
        "host_gap_ms": _host_gap_ms(of_slowest),
        "host_bound": _host_bound(of_slowest),
        **_by_rank(broken_down),
        **straggling,
        **_communication(broken_down, step_ms),
        **_traffic(broken_down),
        **_peak_parts(broken_down),
        "slowest_rank": (
            _slowest_rank(
                straggler, straggling["straggler_error_ms"], step_ms - max(local_ms), step_ms
            )
            if straggler
            else _slowest_timed(measurements, step_ms)
        ),
        "methods": _methods(broken_down, step_ms),
    }


def data_wait_ms(measurements: Sequence[Measurement]) -> float | None:
    """Median over iterations of the longest wait for data; None where no rank tells of it."""
    waits_ns = [
        [ns for samples in timed for ns in samples.part_ns.get("data", (0,) * len(samples.step_ns))]
        for measurement in measurements
        if (timed := [repetition.timed for repetition in measurement.repetitions])
        and any("data" in samples.part_ns for samples in timed)
    ]
    return stats.summarize(stats.per_iteration_max(waits_ns)).p50 / _NS_PER_MS if waits_ns else None


def _breakdowns(measurements: Sequence[Measurement]) -> list[Breakdown]:
    """Those of all ranks, or none: the longest of some ranks could be the wrong one."""
    known = [m.breakdown for m in measurements if m.breakdown is not None]
    return known if len(known) == len(measurements) else []


def _local_ms(broken_down: Sequence[Breakdown]) -> list[float]:
    """Compute the median local step of each rank; empty where one has none."""
    steps = [list(chain(*b.local_ms)) for b in broken_down]
    return [median(of_rank) for of_rank in steps] if all(steps) else []


def _compute_ms(breakdown: Breakdown, data_ms: float | None) -> float | None:
    """Take the device's work but for the optimizer's; on a CPU the local step less data waits."""
    busy_ms = breakdown.device_ms
    if busy_ms is None and breakdown.local_ms:
        busy_ms = median(chain(*breakdown.local_ms)) - (data_ms or 0.0)
    if busy_ms is None:
        return None
    return max(0.0, busy_ms - (breakdown.optimizer_ms or 0.0))


def _host_gap_ms(breakdown: Breakdown) -> float | None:
    if not breakdown.local_ms or breakdown.device_ms is None:
        return None
    return max(0.0, median(chain(*breakdown.local_ms)) - breakdown.device_ms)


def _host_bound(breakdown: Breakdown) -> bool | None:
    """Whether the device waits for the host; None on a CPU and where it cannot be told."""
    gap_ms = _host_gap_ms(breakdown)
    return (
        None if gap_ms is None else gap_ms > _HOST_BOUND_SHARE * median(chain(*breakdown.local_ms))
    )


def _by_rank(broken_down: Sequence[Breakdown]) -> Numbers:
    """List what the other columns can be computed from again."""
    device_ms = [b.device_ms for b in broken_down]
    return {
        "local_step_ms_by_rank": _local_ms(broken_down) or None,
        "device_ms_by_rank": device_ms if device_ms and None not in device_ms else None,
        **_wall_by_rank(broken_down),
    }


def _wall_by_rank(broken_down: Sequence[Breakdown]) -> Numbers:
    walls = [b.wall for b in broken_down if b.wall is not None]
    known = walls if len(walls) == len(broken_down) else []
    return {
        "wall_unsynced_ms_by_rank": [wall.unsynced_ms for wall in known] or None,
        "wall_synced_ms_by_rank": [wall.synced_ms for wall in known] or None,
    }


def _straggler(
    broken_down: Sequence[Breakdown],
    straggler: Straggler | None,
    measurements: Sequence[Measurement],
) -> Numbers:
    blocks = [b.local_ms for b in broken_down]
    if straggler is None:
        names = ("straggler_ms", "straggler_error_ms", "straggler_device_ms", "late_in_turn_ms")
        return {**dict.fromkeys(names), "local_step_drift_ms": _drift_ms(blocks)}
    device_ms = _device_excess_ms(broken_down, straggler)
    is_device = device_ms is not None and device_ms >= NEARLY_ALL * straggler.excess_ms
    return {
        "straggler_ms": straggler.excess_ms,
        "straggler_error_ms": max(
            straggler.error_ms,
            0.0 if is_device else host_error_ms(blocks, _timed_series_ms(measurements)),
        ),
        "straggler_device_ms": device_ms,
        "late_in_turn_ms": late_in_turn_ms(blocks),
        "local_step_drift_ms": _drift_ms(blocks),
    }


def _timed_series_ms(measurements: Sequence[Measurement]) -> list[list[float]]:
    """List the point's step time in each timed iteration, in ms, for each repeat."""
    by_repeat = zip(*(m.repetitions for m in measurements), strict=True)
    return [
        (stats.step_series([r.timed.step_ns for r in ranks]) / _NS_PER_MS).tolist()
        for ranks in by_repeat
    ]


def _device_excess_ms(broken_down: Sequence[Breakdown], straggler: Straggler) -> float | None:
    """How much longer the slowest rank's device works than that of the rank it is compared with."""
    slow_ms, other_ms = (broken_down[r].device_ms for r in (straggler.rank, straggler.other))
    return None if slow_ms is None or other_ms is None else slow_ms - other_ms


def _drift_ms(blocks: Sequence[Sequence[Sequence[float]]]) -> float | None:
    """Largest change of a rank's local step from the first to the second half of its blocks."""
    if not blocks or any(len(of_rank) < 2 for of_rank in blocks):
        return None
    middle = len(blocks[0]) // 2
    changes = [median(chain(*b[middle:])) - median(chain(*b[:middle])) for b in blocks]
    return max(changes, key=abs)


def _communication(broken_down: Sequence[Breakdown], step_ms: float) -> Numbers:
    """Communication is the shortest over ranks: the rank that comes last does not wait in it."""
    local_ms, comm_ms = _local_ms(broken_down), [b.comm_ms for b in broken_down]
    has_peers = len(broken_down) > 1
    return {
        "comm_ms": stats.median_of_smallest(comm_ms) if comm_ms else None,
        "comm_exposed_ms": step_ms - max(local_ms) if has_peers and local_ms else None,
        "hooked_step_ms": _hook_ms(broken_down),
        "wait_ms": _wait_ms(broken_down, step_ms),
    }


def _traffic(broken_down: Sequence[Breakdown]) -> Numbers:
    """Name what a step sends by kind, with the ranks of a group that is not all; largest rank."""
    calls: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for one in chain(*(b.traffic for b in broken_down)):
        name = _traffic_name(one, len(broken_down))
        calls[name] = max(one.calls, calls.get(name, 0))
        sizes[name] = max(one.message_bytes, sizes.get(name, 0))
    copies_ms = [b.copies_ms for b in broken_down if b.copies_ms is not None]
    return {
        "comm_calls": calls or None,
        "comm_bytes": sizes or None,
        "comm_busbw_gb_s": _busbw_by_kind(broken_down) or _busbw_of_gradients(broken_down),
        "local_copy_ms": max(copies_ms, default=None),
    }


def _traffic_name(one: Traffic, world_size: int) -> str:
    return one.kind if one.ranks == world_size else f"{one.kind} of {one.ranks}"


def _busbw_by_kind(broken_down: Sequence[Breakdown]) -> dict[str, float]:
    """Compute the bus bandwidth of each kind whose calls were timed, on the first rank's bytes.

    Of each call the shortest time over ranks: the rank that comes last does not wait in it.
    """
    found = {}
    for one in broken_down[0].traffic if broken_down else ():
        key = (one.kind, one.ranks)
        same = [b for own in broken_down for b in own.traffic if (b.kind, b.ranks) == key]
        if one.call_ms and len({len(other.call_ms) for other in same}) == 1:
            calls_ms = zip(*(other.call_ms for other in same), strict=True)
            spent_s = sum(map(min, calls_ms)) / _MS_PER_S
            found[_traffic_name(one, len(broken_down))] = one.bus_bytes / spent_s / _BYTES_PER_GB
    return found


def _busbw_of_gradients(broken_down: Sequence[Breakdown]) -> dict[str, float] | None:
    """Compute the bus bandwidth of gradients, where all that is sent is what was timed."""
    comm_ms = stats.median_of_smallest([b.comm_ms for b in broken_down]) if broken_down else None
    sent = broken_down[0].traffic if broken_down else ()
    if not comm_ms or [one.kind for one in sent] != ["all_reduce"]:
        return None
    return {"all_reduce": sent[0].bus_bytes / (comm_ms / _MS_PER_S) / _BYTES_PER_GB}


def _peak_parts(broken_down: Sequence[Breakdown]) -> Numbers:
    """Take those of the rank that holds most."""
    known = [b.peak for b in broken_down if b.peak is not None]
    parts = asdict(max(known, key=lambda one: one.total_bytes)) if known else {}
    return {f"mem_{name}": value for name, value in parts.items()}


def _hook_ms(broken_down: Sequence[Breakdown]) -> float | None:
    """Median of the steps with timed communication, of the rank that took longest."""
    hooked = [b.hooked_ms for b in broken_down]
    return max(median(steps) for steps in hooked) if hooked and all(hooked) else None


def _is_same_step(hooked_ms: float | None, step_ms: float) -> bool:
    return hooked_ms is not None and abs(hooked_ms - step_ms) <= _SAME_STEP_SHARE * step_ms


def _wait_ms(broken_down: Sequence[Breakdown], step_ms: float) -> float | None:
    """Compute the longest that a rank waits in the last collective.

    No longer than its step leaves beside its own work and that collective; None where the
    instrumented steps were other steps.
    """
    tails, local_ms = [b.tail_ms for b in broken_down], _local_ms(broken_down)
    if len(tails) < 2 or not all(tails) or not local_ms:
        return None
    if not _is_same_step(_hook_ms(broken_down), step_ms):
        return None
    shortest_ms = stats.median_of_smallest(tails) or 0.0
    waits_ms = zip(stats.median_above_smallest(tails), local_ms, strict=True)
    return max(max(0.0, min(wait, step_ms - own - shortest_ms)) for wait, own in waits_ms)


def _slowest_rank(
    found: Straggler, error_ms: float, exposed_ms: float, step_ms: float
) -> int | None:
    """Find the slowest rank, if it stands out."""
    excess_ms = borne_out_ms(found.excess_ms, exposed_ms)
    return found.rank if stands_out(excess_ms, error_ms, step_ms) else None


def _slowest_timed(measurements: Sequence[Measurement], step_ms: float) -> int | None:
    """Find the same by the timed steps, where there are no local ones."""
    found = find_straggler(
        [[[ns / _NS_PER_MS for ns in r.timed.step_ns] for r in m.repetitions] for m in measurements]
    )
    return None if found is None else _slowest_rank(found, found.error_ms, 0.0, step_ms)


def _methods(broken_down: Sequence[Breakdown], step_ms: float) -> dict[str, str] | None:
    if not broken_down or not broken_down[0].methods:
        return None
    hooked_ms = _hook_ms(broken_down)
    if hooked_ms is None or _is_same_step(hooked_ms, step_ms):
        return dict(broken_down[0].methods)
    reason = f"unknown: the instrumented step took {hooked_ms:.3g} ms, the timed {step_ms:.3g} ms"
    return {**broken_down[0].methods, "wait_ms": reason}
