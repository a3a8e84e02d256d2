"""State and findings of devices, and the file of `--devices` that names them.

A GPU is named by its UUID, a CPU worker by its host and number, such as `alpha:0`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from raybench.errors import UsageError
from raybench.records.device import Device, DeviceKind
from raybench.records.metrics import Column

_GPU_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CPU_WORKER = re.compile(r"(?P<host>[^\s:#/]+):(?P<number>0|[1-9][0-9]{0,5})")
_MAX_QUOTED_CHARACTERS = 60
# Parts of `Device.topology`, such as `NVLink x12, 1:NV, 2:SYS`.
_NVLINKS = re.compile(r"NVLink x(\d+)")
_LEVEL = re.compile(r"(\d+):(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How a device reaches the other devices of its node."""

    # Number of active NVLinks; None if unknown.
    nvlinks: int | None = None
    # Index of the other device -> "NV" for NVLink, else a level of `nvidia-smi topo -m`.
    levels: Mapping[int, str] = field(default_factory=dict)


def read_topology(device: Device) -> Topology:
    """Parse the column `topology` of a device."""
    text = device.topology or ""
    levels = {int(index): level for index, level in _LEVEL.findall(text)}
    return Topology(nvlinks=nvlinks(text), levels=levels)


def nvlinks(topology: str) -> int | None:
    """Return the number of active NVLinks in a value of `topology`; None if unknown."""
    match = _NVLINKS.match(topology)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink of a device, with its errors since the driver was loaded."""

    link: int
    is_active: bool
    # Keys are "crc", "replay" and "recovery", if NVML counts them.
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """State of a host; unknown values are None."""

    # Load average over one minute, before the workers of the check started.
    load: float | None = None
    cores: int
    # Memory that a process may lock; math.inf if it is unlimited.
    memlock_bytes: float
    # Network interface that is up -> Gbit/s; 0 if the driver does not report the speed.
    interfaces: Mapping[str, float] = field(default_factory=dict)
    # InfiniBand, RoCE and EFA.
    rdma_adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """State and error counters of one device at one moment; unknown values are None."""

    device: Device
    # Monotonic clock of the host.
    read_s: float
    # Why a GPU could not be read; empty if it was read.
    unread: str = ""
    # Without memory that the driver reserves.
    memory_free_bytes: int | None = None
    # Uncorrected memory errors since the driver was loaded.
    ecc_errors: int | None = None
    # Memory rows that were replaced after errors.
    remapped_rows: int | None = None
    # Whether the next reset replaces a row.
    is_remap_pending: bool | None = None
    # Whether a row could not be replaced, because no spare row was left.
    is_remap_failed: bool | None = None
    # Only older GPUs, which have no spare rows, retire pages.
    retired_pages: int | None = None
    is_retirement_pending: bool | None = None
    # Packets that were sent again over PCIe since the driver was loaded.
    pcie_replays: int | None = None
    pcie_lanes: int | None = None
    pcie_lanes_max: int | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    # State of NVSwitch: "not started", "in progress" or "completed".
    fabric_state: str | None = None
    fabric_faults: tuple[str, ...] = ()
    # Xids in the kernel's log, oldest first; None if the log cannot be read.
    kernel_xids: tuple[int, ...] | None = None
    # Xids since `xids_watched_since_s`.
    new_xids: tuple[int, ...] | None = None
    xids_watched_since_s: float | None = None
    # Equal for all devices of a host.
    host: HostFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """A reading of NVML at one moment; unknown values are None."""

    node_id: Annotated[str, Column("", "node")]
    index: Annotated[int, Column("", "device on its node, in PCI order")]
    uuid: Annotated[str, Column("", "device")]
    time: Annotated[datetime, Column("UTC", "when it was read")]
    sm_clock_mhz: Annotated[int | None, Column("MHz", "SM clock")] = None
    memory_clock_mhz: Annotated[int | None, Column("MHz", "memory clock")] = None
    power_w: Annotated[float | None, Column("W", "power drawn")] = None
    temperature_c: Annotated[float | None, Column("degC", "GPU temperature")] = None
    gpu_utilization_pct: Annotated[float | None, Column("%", "kernel running")] = None
    memory_utilization_pct: Annotated[float | None, Column("%", "memory busy")] = None
    memory_used_bytes: Annotated[int | None, Column("bytes", "by all processes")] = None
    nvlink_tx_bytes: Annotated[int | None, Column("bytes", "sent since driver load")] = None
    nvlink_rx_bytes: Annotated[int | None, Column("bytes", "received since driver load")] = None
    ecc_errors: Annotated[int | None, Column("", "uncorrected, since the driver was loaded")] = None
    throttle_reasons: Annotated[tuple[str, ...], Column("", "why clocks are limited")] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceList:
    """The device names of a `--devices` file."""

    names: tuple[str, ...]
    # Option and file, for messages.
    source: str

    def cpu_workers(self) -> Mapping[str, int]:
        """Return host -> number of CPU workers that it must have: the highest number + 1."""
        counts: Counter[str] = Counter()
        for name in self.names:
            if match := _CPU_WORKER.fullmatch(name):
                counts[match["host"]] = max(counts[match["host"]], int(match["number"]) + 1)
        return counts


def read_device_list(path: Path) -> DeviceList:
    """Return the devices that a file names, one a line.

    Blank lines, repetitions and text after `#` are skipped.

    Raises:
        UsageError: the file cannot be read, names no device, or has an invalid line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
        raise UsageError(f"--devices {path}: {reason}") from None
    names: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        if not (_GPU_UUID.fullmatch(name) or _CPU_WORKER.fullmatch(name)):
            raise UsageError(
                f"{path}:{number}: expected the UUID of a GPU, as `nvidia-smi -L` lists it, or "
                f"HOST:NUMBER of a CPU worker, got {name[:_MAX_QUOTED_CHARACTERS]!r}"
            )
        names[name] = None
    if not names:
        raise UsageError(f"--devices {path}: names no device; give one a line")
    return DeviceList(names=tuple(names), source=f"--devices {path}")


