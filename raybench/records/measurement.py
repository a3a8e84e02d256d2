"""What one rank answers for a point: its measurement, or why it has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from raybench.records.doubts import Doubt, NotMeasured
from raybench.records.metrics import Column, Metric
from raybench.records.status import Cause, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Consecutive iterations on one rank; every tuple has one entry per iteration.

    start_ns: start of the iteration, since this rank began the point, or a script its process.
    step_ns: its duration (CUDA events on a GPU, the host's clock on a CPU).
    host_ns: how long the host took to issue it; equals step_ns on a CPU.
    part_ns: host time spent in each named part of the step, e.g. {"data": ...}.
    throttled: whether the device held its clocks down in its block of steps; empty if not known.

    Where steps are timed in inner loops, an entry is the mean of the steps of one loop.
    """

    start_ns: tuple[int, ...] = ()
    step_ns: tuple[int, ...] = ()
    host_ns: tuple[int, ...] = ()
    part_ns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    throttled: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """One build of the workload, warmed up and timed.

    warmup: single steps, then those timed samples that were dropped because the step time drifted.
    inner_iterations: steps in each timed sample.
    settled: whether the step time stayed at one level; None where the steps are too few to tell.
    compiling_steps: of the warm-up, until torch.compile compiled no more; 0 where it compiled none.
    """

    warmup: Samples
    timed: Samples
    inner_iterations: int = 1
    compiling_steps: int = 0
    settled: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTime:
    """Time per step in one region of the step, the median over instrumented steps.

    name: as the step gives it. calls: how often a step entered it, at most. share: of a step.
    """

    name: str
    calls: int
    ms: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank sends in a step by one kind of collective, in groups of so many `ranks`.

    message_bytes: of all calls, as nccl-tests counts them. bus_bytes: times its factor of busbw.
    """

    kind: str
    ranks: int
    calls: int
    message_bytes: int
    bus_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakParts:
    """What one rank's memory is made of when a step has it largest, as torch's allocator counts.

    parameters_bytes: with buffers. gradients_bytes: those that are there then. activations_bytes:
    all else that the step adds, temporary memory included. other_bytes: data, buckets, workspaces.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WallTimes:
    """A step by the host's clock, in ms, median of steps that an idle device begins.

    unsynced_ms: until the host has issued it. synced_ms: until the device is done.
    """

    unsynced_ms: float
    synced_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where one rank's step goes, from steps that were run after the timed ones.

    local_ms: steps without communication, at this rank's own speed, in blocks: the first half of
    them before the queued steps, the second after them.
    device_ms: median time the device needs for such a step when its work is queued beforehand.
    optimizer_ms: median time of the optimizer's part of it.
    hooked_ms: steps with timed communication, as long as they took themselves.
    comm_ms: the time that collectives took in each of these, waits for peers included.
    tail_ms: in each of these, from the last gradient being ready to the last collective's end.
    traffic: what a step sends, by kind; empty where it sends nothing, or that is not known.
    peak: what the memory is made of; None where that is not known.
    regions: parts that the step names itself, in the order in which it entered them.
    wall: the step by the host's clock; None where that is the samples' own, or not known.
    methods: how each column of `points` and the regions were got.
    not_measured: why columns are missing.
    doubts: what went wrong meanwhile.

    Where steps are timed in inner loops, an entry of local_ms and hooked_ms is the mean of a loop;
    comm_ms and tail_ms still have one for each single step.
    """

    local_ms: tuple[tuple[float, ...], ...] = ()
    device_ms: float | None = None
    optimizer_ms: float | None = None
    hooked_ms: tuple[float, ...] = ()
    comm_ms: tuple[float, ...] = ()
    tail_ms: tuple[float, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    peak: PeakParts | None = None
    regions: tuple[RegionTime, ...] = ()
    wall: WallTimes | None = None
    methods: Mapping[str, str] = field(default_factory=dict)
    not_measured: Mapping[str, NotMeasured] = field(default_factory=dict)
    doubts: tuple[Doubt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTime:
    """Time per step in one module of the model, its children included.

    name: as `named_modules` gives it. backward_ms: of steps with a backward pass; None if none.
    """

    name: Annotated[str, Column("", "name in the model", name="module")]
    kind: Annotated[str, Column("", "class")]
    calls: Annotated[int, Column("", "per step")]
    forward_ms: Annotated[float, Column("ms", "per step")]
    backward_ms: Annotated[float | None, Column("ms", "per step")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What `--profile` adds. trace: Chrome trace JSON, compressed by gzip."""

    trace: bytes
    modules: tuple[ModuleTime, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What a rank does of an uneven step, and what a probe found of its device beforehand.

    items: samples of a step; 0 where the rank has nothing to do.
    fixed_ms, items_per_s: of the line through the probe's steps of several sizes.
    slow_ratio: the share of its speed that emulation has left the device; None: it is not slowed.
    exchange_ms: what the exchange of gradients adds to a step of equal shares on devices that are
    not slowed; among the fast ranks if any rank has no items, else among all.
    predicted_step_ms: the longest step of a rank alone, and the exchange.
    crossover_batch: see stats.shares; None where there is none.
    gradient_error: difference to the gradients of one process over all samples; None: not known.
    """

    items: int
    fixed_ms: float
    items_per_s: float
    slow_ratio: float | None
    exchange_ms: float
    predicted_step_ms: float
    crossover_batch: float | None
    gradient_error: float | None


# Begin and end by the host's monotonic clock, which all of its processes share.
SpanNs = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RankMetrics:
    """What each rank tells of a point, and `points` holds of all ranks together.

    A field here is all that a new number of this kind needs, beside the code that measures it: its
    column, and how ranks are combined (`over_ranks`). None where it is not known.
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
    """One rank's answer for one point.

    items_per_step: samples (rows, sequences) that this rank finished in one iteration, its part of
    what ranks finish together; None if the workload tells none.
    setup_s: forming the process group, the first build of the workload, and the wait until the
    clocks are free of limits; outside the samples.
    is_of_new_process: the process had run no point before; None where the steps are another's.
    peak_mem_allocated_bytes: largest of tensors in timed steps. peak_mem_reserved_bytes: largest of
    torch's allocator, from the build on, without peaks of checks. Both None on a CPU.
    alloc_retries, device_allocs: of that allocator in the timed blocks: how often it ran out and
    gave back what it had kept, and how often it asked the driver for memory.
    message_bytes, busbw_factor: of a collective, as nccl-tests counts them.
    memory_bytes: what one step reads from and writes to memory.
    flops_per_step: floating-point operations of this rank's step. model_flops_per_step: the same as
    papers on MFU count them, 6 for each parameter and token.
    gemm_tflops: what this device reaches in large matrix products of the point's precision.
    energy_j: of the device in all timed steps, without lead-in steps and pauses; None if unknown,
    or if a timed phase is shorter than 2 s.
    throttle_reasons: why clocks were limited in its timed blocks. timed_at_ns: when these were.
    sm_clocks_mhz: of the device, read meanwhile by another process; empty where it is not known.
    workload_metrics: the values of the metrics that the workload declares itself.
    share: where the step is uneven. gradient_error: as of a RankShare, after the timed steps.
    transports: ways of the bytes from this rank and to it, as NCCL names them.
    nccl_choices: what NCCL ran for each collective of a step, where this rank tells it.
    attention_kernels: of torch's, those that a step ran; empty where none was seen.
    doubts: what this rank knows to make the number doubtful.
    worker_reusable: the process is as fit for the next point as a fresh one.
    output: what the process wrote to stdout and stderr meanwhile, as far as it is kept.
    ended_processes: ids of the processes of its script, which have ended.
    """

    rank: int
    repetitions: tuple[Repetition, ...]
    items_per_step: float | None
    is_of_new_process: bool | None = None
    message_bytes: int | None = None
    busbw_factor: float | None = None
    memory_bytes: int | None = None
    model_flops_per_step: float | None = None
    gemm_tflops: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    timed_at_ns: tuple[SpanNs, ...] = ()
    sm_clocks_mhz: tuple[int, ...] = ()
    breakdown: Breakdown | None = None
    profile: Profile | None = None
    workload_metrics: Mapping[Metric, float] = field(default_factory=dict)
    share: RankShare | None = None
    transports: tuple[str, ...] = ()
    nccl_choices: tuple[str, ...] = ()
    attention_kernels: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    worker_reusable: bool = True
    output: str = ""
    ended_processes: tuple[int, ...] = ()

    @property
    def step_ns(self) -> tuple[int, ...]:
        """The timed samples of all repeats, one after another; each in ns per step."""
        return tuple(ns for repetition in self.repetitions for ns in repetition.timed.step_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why one rank has no measurement. `detail` is the traceback or log tail, when there is one.

    error_type: a Cause, or the name of the class of what was raised.
    worker_reusable: the process that answered is known to be fit for the next point.
    output, ended_processes: as of a Measurement.
    """

    rank: int
    status: Status
    error_type: str
    message: str
    detail: str = ""
    worker_reusable: bool = False
    output: str = ""
    ended_processes: tuple[int, ...] = ()

    @classmethod
    def of(cls, cause: Cause, *, rank: int, message: str, **more: Any) -> Self:
        """Return a failure with the status of its cause; more: further fields, by name."""
        return cls(rank=rank, status=cause.status, error_type=cause, message=message, **more)


RankAnswer = Measurement | Failure
