"""The row of a point, typed: one field for each column of the table `points`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Annotated, Any

from raybench.job.point import RUN_SETTINGS
from raybench.records import Status
from raybench.records.metric import Column


def setting_column(name: str) -> Column:
    """Return the column of a run setting, as `raybench.job.point` declares it."""
    about = RUN_SETTINGS[name].about
    return Column(about.unit, about.column)


class TransitionalMapping(Mapping[str, Any]):
    """Read a row also as a mapping, as long as reports look into it by name."""

    def __getitem__(self, name: str) -> Any:
        """Return the value of a field. Raises KeyError where there is no such field."""
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the fields, in the order of their columns."""
        return (one.name for one in fields(self))  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Return the number of fields."""
        return len(fields(self))  # type: ignore[arg-type]

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dictionary of the fields and of `other`."""
        return {**self, **other}


@dataclass(frozen=True, kw_only=True)
class PointColumns:
    """Which point it is, and how the attempt ended."""

    run_id: Annotated[str, Column("", "id of the run")]
    point_id: Annotated[str, Column("", "id of the point")]
    attempt: Annotated[int, Column("", "counts from 1, over all rounds")]
    round: Annotated[int | None, Column("", "counts from 1; null: one round")] = None
    is_control: Annotated[bool, Column("", "baseline point again, at the end of a block")] = False
    control_of: Annotated[int | None, Column("", "world_size of the block that it ends")] = None
    status: Annotated[Status, Column("", "ok, oom, error, timeout, lost, skipped, cancelled")]
    error_type: Annotated[str | None, Column("", "class of the exception")] = None
    error_message: Annotated[str | None, Column("", "why it is not ok")] = None
    error_rank: Annotated[int | None, Column("", "rank that failed first")] = None
    error_host: Annotated[str | None, Column("", "host of that rank")] = None
    error_device: Annotated[str | None, Column("", "its device, as in cuda:3")] = None
    error_detail: Annotated[str | None, Column("", "end of its traceback or log")] = None
    started_at: Annotated[datetime, Column("UTC", "start")]
    duration_s: Annotated[float | None, Column("s", "of the whole attempt")] = None
    workload: Annotated[str, Column("", "name or class")] = ""
    params: Annotated[
        Mapping[str, str], Column("", "parameters of the workload and variables of env, as text")
    ] = field(default_factory=dict)
    env: Annotated[Mapping[str, str], Column("", "variables that the job set")] = field(
        default_factory=dict
    )
    workload_sha256: Annotated[str | None, Column("", "its source")] = None
    raybench_sha256: Annotated[str | None, Column("", "raybench's source")] = None
    backend: Annotated[str | None, Column("", "null for 1 rank")] = None
    device_type: Annotated[str | None, Column("", "cuda or cpu")] = None
    device_name: Annotated[str | None, Column("", "model")] = None
    world_size: Annotated[int, setting_column("world_size")] = 1
    node_count: Annotated[int | None, Column("", "nodes used")] = None
    precision: Annotated[str, setting_column("precision")] = "fp32"
    scaling: Annotated[str | None, Column("", "weak or strong")] = None
    cuda_graph: Annotated[bool, setting_column("cuda_graph")] = False
    shares: Annotated[str, setting_column("shares")] = "equal"
    slow_ratio: Annotated[float, setting_column("slow_ratio")] = 1.0
    slow_count: Annotated[int, setting_column("slow_count")] = 1
    slow_by: Annotated[str, setting_column("slow_by")] = "compute"
    devices: Annotated[str, setting_column("devices")] = "any"
    strategy: Annotated[str, setting_column("strategy")] = "pack"
    batch_size: Annotated[int | None, setting_column("batch_size")] = None
    global_batch_size: Annotated[int | None, setting_column("global_batch_size")] = None
    grad_accumulation: Annotated[int | None, Column("", "passes per step")] = None