def write_device_list(path: Path, devices: Iterable[Device], comment: str) -> None:
    """Write the names of devices into a file, one a line.

    Args:
        comment: lines above the names, without `#`.

    Raises:
        UsageError: the file cannot be written.
    """
    lines = [f"# {line}" for line in comment.splitlines()]
    for device in devices:
        lines.append(f"{device.lasting_name}  # {device.host} {device.kind}:{device.index}")
    with _report_unwritable(path):
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def check_list_writable(path: Path) -> None:
    """Create the file if it does not exist, so that an error shows before the run.

    Raises:
        UsageError: the file cannot be written.
    """
    with _report_unwritable(path), path.open("ab"):
        pass


@contextmanager
def _report_unwritable(path: Path) -> Iterator[None]:
    """Turn an OSError in the `with` block into a UsageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


SubjectKind = Literal["device", "pair", "node", "cluster"]
# Groups of tests that answer one question; `raybench health --only STAGE` runs one.
Stage = Literal[
    "environment",
    "facts",
    "alone",
    "host-links",
    "pairs",
    "together",
    "smoke",
    "straggler",
    "burn-in",
]


class Verdict(StrEnum):
    """The result of one test for one subject; the worst first."""

    BAD = "bad"
    UNTESTED = "untested"
    SUSPECT = "suspect"
    # Figures may suffer, but no device is at fault.
    NOTE = "note"
    UNKNOWN = "unknown"
    HEALTHY = "healthy"

    @property
    def is_suspect_or_bad(self) -> bool:
        """Whether the verdict is suspect or bad; untested is neither."""
        return self in (Verdict.SUSPECT, Verdict.BAD)

    @property
    def is_unhealthy(self) -> bool:
        """Whether the subject needs attention: bad, untested or suspect."""
        return self in (Verdict.BAD, Verdict.UNTESTED, Verdict.SUSPECT)


class Action(StrEnum):
    """What to do about an unhealthy subject; the gravest action first."""

    REPLACE = "replace"
    RESET = "reset"
    # Faults outside of the device: its power supply, its cooling.
    SUPPLY = "supply"
    COOL = "cool"
    SETTING = "setting"
    # Wait for the end of another program.
    WAIT = "wait"
    WATCH = "watch"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DevicePlace:
    """Where a device of a check is; sorted by host and number."""

    host: str
    kind: DeviceKind
    # Index of a GPU on its node, or of a CPU worker among the workers of its host.
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a test judges: a device, a pair of devices, a node or the cluster."""

    kind: Annotated[SubjectKind, Column("", "device, pair, node or cluster")]
    # For people, such as "node7 GPU 3".
    name: Annotated[str, Column("", "its name", name="subject")]
    # Only subjects of the same model are compared.
    model: Annotated[str, Column("", "of its devices")]
    # HOST/NUMBER for CPU workers; empty for the path between two nodes, or if unknown.
    uuids: Annotated[tuple[str, ...], Column("", "of its devices; of a pair from and to")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one test for one subject: a row of the table `health`."""

    test: Annotated[str, Column("", "what was read")]
    stage: Annotated[Stage, Column("", "tests that it is one of")]
    subject: Subject
    # For findings about all subjects together: the number of passes.
    passes: Annotated[int, Column("", "in which it was read")]
    value: Annotated[float | None, Column("", "median of the passes; null: did not run")] = None
    unit: Annotated[str, Column("", "of value")] = ""
    expected: Annotated[str, Column("", "what it was compared with")] = ""
    # Such as `gen5 x16`; empty if unknown or irrelevant.
    link: Annotated[str, Column("", "what carries the data: PCIe or NVLink")] = ""
    # Above 1 is slower; None without peers.
    ratio: Annotated[float | None, Column("", "time relative to its peers; null: no peers")] = None
    verdict: Annotated[Verdict, Column("", "bad, untested, suspect, note, unknown or healthy")]
    # One sentence; empty if healthy.
    reason: Annotated[str, Column("", "why it is not healthy")] = ""
    evidence: Annotated[str, Column("", "with whom it was tried, and what held")] = ""
    # Name of the subject that makes this subject slow; empty if there is none, or if unknown.
    culprit: Annotated[str, Column("", "what it is slow because of; empty: itself")] = ""
    action: Annotated[
        Action | None, Column("", "replace, reset, supply, cool, setting, wait or watch")
    ] = None
    # One command a line.
    command: Annotated[str, Column("", "what to type; never run")] = ""


def is_time(unit: str) -> bool:
    """Return whether a smaller value is better; False for rates ("/s")."""
    return not unit.endswith("/s")
