"""The metrics of a point by subject: step times, rates, conditions, memory; peaks of datasheets.

Each subject has its columns and the function that computes them from a record.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from itertools import accumulate, chain
from statistics import fmean
from typing import Annotated

from ruamel.yaml import YAML

from raybench.conversion import BYTES_PER_GB, FLOP_PER_TFLOP, MS_PER_S, NS_PER_MS
from raybench.job.point import SCRIPT
from raybench.records.device import Device
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import Measurement
from raybench.records.metrics import Column, OverStep, combine_ranks
from raybench.records.record import Record
from raybench.stats import summary as stats

# A step time whose interval is wider than ±10 % is imprecise.
WIDEST_INTERVAL = 0.10
# The interval of fewer samples is always wide.
_MIN_SAMPLES_OF_IMPRECISE = 10
# Power limits act after tens of milliseconds. A burst is the time before: 30 ms, or three steps if
# these take longer.
_BURST_MS, _MIN_BURST_STEPS = 30.0, 3


@dataclass(frozen=True, kw_only=True)
class StepColumns:
    """How long steps take, and how many were timed."""

    repeats: Annotated[int | None, Column("", "builds of the workload")] = None
    warmup_iterations: Annotated[int | None, Column("", "done")] = None
    iterations: Annotated[int | None, Column("", "timed samples")] = None
    inner_iterations: Annotated[
        int | None, Column("", "steps per timed sample; null: not always as many")
    ] = None
    step_ms_mean: Annotated[
        float | None, Column("ms", "whole time divided by the number of steps")
    ] = None
    step_ms_p50: Annotated[float | None, Column("ms", "median step time")] = None
    step_ms_p90: Annotated[float | None, Column("ms", "90th percentile")] = None
    step_ms_p95: Annotated[float | None, Column("ms", "95th percentile")] = None
    step_ms_p99: Annotated[
        float | None,
        Column("ms", "99th percentile of the step times", heading="p99", format="time"),
    ] = None
    step_ms_min: Annotated[float | None, Column("ms", "minimum")] = None
    step_ms_max: Annotated[float | None, Column("ms", "maximum")] = None
    step_ms_std: Annotated[float | None, Column("ms", "standard deviation")] = None
    step_ms_ci_low: Annotated[
        float | None, Column("ms", "95 % interval of the median, low end")
    ] = None
    step_ms_ci_high: Annotated[
        float | None, Column("ms", "95 % interval of the median, high end")
    ] = None
    skew_ms_p50: Annotated[float | None, Column("ms", "slowest minus fastest rank, median")] = None
    stable: Annotated[bool | None, Column("", "the step time is steady; null: too few steps")] = (
        None
    )
    first_step_ms: Annotated[
        float | None,
        Column(
            "ms",
            "first step after the build, slowest rank",
            heading="first",
            meaning="time of the first step after the workload was built, on the slowest rank",
            format="time",
        ),
    ] = None
    compiled_step_ms: Annotated[
        float | None,
        Column(
            "ms",
            "first step after torch.compile, slowest rank",
            heading="compiled",
            meaning="time of the first step after compilation has ended, on the slowest rank",
            format="time",
        ),
    ] = None
    new_processes: Annotated[
        bool | None, Column("", "the processes had run no point: a cold first step")
    ] = None
    data_ms: Annotated[
        float | None,
        Column("ms", "the host waits for the next batch", heading="data wait", format="part"),
    ] = None


def step_columns(record: Record) -> StepColumns:
    """Return the columns on step times.

    Args:
        record: all its ranks must take part in the step; in uneven steps a rank may be idle.

    Raises:
        ValueError: ranks have different sample counts.
    """
    measurements = record.measurements
    repetitions_of_rank_0 = measurements[0].repetitions
    # Step times of the point for each repeat.
    repeats_ms: list[list[float]] = []
    for repeat in range(len(repetitions_of_rank_0)):
        ranks_ns = [m.repetitions[repeat].timed.step_ns for m in measurements]
        repeats_ms.append((stats.step_series(ranks_ns) / NS_PER_MS).tolist())
    # Step times of each rank, over all repeats.
    ranks_ms: list[list[float]] = []
    for measurement in measurements:
        ranks_ms.append([ns / NS_PER_MS for ns in measurement.step_ns])
    summary = stats.summarize(list(chain(*repeats_ms)))
    interval = stats.median_interval(repeats_ms)
    # Whether the step time became steady in each repetition; None after too few steps.
    settled = [repetition.settled for m in measurements for repetition in m.repetitions]
    is_stable = None if None in settled else True
    if False in settled:
        is_stable = False
    # The first step of a script is part of its set-up, so its cold start is unknown.
    has_cold_start = record.point.workload != SCRIPT
    first_builds = [m.repetitions[0] for m in measurements] if has_cold_start else []
    first_steps_ns: list[int] = []
    compiled_steps_ns: list[int] = []
    for build in first_builds:
        warmup_ns = build.warmup.step_ns
        first_steps_ns += warmup_ns[:1]
        if build.compiling_steps:
            # The first step after the steps that compiled, if there is such a step.
            compiled_steps_ns += warmup_ns[build.compiling_steps :][:1]
    are_new = [m.is_of_new_process for m in measurements]
    inner_iterations = {repetition.inner_iterations for repetition in repetitions_of_rank_0}
    return StepColumns(
        repeats=len(repeats_ms),
        warmup_iterations=sum(len(build.warmup.step_ns) for build in repetitions_of_rank_0),
        iterations=sum(map(len, repeats_ms)),
        inner_iterations=inner_iterations.pop() if len(inner_iterations) == 1 else None,
        step_ms_mean=mean_step_ms(record),
        **{f"step_ms_{name}": value for name, value in asdict(summary).items()},
        step_ms_ci_low=interval.low if interval else None,
        step_ms_ci_high=interval.high if interval else None,
        skew_ms_p50=stats.median_skew(ranks_ms) if len(ranks_ms) > 1 else None,
        stable=is_stable,
        first_step_ms=max(first_steps_ns) / NS_PER_MS if first_steps_ns else None,
        compiled_step_ms=max(compiled_steps_ns) / NS_PER_MS if compiled_steps_ns else None,
        new_processes=None if not has_cold_start or None in are_new else all(are_new),
        data_ms=data_wait_ms(measurements),
    )


def typical_step_ms(record: Record) -> float:
    """Return the median step of a measured point in ms."""
    return stats.median_step([m.step_ns for m in record.measurements]) / NS_PER_MS


def mean_step_ms(record: Record) -> float:
    """Return the mean step in ms of the rank with the longest mean step; rates use it."""
    return max(fmean(m.step_ns) for m in record.measurements) / NS_PER_MS


def data_wait_ms(measurements: Sequence[Measurement]) -> float | None:
    """Return the median over iterations of the longest wait for data, in ms.

    None if no rank timed its waits.
    """
    waits_by_rank_ns = []
    for measurement in measurements:
        timed = [repetition.timed for repetition in measurement.repetitions]
        if any("data" in samples.part_ns for samples in timed):
            waits_ns: list[int] = []
            for samples in timed:
                waits_ns += samples.part_ns.get("data", (0,) * len(samples.step_ns))
            waits_by_rank_ns.append(waits_ns)
    if not waits_by_rank_ns:
        return None
    return stats.summarize(stats.per_iteration_max(waits_by_rank_ns)).p50 / NS_PER_MS


def half_interval(row: StepColumns) -> float | None:
    """Return half the width of the 95 % interval of the median step / the median step.

    None if unknown.
    """
    step_ms, low_ms, high_ms = row.step_ms_p50, row.step_ms_ci_low, row.step_ms_ci_high
    if not step_ms or low_ms is None or high_ms is None:
        return None
    return (high_ms - low_ms) / 2 / step_ms


def is_imprecise(row: StepColumns) -> bool:
    """Return whether the interval is wider than ±10 %, unless there are fewer than ten samples."""
    half_width = half_interval(row)
    has_ten_samples = row.iterations is None or row.iterations >= _MIN_SAMPLES_OF_IMPRECISE
    return has_ten_samples and half_width is not None and half_width > WIDEST_INTERVAL


@dataclass(frozen=True, kw_only=True)
class RateColumns:
    """What a step finishes, moves and computes, divided by its mean time."""

    throughput: Annotated[
        float | None,
        Column(
            "samples/s",
            "of all ranks, by the mean step time",
            heading="samples/s",
            meaning="{items} per second of all {ranks} together, by the mean step time",
        ),
    ] = None
    achieved_tflops_per_device: Annotated[
        float | None,
        Column(
            "TFLOP/s",
            "FLOPs divided by the step time",
            heading="TFLOP/s",
            meaning="rate of the floating-point operations of one device",
        ),
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
            meaning="TFLOP/s in the first 30 ms of the warm-up, before the power cap acts",
        ),
    ] = None
    mfu_pct: Annotated[
        float | None,
        Column(
            "%",
            "TFLOP/s in % of the datasheet's dense peak",
            heading="MFU",
            meaning="model FLOP utilization: TFLOP/s in % of the datasheet's peak without sparsity",
            format="percent",
        ),
    ] = None
    mfu_6n_pct: Annotated[
        float | None,
        Column(
            "%",
            "MFU by 6 FLOPs per parameter and token, plus attention",
            heading="MFU 6N",
            meaning="MFU with an estimated work of 6 x parameters FLOP per token, plus attention",
            format="percent",
        ),
    ] = None
    gemm_share_pct: Annotated[
        float | None,
        Column(
            "%",
            "TFLOP/s in % of gemm_tflops_per_device",
            heading="%GEMM",
            meaning="TFLOP/s in % of what large matrix products reach on this device",
            format="percent",
        ),
    ] = None
    algbw_gb_s: Annotated[
        float | None,
        Column("GB/s", "message size divided by step time, as in nccl-tests", heading="algbw GB/s"),
    ] = None
    busbw_gb_s: Annotated[
        float | None,
        Column(
            "GB/s",
            "algbw times the factor of the operation in nccl-tests",
            heading="busbw GB/s",
            meaning="bus bandwidth as nccl-tests defines it: message size divided by the mean step "
            "time, times a factor of the operation",
        ),
    ] = None
    memory_gb_s: Annotated[
        float | None,
        Column("GB/s", "bytes read and written divided by step time", heading="memory GB/s"),
    ] = None


def rate_columns(record: Record, step_ms: float) -> RateColumns:
    """Return the rates of a record; unknown rates are None.

    Args:
        step_ms: mean step.
    """
    measurements, step_s = record.measurements, step_ms / MS_PER_S
    items = sum(m.items_per_step for m in measurements if m.items_per_step)
    # Take the maximum over ranks, because a rank may have nothing to do but wait.
    message_bytes = combine_ranks("max", [m.message_bytes for m in measurements])
    memory_bytes = combine_ranks("max", [m.memory_bytes for m in measurements])
    algbw_gb_s = _rate(message_bytes, step_s, BYTES_PER_GB)
    busbw_factor = measurements[0].busbw_factor
    busbw_gb_s = None
    if algbw_gb_s is not None and busbw_factor is not None:
        busbw_gb_s = algbw_gb_s * busbw_factor
    flops = combine_ranks("max", [m.flops_per_step for m in measurements])
    model_flops = combine_ranks("max", [m.model_flops_per_step for m in measurements])
    achieved_tflops = _rate(flops, step_s, FLOP_PER_TFLOP)
    gemm_tflops = combine_ranks("min", [m.gemm_tflops for m in measurements])
    # Only points without a batch, such as matrix products, have a burst.
    burst_ms = _burst_ms(measurements) if record.point.batch_size is None else None
    # MFU refers to the lowest peak of the devices, if the peaks of all devices are known.
    names = [device.name for device in record.devices if device.kind == "cuda"]
    peaks = [dense_peak_tflops(name, record.point.precision) for name in names]
    peak = min(filter(None, peaks), default=None) if all(peaks) else None
    return RateColumns(
        throughput=_rate(items or None, step_s),
        achieved_tflops_per_device=achieved_tflops,
        gemm_tflops_per_device=gemm_tflops,
        burst_tflops_per_device=_rate(flops, (burst_ms or 0.0) / MS_PER_S, FLOP_PER_TFLOP),
        mfu_pct=_percent(achieved_tflops, peak),
        mfu_6n_pct=_percent(_rate(model_flops, step_s, FLOP_PER_TFLOP), peak),
        gemm_share_pct=_percent(achieved_tflops, gemm_tflops),
        algbw_gb_s=algbw_gb_s,
        busbw_gb_s=busbw_gb_s,
        memory_gb_s=_rate(memory_bytes, step_s, BYTES_PER_GB),
    )


def _burst_ms(measurements: Sequence[Measurement]) -> float | None:
    """Return the median step of the slowest rank in its burst; None if the warm-up is too short."""
    medians_ms = []
    for measurement in measurements:
        # The first step is a cold start, so it is left out.
        steps_ms = [ns / NS_PER_MS for ns in measurement.repetitions[0].warmup.step_ns[1:]]
        steps_in_burst = sum(end_ms <= _BURST_MS for end_ms in accumulate(steps_ms))
        burst_steps_ms = steps_ms[: max(_MIN_BURST_STEPS, steps_in_burst)]
        if len(burst_steps_ms) < _MIN_BURST_STEPS:
            return None
        medians_ms.append(statistics.median(burst_steps_ms))
    return max(medians_ms)


def _rate(amount: float | None, step_s: float, unit: float = 1.0) -> float | None:
    """Return the amount of a step per second, in multiples of `unit`; None if unknown."""
    return amount / step_s / unit if amount is not None and step_s > 0 else None


def _percent(part: float | None, whole: float | None) -> float | None:
    return part / whole * 100 if part is not None and whole else None


def relate_to_step(
    over_step: OverStep | None, value: float | None, *, typical_ms: float, mean_ms: float
) -> float | None:
    """Return a metric of the point from its value per step; None for a division by zero.

    Args:
        over_step: as in `Metric`; None leaves the value unchanged.
        typical_ms: median step.
        mean_ms: mean step.
    """
    if over_step is None or value is None:
        return value
    mean_s = mean_ms / MS_PER_S
    if over_step == "seconds":
        return value * mean_s
    if over_step == "per_second":
        return value / mean_s if mean_s else None
    if over_step == "share":
        return value / typical_ms if typical_ms else None
    # "ms_each": the time of each of the `value` things of a step.
    return typical_ms / value if value else None


@dataclass(frozen=True, kw_only=True)
class ConditionColumns:
    """What devices and libraries did while the point was measured."""

    throttled: Annotated[bool | None, Column("", "clocks were held down")] = None
    throttle_reasons: Annotated[tuple[str, ...] | None, Column("", "why, as NVML names it")] = None
    sm_clock_mhz_p50: Annotated[
        float | None, Column("MHz", "median while timed, slowest device")
    ] = None
    transports: Annotated[
        tuple[str, ...] | None, Column("", "ways of the bytes between ranks, as NCCL names them")
    ] = None
    nccl_choices: Annotated[
        tuple[str, ...] | None,
        Column(
            "",
            "what NCCL ran for collectives, by its log",
            heading="NCCL ran",
            meaning="algorithm and protocol of the collectives, from NCCL's own log",
            format="choices",
        ),
    ] = None
    attention_kernels: Annotated[
        tuple[str, ...] | None, Column("", "of torch's, those that a step ran")
    ] = None


def condition_columns(measurements: Sequence[Measurement]) -> ConditionColumns:
    """Return the conditions of all ranks; the clock is None unless all ranks know their clock."""
    # Flags of each repetition; empty if clocks were not sampled.
    throttled = [repetition.timed.throttled for m in measurements for repetition in m.repetitions]
    has_flags = any(throttled)
    reasons = dict.fromkeys(chain(*(m.throttle_reasons for m in measurements)))
    clocks = [statistics.median(m.sm_clocks_mhz) for m in measurements if m.sm_clocks_mhz]
    transports = set(chain(*(m.transports for m in measurements)))
    nccl_choices = dict.fromkeys(chain(*(m.nccl_choices for m in measurements)))
    attention_kernels = set(chain(*(m.attention_kernels for m in measurements)))
    return ConditionColumns(
        throttled=any(map(any, throttled)) if has_flags else None,
        throttle_reasons=tuple(reasons) if has_flags else None,
        # The slowest device sets the pace.
        sm_clock_mhz_p50=min(clocks) if clocks and len(clocks) == len(measurements) else None,
        transports=tuple(sorted(transports)) or None,
        nccl_choices=tuple(nccl_choices) or None,
        attention_kernels=tuple(sorted(attention_kernels)) or None,
    )


def crowding(devices: Sequence[Device]) -> Iterator[Doubt]:
    """Yield a doubt for each host with more CPU workers than cores."""
    hosts: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        if device.kind == "cpu":
            hosts.setdefault((device.host, device.address), []).append(device)
    for (host, _), workers in hosts.items():
        cores = max(worker.cpu_count for worker in workers)
        if len(workers) > cores:
            yield Doubt(kind=DoubtKind.CROWDED, value=len(workers), limit=cores, subject=host)


@dataclass(frozen=True, kw_only=True)
class MemoryColumns:
    """The parts of the peak memory, for the rank with the largest peak."""

    mem_parameters_bytes: Annotated[
        int | None,
        Column("bytes", "parameters and buffers of the model", heading="params", format="gib"),
    ] = None
    mem_gradients_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "gradients at the peak",
            heading="grads",
            meaning="gradients at the peak; 0 if the peak comes before the backward pass",
            format="gib",
        ),
    ] = None
    mem_optimizer_bytes: Annotated[
        int | None, Column("bytes", "state of the optimizer", heading="state", format="gib")
    ] = None
    mem_activations_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "activations and temporary buffers of the step",
            heading="acts",
            format="gib",
        ),
    ] = None
    mem_other_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "other memory from before the step: data, DDP's buckets",
            heading="other",
            format="gib",
        ),
    ] = None
    mem_estimate_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "peak predicted from the settings before the point ran",
            heading="estimate",
            format="gib",
        ),
    ] = None


def memory_columns(record: Record) -> MemoryColumns:
    """Return the estimate; with a breakdown of every rank, also the parts of the largest peak."""
    breakdowns = [m.breakdown for m in record.measurements if m.breakdown is not None]
    peaks = [b.peak for b in breakdowns if b.peak is not None]
    if not peaks or len(breakdowns) < len(record.measurements):
        return MemoryColumns(mem_estimate_bytes=record.mem_estimate_bytes)
    largest_peak = max(map(asdict, peaks), key=lambda peak: sum(peak.values()))
    columns = {f"mem_{part}": part_bytes for part, part_bytes in largest_peak.items()}
    return MemoryColumns(mem_estimate_bytes=record.mem_estimate_bytes, **columns)


def dense_peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the datasheet's peak rate in TFLOP/s without sparsity; None if unknown.

    Args:
        device_name: as `torch.cuda.get_device_name` returns it.
        precision: as in job files.
    """
    return _datasheet(device_name).tflops.get(precision)