@dataclass(frozen=True, kw_only=True)
class StepColumns:
    """How long steps take, and over how many of them that is."""

    setup_s: Annotated[
        float | None, Column("s", "process group and model, slowest rank", over_ranks="max")
    ] = None
    repeats: Annotated[int | None, Column("", "builds of the workload")] = None
    warmup_iterations: Annotated[int | None, Column("", "done")] = None
    iterations: Annotated[int | None, Column("", "timed samples")] = None
    inner_iterations: Annotated[int | None, Column("", "steps per timed sample")] = None
    step_ms_mean: Annotated[float | None, Column("ms", "whole time over its steps")] = None
    step_ms_p50: Annotated[
        float | None, Column("ms", "median step time, since version 5 not of maxima")
    ] = None
    step_ms_p90: Annotated[float | None, Column("ms", "90th percentile")] = None
    step_ms_p95: Annotated[float | None, Column("ms", "95th percentile")] = None
    step_ms_p99: Annotated[
        float | None,
        Column(
            "ms",
            "99th percentile",
            heading="p99",
            meaning="the 99th percentile of the iterations",
            format="time",
        ),
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
    step_ms_repeat_std: Annotated[float | None, Column("ms", "of the repeats' medians")] = None
    autocorrelation: Annotated[float | None, Column("", "of successive step times")] = None
    skew_ms_p50: Annotated[float | None, Column("ms", "slowest less fastest rank, median")] = None
    stable: Annotated[bool | None, Column("", "the level stays; null: too few steps")] = None
    first_step_ms: Annotated[
        float | None,
        Column(
            "ms",
            "first step after the build, slowest rank",
            heading="first",
            meaning="the first step after the workload was built, on the slowest rank",
            format="time",
        ),
    ] = None
    compiled_step_ms: Annotated[
        float | None,
        Column(
            "ms",
            "first step after torch.compile, slowest rank",
            heading="compiled",
            meaning="the first step after the last compiling one, on the slowest rank",
            format="time",
        ),
    ] = None
    new_processes: Annotated[
        bool | None, Column("", "they had run no point before: a first step is cold")
    ] = None
    data_ms: Annotated[
        float | None,
        Column(
            "ms",
            "waiting for the next batch",
            heading="data",
            meaning="the host waits for the next batch",
            format="part",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RateColumns:
    """What a step finishes, computes and moves, over its time."""

    throughput: Annotated[
        float | None,
        Column(
            "samples/s",
            "of all ranks; since version 5 by the mean",
            heading="samples/s",
            meaning="all {ranks} together",
        ),
    ] = None
    flops_per_step: Annotated[
        float | None, Column("FLOP", "of one device and optimizer step", over_ranks="max")
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
            "%",
            "of the datasheet's peak",
            heading="MFU",
            meaning="TFLOP/s as a share of the datasheet's dense peak",
            format="percent",
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
        Column(
            "GB/s",
            "size over time, as nccl-tests",
            heading="algbw GB/s",
            meaning="bytes over step time, as nccl-tests counts them",
        ),
    ] = None
    busbw_gb_s: Annotated[
        float | None,
        Column(
            "GB/s",
            "bus bandwidth, as nccl-tests",
            heading="busbw GB/s",
            meaning="algbw times the operation's factor, as nccl-tests counts it",
        ),
    ] = None
    memory_gb_s: Annotated[
        float | None,
        Column(
            "GB/s",
            "read and written, per device",
            heading="memory GB/s",
            meaning="bytes read and written over step time",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DeviceColumns:
    """The devices and their libraries meanwhile."""

    throttled: Annotated[bool | None, Column("", "clocks were held down")] = None
    throttle_reasons: Annotated[tuple[str, ...] | None, Column("", "why, as NVML names it")] = None
    sm_clock_mhz_p50: Annotated[
        float | None, Column("MHz", "median while timed, slowest device")
    ] = None
    energy_j: Annotated[float | None, Column("J", "all devices, timed steps", over_ranks="sum")] = (
        None
    )
    energy_j_error: Annotated[float | None, Column("J", "of it, ±")] = None
    transports: Annotated[
        tuple[str, ...] | None, Column("", "ways of the bytes between ranks, as NCCL names them")
    ] = None
    nccl_choices: Annotated[
        tuple[str, ...] | None,
        Column(
            "",
            "what NCCL ran for collectives, by its log",
            heading="NCCL ran",
            meaning="algorithm and protocol of the collectives of a step, by NCCL's own log",
            format="choices",
        ),
    ] = None
    attention_kernels: Annotated[
        tuple[str, ...] | None, Column("", "of torch's, those that a step ran")
    ] = None


@dataclass(frozen=True, kw_only=True)
class MemoryColumns:
    """Memory of the rank that needs most."""

    peak_mem_allocated_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "by tensors, largest rank",
            heading="GiB",
            meaning="peak memory allocated on the device that needs most",
            format="gib",
            over_ranks="max",
        ),
    ] = None
    peak_mem_reserved_bytes: Annotated[
        int | None, Column("bytes", "by torch's allocator, largest rank", over_ranks="max")
    ] = None
    alloc_retries: Annotated[
        int | None,
        Column("", "allocator ran out in the timed steps, largest rank", over_ranks="max"),
    ] = None
    device_allocs: Annotated[
        int | None,
        Column("", "cudaMalloc calls in the timed steps, largest rank", over_ranks="max"),
    ] = None
    mem_parameters_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "at the peak, with buffers",
            heading="params",
            meaning="parameters and buffers of the model",
            format="gib",
        ),
    ] = None
    mem_gradients_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "there at the peak",
            heading="grads",
            meaning="gradients that are there then",
            format="gib",
        ),
    ] = None
    mem_optimizer_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "state of optimizers",
            heading="state",
            meaning="the optimizer's state",
            format="gib",
        ),
    ] = None
    mem_activations_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "added by the step, temporary too",
            heading="acts",
            meaning="activations, and what else the step adds",
            format="gib",
        ),
    ] = None
    mem_other_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "at the start of the step",
            heading="other",
            meaning="what else was there before: data, buckets",
            format="gib",
        ),
    ] = None
    mem_estimate_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "of the peak, from the settings, before it ran",
            heading="estimate",
            meaning="what was estimated of the peak before the point ran, from its settings alone",
            format="gib",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PartColumns:
    """Where the step goes, from steps that were run after the timed ones."""

    slowest_rank: Annotated[int | None, Column("", "rank that is slower than the others")] = None
    host_bound: Annotated[bool | None, Column("", "the GPU waits for the host")] = None
    local_step_ms: Annotated[float | None, Column("ms", "step without communication")] = None
    compute_ms: Annotated[
        float | None,
        Column(
            "ms",
            "forward and backward pass",
            heading="compute",
            meaning="the device's forward and backward pass, with DDP's work on gradients",
            format="part",
        ),
    ] = None
    comm_ms: Annotated[float | None, Column("ms", "collectives from start to end")] = None
    comm_exposed_ms: Annotated[
        float | None,
        Column(
            "ms",
            "step less the slowest rank's local step",
            heading="comm",
            meaning="the step beyond the slowest rank's own, communication that nothing hides",
            format="part",
        ),
    ] = None
    straggler_ms: Annotated[
        float | None,
        Column(
            "ms",
            "slowest rank's local step less the others'",
            heading="late",
            meaning="how much longer the slowest rank's own step is than the others'; it is in the "
            "other parts",
            format="part",
        ),
    ] = None
    straggler_error_ms: Annotated[float | None, Column("ms", "standard error of straggler_ms")] = (
        None
    )
    straggler_device_ms: Annotated[
        float | None, Column("ms", "part of straggler_ms on the device")
    ] = None
    late_in_turn_ms: Annotated[
        float | None, Column("ms", "cost of ranks that are late in turn")
    ] = None
    hooked_step_ms: Annotated[float | None, Column("ms", "step with timed communication")] = None
    local_step_drift_ms: Annotated[
        float | None, Column("ms", "later local steps less first ones")
    ] = None
    wait_ms: Annotated[float | None, Column("ms", "for the slowest rank")] = None
    optimizer_ms: Annotated[
        float | None,
        Column("ms", "optimizer step", heading="optim", meaning="the optimizer", format="part"),
    ] = None
    host_gap_ms: Annotated[
        float | None,
        Column(
            "ms",
            "device idle, the host is late",
            heading="idle",
            meaning="the device waits for the host",
            format="part",
        ),
    ] = None
    local_step_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "median local step, in rank order")
    ] = None
    device_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "its work on the device, in rank order")
    ] = None
    wall_unsynced_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "host clock around a step, not waited for")
    ] = None
    wall_synced_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "the same, waited for")
    ] = None
    local_copy_ms: Annotated[
        float | None, Column("ms", "copies for collectives, in local_step_ms")
    ] = None
    comm_calls: Annotated[
        Mapping[str, int] | None, Column("", "collectives a step by kind, largest rank")
    ] = None
    comm_bytes: Annotated[
        Mapping[str, int] | None, Column("bytes", "their messages, as nccl-tests counts")
    ] = None
    comm_busbw_gb_s: Annotated[
        Mapping[str, float] | None, Column("GB/s", "inside the step, by kind")
    ] = None
    methods: Annotated[Mapping[str, str] | None, Column("", "column -> how it was measured")] = None


