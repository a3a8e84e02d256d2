"""What is known of devices: samples, facts and findings of a check; and the file that names them.

A health check writes the file, and a sweep keeps to it. A GPU is named by its UUID. A CPU worker
has none that lasts: it is named by its host and its number there, as in `alpha:0`; workers of one
host share its processors and can stand in for each other.
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

_GPU = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_WORKER = re.compile(r"(?P<host>[^\s:#/]+):(?P<number>0|[1-9][0-9]{0,5})")
_SHOWN = 60
# `Device.topology`: active NVLinks, then the level at which each other device is reached.
_NVLINKS = re.compile(r"NVLink x(\d+)")
_LEVEL = re.compile(r"(\d+):(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How a device reaches the other devices of its node."""

    # Active NVLinks; None if NVML did not answer.
    nvlinks: int | None = None
    # By the index of the other device: "NV" over NVLink, else a level of `nvidia-smi topo -m`.
    levels: Mapping[int, str] = field(default_factory=dict)


def read_topology(device: Device) -> Topology:
    """Return what the column `topology` of a device says."""
    text = device.topology or ""
    levels = {int(index): level for index, level in _LEVEL.findall(text)}
    return Topology(nvlinks=nvlinks(text), levels=levels)


def nvlinks(topology: str) -> int | None:
    """Return the number of active NVLinks in a value of the column `topology`; None: unknown."""
    found = _NVLINKS.match(topology)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One link of a device: whether it is up, and its errors since the driver was loaded.

    errors: by kind, "crc", "replay", "recovery"; a kind that NVML does not count is left out.
    """

    link: int
    is_active: bool
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The state and the error counters of one device at one moment; unknown facts are None.

    unread: why nothing is known of a GPU, as where the agent of its node does not answer; or empty.
    memory_free_bytes: without what the driver keeps for itself.
    ecc_errors: uncorrected ones since the driver was loaded.
    remapped_rows: of memory, after errors that could be corrected or not.
    is_remap_pending: a row is replaced at the next reset. is_remap_failed: none was left.
    retired_pages: of older GPUs, which have no rows to spare.
    pcie_replays: packets sent again over the link to the host, since the driver was loaded.
    pcie_lanes, pcie_lanes_max: in use, and those that the device has.
    fabric_state: of NVSwitch systems: "not started", "in progress", "completed".
    fabric_faults: what the fabric manager says is wrong, in words; () also where it is unknown.
    kernel_xids: numbers of the errors of the driver that the kernel's log still holds, oldest
    first; None where it may not be read, as by users on most hosts and in most containers.
    new_xids: those that NVML told of since `xids_watched_since_s`: it knows of none before.
    """

    device: Device
    # Time of reading, by the monotonic clock of the host.
    read_s: float
    unread: str = ""
    memory_free_bytes: int | None = None
    ecc_errors: int | None = None
    remapped_rows: int | None = None
    is_remap_pending: bool | None = None
    is_remap_failed: bool | None = None
    retired_pages: int | None = None
    is_retirement_pending: bool | None = None
    pcie_replays: int | None = None
    pcie_lanes: int | None = None
    pcie_lanes_max: int | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    fabric_state: str | None = None
    fabric_faults: tuple[str, ...] = ()
    kernel_xids: tuple[int, ...] | None = None
    new_xids: tuple[int, ...] | None = None
    xids_watched_since_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """What NVML said of one device at one moment; unknown is None, or () of throttle_reasons."""

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
    """Devices by name. source: where they were named, for the user."""

    names: tuple[str, ...]
    source: str

    def cpu_workers(self) -> Mapping[str, int]:
        """Return host -> CPU workers that it must have: its highest number + 1; GPUs add none."""
        counts: Counter[str] = Counter()
        for name in self.names:
            if found := _WORKER.fullmatch(name):
                counts[found["host"]] = max(counts[found["host"]], int(found["number"]) + 1)
        return counts


