"""What travels between the workers, the sweep and the store, and what a column and a metric are.

All durations of samples are integers in nanoseconds; all sizes are bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeVar, get_args

from raybench.errors import UsageError
from raybench.job.point import SCRIPT, Point, Precision
from raybench.records.doubts import Doubt, NotMeasured

if TYPE_CHECKING:
    from raybench.job.model import Measure
    from raybench.records.environment import Code

DeviceKind = Literal["cuda", "cpu"]
_Text = TypeVar("_Text", bound=str)

OverRanks = Literal["max", "min", "mean", "median", "sum"]
OverStep = Literal["ms_each", "per_second", "seconds"]
# How a report writes the value: `share` of 1 and `percent` of 100 as 12.3%, `part` and `time` of a
# step in the unit of the table, `choices` what NCCL ran for its collectives.
Format = Literal["number", "ratio", "share", "percent", "gib", "part", "time", "choices"]

_COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": statistics.fmean,
    "median": statistics.median,
    "sum": sum,
}


@dataclass(frozen=True, slots=True)
class Column:
    """What a column of a table holds: stands in the annotation of the field that is written to it.

    unit: empty where it has none. description: in at most 60 characters.
    name: of the column; empty: that of the field. The others as of a `Metric`.
    """

    unit: str
    description: str
    _: KW_ONLY
    name: str = ""
    heading: str = ""
    meaning: str = ""
    format: Format = "number"
    over_ranks: OverRanks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number of a point.

    name: of its column in the table `points`; of a workload's own metric, the attribute of the
    workload that holds the value of a rank after the timed steps.
    unit: of the stored value; empty where it has none.
    description: what it is, in at most 60 characters.
    kind: the type of its column.
    over_ranks: how the values of the ranks become the point's. None: of a workload's own metric by
    their mean, else by a computation of its own.
    over_step: of a workload's own metric whose value says how much one step does. ms_each: the
    metric is the median step in ms over the value. per_second: the value over the mean step in s.
    seconds: what so many steps take, by the mean step.
    heading: of its column in reports, the unit included; empty: `name`, with the unit behind it.
    meaning: what the legend of a report says, without a capital and a full stop; {ranks} is what a
    rank runs on, {baseline} the settings of the baseline. Empty: `description`.
    format: how a report writes the value. With `time` it adds its own unit to the heading.

    Of a workload's own metric the tables keep the heading and the meaning; reports write it as a
    number.

    Raises UsageError for a name that is no identifier, or an unknown `over_ranks` or `over_step`.
    """

    name: str
    unit: str = ""
    description: str
    kind: str = "double"
    over_ranks: OverRanks | None = None
    over_step: OverStep | None = None
    heading: str = ""
    meaning: str = ""
    format: Format = "number"

    def __post_init__(self) -> None:
        """Raise UsageError as the class says."""
        if not str(self.name).isidentifier():
            raise UsageError(f"Metric: name must be an identifier, got {self.name!r}")
        for name, allowed in (("over_ranks", OverRanks), ("over_step", OverStep)):
            if (given := getattr(self, name)) not in (None, *get_args(allowed)):
                names = ", ".join(get_args(allowed))
                raise UsageError(
                    f"Metric {self.name}: {name} must be one of {names}, got {given!r}"
                )

    @property
    def title(self) -> str:
        """`heading`, else its name in words and the unit, once if alike, as in "bubble ms"."""
        words = self.name.removesuffix(f"_{self.unit.lower()}").replace("_", " ")
        return self.heading or " ".join(dict.fromkeys((words, self.unit))).rstrip()

    @property
    def is_rate(self) -> bool:
        """Whether the value says how much is done in a second."""
        return self.over_step == "per_second" or self.unit.endswith("/s")

    @property
    def follows_step(self) -> bool:
        """Whether the value is a time in proportion to the step time."""
        return self.over_step in ("ms_each", "seconds")


