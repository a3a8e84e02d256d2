"""The answer of a rank for a point: a measurement or a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from raybench.records.doubts import Doubt, NotMeasured
from raybench.records.hang import HangVerdict
from raybench.records.metrics import Column, Metric
from raybench.records.status import Cause, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Consecutive iterations on one rank; every tuple has one entry per iteration.

    With inner loops, an entry is the mean of the steps of one loop.
    """

    # Start of the iteration, relative to the start of the point on this rank; for a script, to the
    # start of its process.
    start_ns: tuple[int, ...] = ()
    # Duration by CUDA events on a GPU, by the host's clock on a CPU.
    step_ns: tuple[int, ...] = ()
    # Time that the host needs to issue the iteration; equals `step_ns` on a CPU.
    host_ns: tuple[int, ...] = ()
    # Host time in each named part of the step, such as {"data": ...}.
    part_ns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Whether clocks were limited in the block of the iteration; empty if unknown.
    throttled: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """One build of the workload, warmed up and timed."""

    # Warm-up steps, then timed samples that were dropped because the step time drifted.
    warmup: Samples
    timed: Samples
    # Steps in each timed sample.
    inner_iterations: int = 1
    # Warm-up steps until torch.compile stopped compiling; 0 if it compiled nothing.
    compiling_steps: int = 0
    # Whether the step time had settled; None after too few steps.
    settled: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTime:
    """Time in one named region of the step, the median over instrumented steps."""

    name: str
    # Largest number of calls in a step.
    calls: int
    ms: float
    # `ms` relative to the step.
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Data per rank and step, for one kind of collective."""

    kind: str
    # Size of the process groups.
    ranks: int
    calls: int
    # Sum over all calls; message sizes as in nccl-tests.
    message_bytes: int
    # `message_bytes` times the busbw factor of nccl-tests.
    bus_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakParts:
    """Parts of a rank's memory at its peak, as torch's allocator counts."""

    # Parameters and buffers of the model.
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    # All other memory that the step adds, temporary memory included.
    activations_bytes: int
    # Data, buckets, workspaces.
    other_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The parts of a rank's step, measured in extra steps after the timed steps.

    With inner loops, an entry of `local_ms` and `hooked_ms` is the mean of a loop; `comm_ms` and
    `tail_ms` have an entry for each step.
    """

    # Durations of steps without communication, in two blocks: before and after the queued steps.
    local_ms: tuple[tuple[float, ...], ...] = ()
    # Median duration on the device of a queued step, which the host issued before the device began.
    device_ms: float | None = None
    # Median time of the optimizer in a queued step.
    optimizer_ms: float | None = None
    # Durations of hooked steps, in which communication was timed.
    hooked_ms: tuple[float, ...] = ()
    # Time in collectives in each hooked step, waits for other ranks included.
    comm_ms: tuple[float, ...] = ()
    # Time from the last gradient to the end of the last collective, in each hooked step.
    tail_ms: tuple[float, ...] = ()
    # Empty if the step sends nothing, or if unknown.
    traffic: tuple[Traffic, ...] = ()
    peak: PeakParts | None = None
    regions: tuple[RegionTime, ...] = ()
    # Column or region -> how it was measured.
    methods: Mapping[str, str] = field(default_factory=dict)
    not_measured: Mapping[str, NotMeasured] = field(default_factory=dict)
    doubts: tuple[Doubt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTime:
    """Time per step in one module of the model, its children included."""

    # Name in `named_modules`.
    name: Annotated[str, Column("", "name in the model", name="module")]
    kind: Annotated[str, Column("", "class")]
    calls: Annotated[int, Column("", "per step")]
    forward_ms: Annotated[float, Column("ms", "per step")]
    # None without a backward pass.
    backward_ms: Annotated[float | None, Column("ms", "per step")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A trace and the times of the modules, which `--profile` adds to a measurement."""

    # Chrome trace JSON, compressed by gzip.
    trace: bytes
    modules: tuple[ModuleTime, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """A rank's share of an uneven step, and the probe of its device."""

    # Samples in a step; 0 if the rank does nothing.
    items: int
    # Step time of the probe is `fixed_ms` + items / `items_per_s`.
    fixed_ms: float
    items_per_s: float
    # Speed of a device that is slowed for emulation, relative to its full speed; None: full speed.
    slow_ratio: float | None
    # Time that the exchange of gradients adds to a step with equal shares.
    exchange_ms: float
    # Longest step of a rank alone, plus `exchange_ms`.
    predicted_step_ms: float
    # Global batch above which all devices together beat the fast devices; None: no such batch.
    crossover_batch: float | None
    # Relative difference to the gradients of one process over all samples; None: unknown.
    gradient_error: float | None


# Begin and end by the monotonic clock, which all processes of a host share.
SpanNs = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RankMetrics:
    """Metrics of a rank that the table `points` combines over ranks; None if unknown.

    A new metric of this kind needs only a field here and the code that measures it.
    """

    setup_s: Annotated[
        float | None, Column("s", "process group and model, slowest rank", over_ranks="max")
    ] = None
    heated_s: Annotated[
        float | None, Column("s", "steps before the warm-up, to heat the devices", over_ranks="max")
    ] = None
    flops_per_step: Annotated[
        float | None, Column("FLOP", "of one device and optimizer step", over_ranks="max")
    ] = None
    # None if a timed phase is shorter than 2 s.
    energy_j: Annotated[float | None, Column("J", "all devices, timed steps", over_ranks="sum")] = (
        None
    )
    peak_mem_allocated_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "peak memory allocated on the device that needs most",
            heading="GiB",
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
    gradient_error: Annotated[
        float | None, Column("", "to one process over all samples, relative", over_ranks="max")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Measurement(RankMetrics):
    """The measurement of one rank for one point."""

    rank: int
    repetitions: tuple[Repetition, ...]
    # Samples (rows, sequences) that this rank finishes in a step; a fraction if several ranks share
    # one sample. None if the workload has no such number.
    items_per_step: float | None
    # Whether the process had run no point before; None for a script.
    is_of_new_process: bool | None = None
    # Message size of a workload that is one collective, as nccl-tests counts.
    message_bytes: int | None = None
    busbw_factor: float | None = None
    # Bytes that a step reads and writes.
    memory_bytes: int | None = None
    # FLOP as in papers on MFU: 6 per parameter and token.
    model_flops_per_step: float | None = None
    # Rate of large matrix products on this device in the precision of the point.
    gemm_tflops: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    # After the timed steps, in degrees Celsius; None unless the clocks were limited.
    temperature_c: float | None = None
    timed_at_ns: tuple[SpanNs, ...] = ()
    # Sampled by another process during the timed blocks; empty if unknown.
    sm_clocks_mhz: tuple[int, ...] = ()
    breakdown: Breakdown | None = None
    profile: Profile | None = None
    workload_metrics: Mapping[Metric, float] = field(default_factory=dict)
    share: RankShare | None = None
    transports: tuple[str, ...] = ()
    nccl_choices: tuple[str, ...] = ()
    attention_kernels: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    # Whether the process can run the next point like a new process.
    worker_reusable: bool = True
    output: str = ""
    # Ids of the ended processes of the rank's script.
    ended_processes: tuple[int, ...] = ()

    @property
    def step_ns(self) -> tuple[int, ...]:
        """The timed samples of all repeats, one after another, in ns per step."""
        return tuple(ns for repetition in self.repetitions for ns in repetition.timed.step_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank has no measurement."""

    rank: int
    status: Status
    # A `Cause`, or the class name of an exception.
    error_type: str
    message: str
    # Traceback or end of the log.
    detail: str = ""
    # Whether the process can run the next point; False if unknown.
    worker_reusable: bool = False
    # As in `Measurement`.
    output: str = ""
    ended_processes: tuple[int, ...] = ()
    hang: HangVerdict | None = None

    @classmethod
    def of(cls, cause: Cause, *, rank: int, message: str, **more: Any) -> Self:
        """Return a failure with the status of its cause."""
        return cls(rank=rank, status=cause.status, error_type=cause, message=message, **more)


RankAnswer = Measurement | Failure
