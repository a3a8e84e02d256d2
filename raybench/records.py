"""What travels between the workers, the sweep and the store: plain values, no behaviour.

All durations of samples are integers in nanoseconds; all sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal

from raybench.job import Measure
from raybench.plan import Point


class Status(StrEnum):
    """How an attempt at a point ended."""

    OK = "ok"
    OOM = "oom"
    ERROR = "error"
    TIMEOUT = "timeout"
    LOST = "lost"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Consecutive iterations on one rank; every tuple has one entry per iteration.

    start_ns: start of the iteration, since this rank began the point.
    step_ns: its duration (CUDA events on a GPU, the host's clock on a CPU).
    host_ns: how long the host took to issue it; equals step_ns on a CPU.
    part_ns: host time spent in each named part of the step, e.g. {"data": ...}.
    """

    start_ns: tuple[int, ...] = ()
    step_ns: tuple[int, ...] = ()
    host_ns: tuple[int, ...] = ()
    part_ns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """One build of the workload, warmed up and timed."""

    warmup: Samples
    timed: Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One rank's answer for one point.

    items_per_step: samples (rows, sequences) that this rank finished in one iteration.
    setup_s: forming the process group and building the workload, outside the samples.
    peak_mem_*_bytes: torch's device allocator over warm-up and samples; None on a CPU.
    warnings: what this rank knows to make the number doubtful, one sentence each.
    """

    rank: int
    repetitions: tuple[Repetition, ...]
    items_per_step: int
    setup_s: float
    peak_mem_allocated_bytes: int | None = None
    peak_mem_reserved_bytes: int | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why one rank has no measurement. `detail` is the traceback or log tail, when there is one.

    keeps_worker: the process that answered is known to be fit for the next point.
    """

    rank: int
    status: Status
    error_type: str
    message: str
    detail: str = ""
    keeps_worker: bool = False


Answer = Measurement | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device and the worker that owns it. Unknown facts are None.

    index: the device's index on its node, as torch counts with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    uuid: proves that two workers do not share a device; on a CPU "node/process id".
    """

    kind: Literal["cuda", "cpu"]
    node_id: str
    host: str
    address: str
    index: int
    uuid: str
    name: str
    memory_bytes: int | None = None
    pci_bus_id: str | None = None
    driver_version: str | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_cap_w: float | None = None
    topology: str | None = None
    process_id: int
    cpu_count: int
    niceness: int
    omp_num_threads: int
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One attempt at one point: its status, the reason when it is not ok, and its measurements.

    measurements: rank order, one per rank when status is ok, else empty.
    devices: those that ran it, in rank order; empty for a skipped point.
    warnings: those of the ranks and those the driver knows, without repeats.
    """

    point: Point
    attempt: int
    status: Status
    started_at: datetime
    duration_s: float
    devices: tuple[Device, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    error_type: str | None = None
    error_message: str | None = None
    warnings: tuple[str, ...] = ()


class RunStatus(StrEnum):
    """How far a run has come; one that says `running` without a driver was interrupted."""

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a job."""

    run_id: str
    job_name: str
    job_text: str
    job_sha256: str
    argv: tuple[str, ...]
    status: RunStatus
    started_at: datetime
    finished_at: datetime | None = None
    points_total: int
    points_ok: int = 0
    points_failed: int = 0
    points_skipped: int = 0
    baseline: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    cluster: str
    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
    """What a worker group is asked to do: one point, and how to measure it."""

    point: Point
    settings: Measure
    seed: int = 0