def memory_peak_gb_s(device_name: str) -> float | None:
    """Return the datasheet's memory bandwidth in GB/s; None if unknown."""
    return _datasheet(device_name).memory_gb_s


def nvlink_peak_gb_s(device_name: str) -> float | None:
    """Return the datasheet's bandwidth of all NVLinks in one direction, in GB/s.

    None if unknown.
    """
    both_directions = _datasheet(device_name).nvlink_gb_s
    return None if both_directions is None else both_directions / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Datasheet:
    """The peaks of one device model."""

    # Dense peak rate in TFLOP/s by precision.
    tflops: Mapping[str, float] = field(default_factory=dict)
    memory_gb_s: float | None = None
    # All NVLinks, both directions.
    nvlink_gb_s: float | None = None


def _datasheet(device_name: str) -> _Datasheet:
    """Return the datasheet of a device; an empty datasheet if the device is unknown."""
    # Drivers before 460 omit the manufacturer.
    return _datasheets().get(device_name.removeprefix("NVIDIA "), _Datasheet())


@cache
def _datasheets() -> Mapping[str, _Datasheet]:
    """Return the datasheets by device model, without the manufacturer."""
    text = resources.files("raybench.results").joinpath("peaks.yaml").read_text("utf-8")
    datasheets = {}
    for chip in YAML(typ="safe", pure=True).load(text):
        for model, memory_gb_s in chip["memory_gb_s"].items():
            datasheets[model] = _Datasheet(
                tflops=chip["tflops"],
                memory_gb_s=memory_gb_s,
                nvlink_gb_s=chip.get("nvlink_gb_s", {}).get(model),
            )
    return datasheets