def combine_ranks(how: OverRanks, values: Sequence[float | None]) -> float | None:
    """Return the value of a point from the values of its ranks, of which None ones are left out.

    None if all are None or there are none, and for a sum if one is None; else NaN if one is NaN.
    The largest, smallest or sum of integers is an integer.
    """
    known = [value for value in values if value is not None]
    if not known or (how == "sum" and len(known) < len(values)):
        return None
    # Python's `max`, `min` and `median` may lose it.
    return math.nan if any(map(math.isnan, known)) else _COMBINE[how](known)


class Status(StrEnum):
    """How an attempt at a point ended; failures first, the worst first, then ok, then not run.

    label: in a table that people read. clause: in a sentence, behind the point.
    """

    label: str
    clause: str

    OOM = "oom", "out of memory", "ran out of memory"
    ERROR = "error", "error", "failed"
    TIMEOUT = "timeout", "timed out", "timed out"
    LOST = "lost", "worker lost", "was lost with its worker"
    OK = "ok", "ok", "was measured"
    SKIPPED = "skipped", "skipped", "was skipped"
    CANCELLED = "cancelled", "cancelled", "was cancelled"

    def __new__(cls, value: str, label: str = "", clause: str = "") -> Self:
        """Make a member, whose value is what the tables hold; by that alone one is found."""
        member = str.__new__(cls, value)
        member._value_, member.label, member.clause = value, label, clause
        return member

    @property
    def is_failure(self) -> bool:
        """Return whether it is oom, error, timeout or lost."""
        return self is not Status.OK and self not in NOT_RUN

    @property
    def is_retried(self) -> bool:
        """Return whether `--resume` alone repeats the point: lost, skipped or cancelled."""
        return self is Status.LOST or self in NOT_RUN

    @property
    def is_lasting(self) -> bool:
        """Return whether later rounds would end alike: skipped, or failed other than by a loss."""
        return self is Status.SKIPPED or (self.is_failure and self is not Status.LOST)


# For the tables, which may hold statuses of later versions.
NOT_RUN = frozenset({Status.SKIPPED, Status.CANCELLED})
FAILURES = frozenset(status for status in Status if status.is_failure)


class RunStatus(StrEnum):
    """How far a run has come; one that says `running` without a driver was interrupted."""

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Cause(StrEnum):
    """Why an attempt has no measurement, as its `error_type`, where raybench itself found out.

    For an exception of a workload, `error_type` is the name of its class instead.
    status: how the attempt ends by it. is_death: of the rank's process, whose log may say why.
    """

    status: Status
    is_death: bool

    PEER_FAILED = "PeerFailed", Status.LOST
    NO_ANSWER = "NoAnswer", Status.LOST
    TIMEOUT = "Timeout", Status.TIMEOUT
    WORKER_DIED = "WorkerDied", Status.LOST, True
    HOST_OUT_OF_MEMORY = "HostOutOfMemory", Status.OOM, True
    ANSWER_LOST = "AnswerLost", Status.LOST
    WORKER_LOST = "WorkerLost", Status.LOST
    NO_START = "NoStart", Status.ERROR
    NODE_LOST = "NodeLost", Status.LOST
    CLUSTER_LOST = "ClusterError", Status.LOST
    INVALID_MEASUREMENT = "InvalidMeasurement", Status.ERROR
    SCRIPT_EXIT = "ScriptExit", Status.ERROR
    SCRIPT_ENDED = "ScriptEnded", Status.ERROR
    NO_STEPS = "NoSteps", Status.ERROR
    TOO_FEW_DEVICES = "TooFewDevices", Status.SKIPPED
    NEEDS_CUDA = "NeedsCuda", Status.SKIPPED
    OUT_OF_MEMORY_BEFORE = "OutOfMemoryBefore", Status.SKIPPED
    STOPPED = "Stopped", Status.SKIPPED
    INTERRUPTED = "Interrupted", Status.CANCELLED

    def __new__(cls, value: str, status: Status, is_death: bool = False) -> Self:
        """Make a member, whose value is what the tables hold."""
        member = str.__new__(cls, value)
        member._value_, member.status, member.is_death = value, status, is_death
        return member


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