@dataclass(frozen=True, kw_only=True)
class UnevenColumns:
    """How a step is shared out among ranks that differ."""

    share_by_rank: Annotated[
        tuple[int, ...] | None, Column("samples", "of a step, where shares are uneven")
    ] = None
    own_step_ms_by_rank: Annotated[
        tuple[float | None, ...] | None,
        Column("ms", "alone with its share, before; null: no share"),
    ] = None
    fixed_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "of a step, by a probe of the device alone")
    ] = None
    fixed_ms_error_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "standard error of it")
    ] = None
    speed_by_rank: Annotated[
        tuple[float, ...] | None, Column("samples/s", "of further samples, by the probe")
    ] = None
    speed_error_by_rank: Annotated[
        tuple[float, ...] | None, Column("samples/s", "standard error of it")
    ] = None
    slow_ratio_by_rank: Annotated[
        tuple[float | None, ...] | None, Column("", "measured, of emulated devices; null: none")
    ] = None
    exchange_ms: Annotated[
        float | None, Column("ms", "what an exchange adds to a balanced step")
    ] = None
    predicted_step_ms: Annotated[
        float | None, Column("ms", "longest own step and the exchange")
    ] = None
    crossover_batch: Annotated[
        float | None, Column("samples", "global; above it by_speed beats fast")
    ] = None
    gradient_error: Annotated[
        float | None, Column("", "to one process over all samples, relative", over_ranks="max")
    ] = None


@dataclass(frozen=True, kw_only=True)
class PointRow(
    UnevenColumns,
    PartColumns,
    MemoryColumns,
    DeviceColumns,
    RateColumns,
    StepColumns,
    PointColumns,
    TransitionalMapping,
):
    """One row of the table `points`: an attempt at a point, or the mean of its rounds.

    None: not known, or the metric does not apply.
    """

    workload_metrics: Annotated[
        Mapping[str, float] | None, Column("", "those that the workload declares")
    ] = None
    workload_headings: Annotated[
        Mapping[str, str] | None, Column("", "their headings, with the units")
    ] = None
    warnings: Annotated[tuple[str, ...], Column("", "reasons to doubt the figures")] = ()
    neighbours: Annotated[tuple[str, ...], Column("", "points, runs and processes beside it")] = ()
    crowded: Annotated[bool | None, Column("", "CPU workers share cores")] = None
    quick: Annotated[bool | None, Column("", "a short look: min_seconds is 0")] = None
    models_by_rank: Annotated[
        tuple[str, ...] | None, Column("", "models of the devices, in rank order")
    ] = None