def read_device_list(path: Path) -> DeviceList:
    """Return the devices named in a file, one a line; skips blank lines, repeats, text after `#`.

    A name is the UUID of a GPU or HOST:NUMBER of a CPU worker, and may be of no device that is
    there. Raises UsageError where the file cannot be read, names no device, or a line is no name.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
        raise UsageError(f"--devices {path}: {reason}") from None
    names: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        names.setdefault(line.partition("#")[0].strip(), number)
    names.pop("", None)
    for name, number in names.items():
        if not (_GPU.fullmatch(name) or _WORKER.fullmatch(name)):
            raise UsageError(
                f"{path}:{number}: expected the UUID of a GPU, as `nvidia-smi -L` lists it, or "
                f"HOST:NUMBER of a CPU worker, got {name[:_SHOWN]!r}"
            )
    if not names:
        raise UsageError(f"--devices {path}: names no device; give one a line")
    return DeviceList(names=tuple(names), source=f"--devices {path}")


def write_device_list(path: Path, devices: Iterable[Device], comment: str) -> None:
    """Write the names of devices into a file, one a line; replaces what was in it.

    `read_device_list` refuses a file without any. comment: lines to stand above the names, without
    `#`. Raises UsageError where the file cannot be written.
    """
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"{one.lasting_name}  # {one.host} {one.kind}:{one.index}" for one in devices]
    with _report_unwritable(path):
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def check_list_writable(path: Path) -> None:
    """Raise UsageError where no list can be written to `path`.

    A file that is there stays as it is; else an empty file is made.
    """
    with _report_unwritable(path), path.open("ab"):
        pass


@contextmanager
def _report_unwritable(path: Path) -> Iterator[None]:
    """Raise UsageError, in one line that names `path`, for an OSError inside the block."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


SubjectKind = Literal["device", "pair", "node", "cluster"]
# Groups of tests that answer one question; `raybench health --only STAGE` runs one.
Stage = Literal[
    "facts", "alone", "host-links", "pairs", "together", "smoke", "straggler", "burn-in"
]


class Verdict(StrEnum):
    """The result of one test for one subject; the worst first."""

    BAD = "bad"
    UNTESTED = "untested"
    SUSPECT = "suspect"
    UNKNOWN = "unknown"
    HEALTHY = "healthy"

    @property
    def is_suspect_or_bad(self) -> bool:
        """Return whether it is suspect or bad; untested is neither."""
        return self in (Verdict.SUSPECT, Verdict.BAD)

    @property
    def is_unhealthy(self) -> bool:
        """Return whether something is to be done about the subject: bad, untested or suspect."""
        return self not in (Verdict.UNKNOWN, Verdict.HEALTHY)


class Action(StrEnum):
    """What to do next about a subject that is not healthy; the gravest first."""

    REPLACE = "replace"
    RESET = "reset"
    SETTING = "setting"
    WATCH = "watch"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DevicePlace:
    """Where a device of a check is; sorted by host and number."""

    host: str
    kind: DeviceKind
    # A GPU's index on its node; a CPU worker's position among those of its host.
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A device, a pair of devices, a node or the whole cluster, which tests judge.

    uuids: of its devices, HOST/NUMBER of a CPU worker; of a pair, from and to; () for the path
    between two nodes, and where nothing is known of a model.
    name: for people, "node7 GPU 3". model: of its devices; only subjects of one model are compared.
    """

    kind: Annotated[SubjectKind, Column("", "device, pair, node or cluster")]
    name: Annotated[str, Column("", "its name", name="subject")]
    model: Annotated[str, Column("", "of its devices")]
    uuids: Annotated[tuple[str, ...], Column("", "of its devices; of a pair from and to")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one test for one subject: a row of the table `health`.

    passes: how many passes of the test have a value; of all subjects together, how many there were.
    value: the median, in `unit`; None where no pass has one. expected: what it was compared with.
    link: what carries the data, as `gen5 x16` between host and device; empty where that is unknown
    or of no matter. ratio: its time over the time of similar subjects or of its model elsewhere,
    above 1 is slower; None without any.
    reason: one sentence; empty where healthy. evidence: what else supports the verdict.
    culprit: name of the subject that makes this one slow; empty where that is itself or unknown.
    action: what to do. command: what to type for it, a line each; it is never run.
    """

    test: Annotated[str, Column("", "what was read")]
    stage: Annotated[Stage, Column("", "tests that it is one of")]
    subject: Subject
    passes: Annotated[int, Column("", "in which it was read")]
    value: Annotated[float | None, Column("", "median of the passes; null: did not run")] = None
    unit: Annotated[str, Column("", "of value")] = ""
    expected: Annotated[str, Column("", "what it was compared with")] = ""
    link: Annotated[str, Column("", "what carries the data: PCIe or NVLink")] = ""
    ratio: Annotated[float | None, Column("", "time relative to its peers; null: no peers")] = None
    verdict: Annotated[Verdict, Column("", "bad, untested, suspect, unknown or healthy")]
    reason: Annotated[str, Column("", "why it is not healthy")] = ""
    evidence: Annotated[str, Column("", "with whom it was tried, and what held")] = ""
    culprit: Annotated[str, Column("", "what it is slow because of; empty: itself")] = ""
    action: Annotated[Action | None, Column("", "replace, reset, setting or watch")] = None
    command: Annotated[str, Column("", "what to type; never run")] = ""


def is_time(unit: str) -> bool:
    """Return whether less is better: False for rates ("/s"), True for all else, facts too."""
    return not unit.endswith("/s")