Answer = Measurement | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """How many cores of a host other processes kept busy, of those that CPU workers may use."""

    host: str
    busy_cores: float
    cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherUsers:
    """Who else used the nodes of a point: other sweeps and processes, as a noun phrase each."""

    # On the devices of the point.
    on_devices: tuple[str, ...] = ()
    # On other devices of its nodes.
    on_nodes: tuple[str, ...] = ()
    # On the cores of its CPU workers.
    loads: tuple[HostLoad, ...] = ()
    # Hosts whose agent did not answer, so that other users are not known.
    silent_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device and the worker that owns it. Unknown facts are None, unknown throttle_reasons ().

    index: the device's index on its node, as torch counts with CUDA_DEVICE_ORDER=PCI_BUS_ID; of a
    CPU worker its number there.
    uuid: proves that two workers do not share a device; on a CPU "node/process id".
    ecc_errors: uncorrected ones since the driver was loaded.
    pcie_link, pcie_link_max: as in "gen5 x16". rack: of its node, as the cluster labels it; empty
    where it does not.
    other_processes: with memory on this device, before any worker of this run.
    disk_free_bytes: where the worker keeps temporary files. shm_free_bytes: of /dev/shm.
    """

    kind: Annotated[DeviceKind, Column("", "cuda or cpu")]
    node_id: Annotated[str, Column("", "node")]
    host: Annotated[str, Column("", "host name")]
    address: Annotated[str, Column("", "IP address")]
    rack: Annotated[str, Column("", "of the node, by its label; empty: none")] = ""
    index: Annotated[int, Column("", "on its node, in PCI order")]
    uuid: Annotated[str, Column("", "identity")]
    name: Annotated[str, Column("", "model")]
    pci_bus_id: Annotated[str | None, Column("", "PCI id")] = None
    driver_version: Annotated[str | None, Column("", "driver")] = None
    memory_bytes: Annotated[int | None, Column("bytes", "total")] = None
    sm_clock_mhz: Annotated[int | None, Column("MHz", "SM clock at the start")] = None
    sm_clock_max_mhz: Annotated[int | None, Column("MHz", "highest SM clock")] = None
    memory_clock_mhz: Annotated[int | None, Column("MHz", "memory clock at the start")] = None
    power_cap_w: Annotated[float | None, Column("W", "power limit")] = None
    power_cap_default_w: Annotated[float | None, Column("W", "as delivered")] = None
    topology: Annotated[str | None, Column("", "links to the other devices")] = None
    temperature_c: Annotated[float | None, Column("degC", "GPU temperature at the start")] = None
    throttle_reasons: Annotated[
        tuple[str, ...], Column("", "why clocks are limited at the start")
    ] = ()
    ecc_errors: Annotated[int | None, Column("", "uncorrected, since the driver was loaded")] = None
    persistence_mode: Annotated[bool | None, Column("", "driver stays loaded")] = None
    mig_mode: Annotated[bool | None, Column("", "GPU is partitioned")] = None
    pcie_link: Annotated[str | None, Column("", "PCIe link at the start")] = None
    pcie_link_max: Annotated[str | None, Column("", "widest PCIe link")] = None
    numa_node: Annotated[int | None, Column("", "nearest")] = None
    other_processes: Annotated[int | None, Column("", "using the device before")] = None
    disk_free_bytes: Annotated[int | None, Column("bytes", "temporary files")] = None
    shm_free_bytes: Annotated[int | None, Column("bytes", "/dev/shm")] = None
    process_id: Annotated[int, Column("", "of the worker")]
    cpu_count: Annotated[int, Column("", "cores that the worker may keep busy")]
    niceness: Annotated[int, Column("", "of the worker")]
    omp_num_threads: Annotated[int, Column("", "of the worker")]
    versions: Annotated[Mapping[str, str], Column("", "software of the worker")] = field(
        default_factory=dict
    )
    nccl_path: Annotated[str | None, Column("", "file of the NCCL that the worker loaded")] = None
    environment: Annotated[Mapping[str, str], Column("", "variables of the worker")] = field(
        default_factory=dict
    )

    @property
    def lasting_name(self) -> str:
        """Its name in every run: the UUID of a GPU, HOST:INDEX of a CPU worker."""
        return self.uuid if self.kind == "cuda" else f"{self.host}:{self.index}"


class TrialKey(NamedTuple):
    """What identifies a trial in a run: a point in a round.

    control_of: the world_size of the block that the point ends as a control; 0 where it is none.
    """

    point_id: str
    round: int = 1
    control_of: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One attempt at one point: its status, the reason when it is not ok, and its measurements.

    attempt: counts from 1, over all rounds of the point. round: counts from 1.
    control_of: as of a TrialKey.
    measurements: rank order, one per rank when status is ok, else empty.
    devices: those that ran it, in rank order; empty if it was skipped, or cut short with the sweep.
    error_rank: the rank that failed first, as far as one can be named. error_detail: its traceback
    and the last lines that it wrote. outputs: what each rank wrote, by rank; () if none did.
    neighbours: point_ids that ran on a node of this one at the same time; and in words who else
    used its devices, other sweeps and other processes.
    node_neighbours: who used other devices of its nodes.
    doubts: those of the ranks and of the driver, the worst of each kind and subject; only when
    status is ok.
    mem_estimate_bytes: what a rank was estimated to need at most; None if not known, or on a CPU.
    """

    point: Point
    attempt: int
    round: int = 1
    control_of: int = 0
    status: Status
    started_at: datetime
    duration_s: float
    devices: tuple[Device, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    error_type: str | None = None
    error_message: str | None = None
    error_rank: int | None = None
    error_detail: str | None = None
    outputs: tuple[str, ...] = ()
    neighbours: tuple[str, ...] = ()
    node_neighbours: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    mem_estimate_bytes: int | None = None

    @property
    def key(self) -> TrialKey:
        """The key of its trial."""
        return TrialKey(self.point.point_id, self.round, self.control_of)


def by_point(statuses: Mapping[TrialKey, _Text]) -> dict[str, _Text]:
    """Return point_id -> its status over all rounds. statuses: of the latest attempt at each trial.

    Controls are left out. It is the first failure in the order of `statuses`, else ok if one round
    is ok, else skipped if one is, else cancelled. An unknown status counts as a failure.
    """
    severity = {str(one): place for place, one in enumerate(Status) if not one.is_failure}
    found: dict[str, _Text] = {}
    for key, status in statuses.items():
        if not key.control_of:
            both = (found.get(key.point_id, status), status)
            found[key.point_id] = min(both, key=lambda one: severity.get(one, -1))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Where a worker stands in its group, in the words of torch.distributed."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group to be formed: its own name in the store, never used twice.

    Keys left behind by an earlier group make gloo fail to connect, so no prefix is reused.
    """

    name: str
    store_address: str
    store_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker group is asked to do: one point, and how to measure it.

    code: what every worker must have loaded; None where any will do.
    precisions: a worker times large matrix products in each of these and in that of the point, each
    once in its life, before the point. None: it times none, not even in that of the point.
    """

    point: Point
    settings: Measure
    seed: int = 0
    profile: bool = False
    code: Code | None = None
    precisions: tuple[Precision, ...] | None = ()

    @property
    def is_script(self) -> bool:
        """Return whether the workload is a script, whose steps run in a child of each worker."""
        return self.point.workload == SCRIPT

    @property
    def user_class(self) -> str:
        """The workload if the point names a class, as `package.module:Class`; "" for a built-in."""
        return self.point.workload if ":" in self.point.workload else ""

    @property
    def worker_environment(self) -> Mapping[str, str]:
        """Variables that workers must start with; {} for a script, whose own processes get them."""
        return {} if self.is_script else self.point.env
