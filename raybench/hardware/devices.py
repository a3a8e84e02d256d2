"""The devices of one node, by NVML and the kernel's log: identity, counters, samples and facts.

Devices are identified by UUID, because torch and NVML number them differently.

`describe_device` and `Counters` run in the process that owns the device. `Sampler` runs in its own
process, because a thread in a worker would compete with the steps for the interpreter.
`FactReader` makes some hundred NVML calls for each device, so it runs only before and after a
health check.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import pynvml

from raybench.conversion import KIB, MJ_PER_J, NS_PER_S
from raybench.hardware import nvml
from raybench.hardware.nccl_library import loaded_files, loaded_nccl
from raybench.records.device import Device
from raybench.records.devices import DeviceFacts, DeviceSample, NvLink
from raybench.records.environment import package_versions, usable_cores, variables_that_matter
from raybench.records.measurement import SpanNs

if TYPE_CHECKING:
    import torch

# Size of a set of NUMA nodes in NVML, in words of 64 bits.
_NODE_WORDS = 4
# Clock limits for a smaller share of the time are ignored: each ramp-up has them.
_LIMITED_SHARE = 0.02
# `wait_until_unlimited`: required time without a limit, longest wait, polling period.
_UNLIMITED_S, _LONGEST_WAIT_S, _WAIT_POLL_S = 0.3, 3.0, 0.05
# Reasons of limits that come from heat or from outside, and not from the work.
_HEAT_OR_POWER_BRAKE = frozenset({"thermal_sw", "thermal_hw", "power_brake"})
# Shorter measurements of energy are inexact: NVML updates its counter every 20 to 100 ms, and A100
# and H100 sample only a quarter of the time (arXiv 2312.02741).
_SHORTEST_ENERGY_S = 2.0
# Longest period of reading the SM clock. One reading takes 30 us.
_CLOCK_PERIOD_S = 0.1
# Half an hour of readings.
_KEPT_CLOCKS = 18_000
# NVML's scope for the sum over all links.
_ALL_LINKS = 0xFFFFFFFF
_NVLINK_TX = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS)
_NVLINK_RX = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS)

# PCI domain, bus and device of the GPU, and the number of the error.
_XID_LINE = re.compile(rb"NVRM: Xid \(PCI:([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)[^)]*\): (\d+)", re.I)
# Longest record of /dev/kmsg.
_RECORD_BYTES = 8192
# Most events of one `read`: a burst of errors must not delay a check.
_MOST_EVENTS = 1000

_FABRIC_STATES = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "not started",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "in progress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: "completed",
}
# Shift of a fault's two bits in the mask of the fabric's health -> name of the fault.
_FABRIC_FAULTS = {
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW: "degraded bandwidth",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY: "an unhealthy route",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY: "access timeouts",
}
# Kind of error -> (counter of nvmlDeviceGetNvLinkErrorCounter, which works up to Hopper; field of
# nvmlDeviceGetFieldValues, for newer drivers).
_LINK_ERRORS = {
    "crc": (pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT, pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC),
    "replay": (pynvml.NVML_NVLINK_ERROR_DL_REPLAY, pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY),
    "recovery": (pynvml.NVML_NVLINK_ERROR_DL_RECOVERY, pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY),
}
# Libraries whose file decides about speed and results.
_CUDA_LIBRARIES = re.compile(r"lib(cuda|cublas|cublasLt|cudnn|nccl)\.so(\.\d+)*")
_RETIREMENT_CAUSES = (
    pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
    pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
)

# PCI address (domain, bus, device) -> numbers of the errors in the kernel's log.
_LoggedXids = Mapping[tuple[int, ...], Sequence[int]]
# Time of a reading by `time.monotonic_ns`, and the SM clock in MHz.
ClockReading = tuple[int, int]


def describe_device(device: torch.device, index: int, *, node_id: str, address: str) -> Device:
    """Return identity, versions and settings of this process and its device.

    Call it after this process has created its CUDA context, or `other_processes` is unknown.

    Args:
        device: the device.
        index: torch's index of the device, or the number of a CPU worker.
        node_id: id of the node in Ray.
        address: IP address of the node in Ray.
    """
    import torch

    library = loaded_nccl()
    facts: dict[str, Any] = {
        "node_id": node_id,
        "host": socket.gethostname(),
        "address": address,
        "interface": _interface_of(address),
        "index": index,
        "process_id": os.getpid(),
        "cpu_count": usable_cores(),
        "niceness": os.nice(0),
        "omp_num_threads": torch.get_num_threads(),
        "environment": variables_that_matter(),
        "disk_free_bytes": _free_bytes(tempfile.gettempdir()),
        "shm_free_bytes": _free_bytes("/dev/shm"),
        "nccl_path": library and library.path,
        "libraries": {Path(path).name: path for path in loaded_files(_CUDA_LIBRARIES)},
    }
    nccl = {"nccl": library.version} if library else {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        uuid = f"GPU-{properties.uuid}"
        versions = {**package_versions(), "cuda": str(torch.version.cuda), **nccl}
        if not nccl:
            # Without a shared library, NCCL is compiled into torch.
            compiled = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            versions["nccl"] = ".".join(map(str, compiled))
        facts |= {"name": properties.name, "memory_bytes": properties.total_memory}
        return Device(kind="cuda", uuid=uuid, versions=versions, **facts, **_nvml_facts(uuid))

    # A CPU worker.
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    facts["name"] = models[0] if models else platform.processor() or platform.machine()
    uuid = f"{node_id}/{os.getpid()}"
    versions = {**package_versions(), **nccl}
    return Device(kind="cpu", uuid=uuid, versions=versions, **facts)


def _nvml_facts(uuid: str) -> dict[str, Any]:
    """Return the fields of `Device` that NVML knows."""
    handle = nvml.device(uuid)
    if handle is None:
        return {}
    pci = nvml.ask(pynvml.nvmlDeviceGetPciInfo, handle)
    # Each pair is the current and the pending mode.
    mig_modes = nvml.ask(pynvml.nvmlDeviceGetMigMode, handle)
    ecc_modes = nvml.ask(pynvml.nvmlDeviceGetEccMode, handle)
    processes = nvml.process_ids(handle)
    sm, memory = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
    # Not nvmlDeviceGetNumaNodeId: on Grace Hopper it returns the node of the GPU's own memory.
    affinity, scope = pynvml.nvmlDeviceGetMemoryAffinity, pynvml.NVML_AFFINITY_SCOPE_NODE
    words = nvml.ask(affinity, handle, _NODE_WORDS, scope) or ()
    # One bit for each NUMA node near the GPU, in words of 64 bits.
    near_nodes = sum(word << (64 * position) for position, word in enumerate(words))
    is_only_node = near_nodes.bit_count() == 1
    answers = {
        "pci_bus_id": pci.busId if pci else None,
        "driver_version": nvml.ask(pynvml.nvmlSystemGetDriverVersion),
        "sm_clock_mhz": nvml.ask(pynvml.nvmlDeviceGetClockInfo, handle, sm),
        "sm_clock_max_mhz": nvml.ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, sm),
        "memory_clock_mhz": nvml.ask(pynvml.nvmlDeviceGetClockInfo, handle, memory),
        "power_cap_w": nvml.watts(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        "power_cap_default_w": nvml.watts(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle),
        "topology": nvml.ask(_topology, handle),
        "temperature_c": nvml.temperature_c(handle),
        "throttle_reasons": nvml.current_throttle_reasons(handle),
        "ecc_errors": nvml.ecc_errors(handle),
        "persistence_mode": nvml.flag(nvml.ask(pynvml.nvmlDeviceGetPersistenceMode, handle)),
        "mig_mode": nvml.flag(mig_modes and mig_modes[0]),
        "ecc_mode": nvml.flag(ecc_modes and ecc_modes[0]),
        "pcie_link": _pcie_link(handle, "Curr"),
        "pcie_link_max": _pcie_link(handle, "Max"),
        "numa_node": near_nodes.bit_length() - 1 if is_only_node else None,
        # This process has a context on the device, so a list without it is incomplete.
        "other_processes": len(processes) - 1 if os.getpid() in processes else None,
    }
    return {name: answer for name, answer in answers.items() if answer is not None}


def _pcie_link(handle: Any, state: Literal["Curr", "Max"]) -> str | None:
    """Return the current or the fastest PCIe link, such as "gen5 x16"; None if unknown."""
    generation = nvml.ask(getattr(pynvml, f"nvmlDeviceGet{state}PcieLinkGeneration"), handle)
    width = nvml.ask(getattr(pynvml, f"nvmlDeviceGet{state}PcieLinkWidth"), handle)
    return None if None in (generation, width) else f"gen{generation} x{width}"


def _topology(handle: Any) -> str:
    """Return the active NVLinks and the path to each CUDA device, `NVLink x12, 1:NV, 2:SYS`."""
    # The names of `nvidia-smi topo -m`.
    names = {
        pynvml.NVML_TOPOLOGY_INTERNAL: "board",
        pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
        pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        pynvml.NVML_TOPOLOGY_NODE: "NODE",
        pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
    }
    paths = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(visible.split(",")) if visible else pynvml.nvmlDeviceGetCount()
    for index in range(count):
        other = nvml.device(nvml.uuid_of(index) or "")
        if other is None or pynvml.nvmlDeviceGetUUID(other) == pynvml.nvmlDeviceGetUUID(handle):
            continue
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(handle, other)
        capability = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        status = nvml.ask(pynvml.nvmlDeviceGetP2PStatus, handle, other, capability)
        is_nvlink = status == pynvml.NVML_P2P_STATUS_OK
        paths.append(f"{index}:{'NV' if is_nvlink else names.get(level, level)}")
    active_nvlinks = sum(nvml.nvlink_states(handle).values())
    return ", ".join([f"NVLink x{active_nvlinks}", *paths])


def _interface_of(address: str) -> str | None:
    """Return the network interface with this IP address."""
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return interface
    return None


def _free_bytes(folder: str) -> int | None:
    """Return the free space of the file system of a folder; None without the folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """The counters of a device at one moment, since the driver was loaded."""

    # Moment of the reading by `time.monotonic`.
    time_s: float
    # None: unknown or not read.
    energy_j: float | None = None
    # Reason -> seconds for which the clocks were limited; empty if the device does not count them.
    limited_s: Mapping[str, float] = field(default_factory=dict)


# The readings before and after something, such as a block of steps.
ReadingSpan = tuple[DeviceReading | None, DeviceReading | None]


class Counters:
    """Reads the energy of one device, and how long its clocks were limited."""

    def __init__(self, device: torch.device) -> None:
        self._handle = None
        if device.type == "cuda":
            import torch

            # NVML has the prefix, torch does not.
            self._handle = nvml.device(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def read(self, *, with_energy: bool = True) -> DeviceReading | None:
        """Return the counters now; None on a CPU or if NVML does not know the device.

        Args:
            with_energy: read the energy too, which takes longer than all other counters.
        """
        if self._handle is None:
            return None
        energy_mj = None
        if with_energy:
            energy_mj = nvml.ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        limited_ns = nvml.field_values(self._handle, tuple(nvml.LIMITED_NS_FIELDS))
        limited_s = {
            reason: limited_ns[counter] / NS_PER_S
            for counter, reason in nvml.LIMITED_NS_FIELDS.items()
            if counter in limited_ns
        }
        # Older drivers lack these counters.
        for policy, reason in nvml.LIMITED_NS_POLICIES.items():
            if reason not in limited_s:
                status = nvml.ask(pynvml.nvmlDeviceGetViolationStatus, self._handle, policy)
                if status is not None:
                    limited_s[reason] = status.violationTime / NS_PER_S
        return DeviceReading(
            time_s=time.monotonic(),
            energy_j=None if energy_mj is None else energy_mj / MJ_PER_J,
            limited_s=limited_s,
        )

    def temperature_c(self) -> float | None:
        """Return the temperature of the GPU now; None if unknown."""
        return None if self._handle is None else nvml.temperature_c(self._handle)


def wait_until_unlimited(
    counters: Counters, since: DeviceReading | None, at_most_s: float = _LONGEST_WAIT_S
) -> None:
    """Block until the clocks were not limited for 0.3 s, so that earlier work has no effect.

    Args:
        since: an earlier reading, at which the 0.3 s may begin; None returns at once.
        at_most_s: longest wait, at most 3 s.
    """
    if since is None:
        return
    deadline_s = time.monotonic() + min(at_most_s, _LONGEST_WAIT_S)
    previous, unlimited_since_s = since, since.time_s
    # A device without counters of limited clocks ends the wait at once.
    while (reading := counters.read(with_energy=False)) is not None and reading.limited_s:
        if reading.limited_s != previous.limited_s:
            unlimited_since_s = reading.time_s
        if reading.time_s - unlimited_since_s >= _UNLIMITED_S or time.monotonic() >= deadline_s:
            return
        previous = reading
        time.sleep(_WAIT_POLL_S)


def throttle_reasons(before: DeviceReading | None, after: DeviceReading | None) -> tuple[str, ...]:
    """Return the reasons that limited the clocks for over 2 % of the time between two readings.

    Reasons are names such as "power_cap". Empty if a reading is None.
    """
    if before is None or after is None:
        return ()
    threshold_s = (after.time_s - before.time_s) * _LIMITED_SHARE
    return tuple(
        reason
        for reason, limited_s in after.limited_s.items()
        if reason in before.limited_s and limited_s - before.limited_s[reason] > threshold_s
    )


def is_limited_by_heat(before: DeviceReading | None, after: DeviceReading | None) -> bool:
    """Return whether heat or a power brake is among `throttle_reasons`; False if unknown."""
    return not _HEAT_OR_POWER_BRAKE.isdisjoint(throttle_reasons(before, after))


def seconds_between(spans: Iterable[ReadingSpan]) -> float:
    """Return the total duration of spans (before, after); unknown readings count as 0."""
    return sum(after.time_s - before.time_s for before, after in spans if before and after)


def energy_j(spans: Sequence[ReadingSpan]) -> float | None:
    """Return the energy in J of all spans; None if it is unknown or the spans last under 2 s."""
    used_j = 0.0
    for before, after in spans:
        if before is None or after is None or before.energy_j is None or after.energy_j is None:
            return None
        used_j += after.energy_j - before.energy_j
    return used_j if seconds_between(spans) >= _SHORTEST_ENERGY_S else None


class Sampler:
    """Samples the GPUs of this node in a thread; reads the SM clock at least every 0.1 s."""

    def __init__(self, devices: Sequence[Device], period_s: float = 1.0) -> None:
        self._devices: list[tuple[Device, Any]] = []
        for device in devices:
            handle = nvml.device(device.uuid)
            if handle is not None:
                self._devices.append((device, handle))
        self._period_s = period_s
        self._samples: deque[DeviceSample] = deque()
        self._clocks: dict[str, deque[ClockReading]] = {
            device.uuid: deque(maxlen=_KEPT_CLOCKS) for device, _ in self._devices
        }
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        """Start the thread if there is a device to sample. Call it once."""
        if self._devices:
            self._thread.start()

    def drain(self) -> tuple[DeviceSample, ...]:
        """Return the samples since the last call, oldest first."""
        return tuple(self._samples.popleft() for _ in range(len(self._samples)))

    def sm_clocks_mhz(self, uuid: str, spans_ns: Sequence[SpanNs]) -> tuple[int, ...]:
        """Return the SM clocks of a device in MHz during spans of the last half hour.

        As in `clocks_within`, a reading near the last span may take the place of a missing one.

        Args:
            uuid: UUID of the device. An unknown device has no clocks.
            spans_ns: (begin, end) by `time.monotonic_ns`.
        """
        return clocks_within(list(self._clocks.get(uuid, ())), spans_ns)

    def stop(self) -> None:
        """Stop the thread and wait for its end; `drain` still returns its samples."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """Read the SM clocks in each period, and take a sample when it is due."""
        due_s = time.monotonic() + self._period_s
        while not self._stopped.wait(min(_CLOCK_PERIOD_S, self._period_s)):
            for device, handle in self._devices:
                clock = nvml.ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
                if clock is not None:
                    self._clocks[device.uuid].append((time.monotonic_ns(), clock))
            if time.monotonic() >= due_s:
                due_s += self._period_s
                self._samples.extend(_sample(device, handle) for device, handle in self._devices)


def clocks_within(clocks: Sequence[ClockReading], spans_ns: Sequence[SpanNs]) -> tuple[int, ...]:
    """Return the clocks in MHz during the spans, oldest first.

    Without a reading in any span, the reading nearest to the last span counts.

    Args:
        clocks: readings, oldest first.
        spans_ns: (begin, end) by `time.monotonic_ns`.
    """
    within = []
    for at_ns, mhz in clocks:
        if any(begin_ns <= at_ns <= end_ns for begin_ns, end_ns in spans_ns):
            within.append(mhz)
    if within or not spans_ns:
        return tuple(within)
    # A reading at most 0.1 s away counts, because the device did the same work then.
    begin_ns, end_ns = spans_ns[-1]
    distances = [(max(begin_ns - at_ns, at_ns - end_ns), mhz) for at_ns, mhz in clocks]
    distance_ns, mhz = min(distances, default=(math.inf, 0))
    return (mhz,) if distance_ns <= _CLOCK_PERIOD_S * NS_PER_S else ()


def memory_in_use_bytes() -> dict[str, int]:
    """Return UUID -> memory of processes in bytes, for each GPU of the host that NVML reads."""
    used = {}
    for handle in nvml.devices():
        uuid, memory = nvml.ask(pynvml.nvmlDeviceGetUUID, handle), nvml.memory(handle)
        if uuid is not None and memory is not None:
            used[uuid] = memory.used
    return used


def _sample(device: Device, handle: Any) -> DeviceSample:
    """Return clocks, power, memory and NVLink traffic of a GPU now."""
    # Reading PCIe throughput, running processes or fans is slow or blocks other work.
    use = nvml.ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = nvml.memory(handle)
    traffic_kib = nvml.field_values(handle, (_NVLINK_TX, _NVLINK_RX))
    traffic_bytes = {field: int(kib) * KIB for field, kib in traffic_kib.items()}
    return DeviceSample(
        node_id=device.node_id,
        index=device.index,
        uuid=device.uuid,
        time=datetime.now(UTC),
        sm_clock_mhz=nvml.ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        memory_clock_mhz=nvml.ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        power_w=nvml.watts(pynvml.nvmlDeviceGetPowerUsage, handle),
        temperature_c=nvml.temperature_c(handle),
        gpu_utilization_pct=None if use is None else float(use.gpu),
        memory_utilization_pct=None if use is None else float(use.memory),
        memory_used_bytes=None if memory is None else memory.used,
        ecc_errors=nvml.ecc_errors(handle),
        nvlink_tx_bytes=traffic_bytes.get(_NVLINK_TX),
        nvlink_rx_bytes=traffic_bytes.get(_NVLINK_RX),
        throttle_reasons=nvml.current_throttle_reasons(handle),
    )


class FactReader:
    """Reads facts of the devices of this node, and collects their driver errors."""

    def __init__(self, kernel_log: Path = Path("/dev/kmsg")) -> None:
        self._kernel_log = kernel_log
        # UUID -> watch; it begins with the first `read`.
        self._watches: dict[str, _XidWatch] = {}

    def read(self, devices: Sequence[Device]) -> tuple[DeviceFacts, ...]:
        """Return the facts of each device now; a CPU, or a GPU without NVML, has no values."""
        logged_xids = kernel_xids(self._kernel_log)
        return tuple(self._read_device(device, logged_xids) for device in devices)

    def _read_device(self, device: Device, logged_xids: _LoggedXids | None) -> DeviceFacts:
        """Return the facts of a device; `logged_xids` is None if the kernel's log is unreadable."""
        now_s = time.monotonic()
        handle = nvml.device(device.uuid) if device.kind == "cuda" else None
        if handle is None:
            unread = "NVML does not answer" if device.kind == "cuda" else ""
            return DeviceFacts(device=device, read_s=now_s, unread=unread)
        if device.uuid not in self._watches:
            self._watches[device.uuid] = _XidWatch(handle, now_s)
        watch = self._watches[device.uuid]

        # Driver errors in the kernel's log.
        device_xids = None
        pci = nvml.ask(pynvml.nvmlDeviceGetPciInfo, handle)
        if pci is not None and logged_xids is not None:
            # "00000000:1B:00.0" is domain, bus, device and function, in hexadecimal.
            without_function, _, _ = pci.busId.partition(".")
            address = tuple(int(part, 16) for part in without_function.split(":"))
            device_xids = tuple(logged_xids.get(address, ()))

        # Memory, and its repairs.
        memory = nvml.memory(handle)
        remapped = nvml.ask(pynvml.nvmlDeviceGetRemappedRows, handle)
        # Number of retired pages, for each cause that the driver reports.
        retired = []
        for cause in _RETIREMENT_CAUSES:
            addresses = nvml.ask(pynvml.nvmlDeviceGetRetiredPages, handle, cause)
            if addresses is not None:
                retired.append(len(addresses))
        pending = nvml.ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        return DeviceFacts(
            device=device,
            read_s=now_s,
            kernel_xids=device_xids,
            # All Xids since `xids_watched_since_s`.
            new_xids=watch.read(),
            xids_watched_since_s=watch.since_s,
            memory_free_bytes=None if memory is None else memory.free,
            ecc_errors=nvml.ecc_errors(handle),
            # Rows remapped after correctable and after uncorrectable errors.
            remapped_rows=remapped[0] + remapped[1] if remapped else None,
            is_remap_pending=nvml.flag(remapped and remapped[2]),
            is_remap_failed=nvml.flag(remapped and remapped[3]),
            retired_pages=sum(retired) if retired else None,
            is_retirement_pending=nvml.flag(pending),
            **_link_facts(handle),
        )


class _XidWatch:
    """Collects the driver errors (Xid) of one device since `since_s`, by events of NVML."""

    def __init__(self, handle: Any, since_s: float) -> None:
        self.since_s = since_s
        self._xids: list[int] = []
        # None if the driver reports no events.
        self._event_set = nvml.ask(pynvml.nvmlEventSetCreate)
        if self._event_set is not None:
            try:
                pynvml.nvmlDeviceRegisterEvents(
                    handle, pynvml.nvmlEventTypeXidCriticalError, self._event_set
                )
            except pynvml.NVMLError:
                self._event_set = None

    def read(self) -> tuple[int, ...] | None:
        """Return the Xid numbers of all errors, oldest first; None if the driver has no events."""
        if self._event_set is None:
            return None
        for _ in range(_MOST_EVENTS):
            event = nvml.ask(pynvml.nvmlEventSetWait_v2, self._event_set, 0)
            if event is None:
                break
            self._xids.append(int(event.eventData))
        return tuple(self._xids)


def kernel_xids(log: Path) -> dict[tuple[int, ...], list[int]] | None:
    """Return PCI (domain, bus, device) -> Xid numbers of its driver errors, oldest first.

    Args:
        log: /dev/kmsg, or a regular file of at most 8 KiB. A log that cannot be read gives None.
    """
    xids: dict[tuple[int, ...], list[int]] = {}
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as records:
            while True:
                try:
                    record = records.read(_RECORD_BYTES)
                except BrokenPipeError:  # the kernel has overwritten this record
                    continue
                if not record:  # no more records now
                    return xids
                for *address, number in _XID_LINE.findall(record):
                    device = tuple(int(part, 16) for part in address)
                    xids.setdefault(device, []).append(int(number))
    except OSError:
        return None


def _link_facts(handle: Any) -> dict[str, Any]:
    """Return the fields of `DeviceFacts` on PCIe, NVLinks and fabric."""
    links = [
        NvLink(link=link, is_active=is_active, errors=_link_errors(handle, link))
        for link, is_active in nvml.nvlink_states(handle).items()
    ]
    facts = {
        "pcie_replays": nvml.ask(pynvml.nvmlDeviceGetPcieReplayCounter, handle),
        "pcie_lanes": nvml.ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "pcie_lanes_max": nvml.ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "nvlinks": tuple(links) or None,
    }

    # The fabric of NVLink switches.
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    if nvml.ask(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, byref(info)) is None:
        return facts
    state = _FABRIC_STATES.get(info.state)
    mask = info.healthMask
    # The two bits of a fault: 0 is not supported, 1 is true, 2 is false.
    faults = [name for shift, name in _FABRIC_FAULTS.items() if (mask >> shift) & 0b11 == 1]
    # The configuration has four bits: 0 is not supported, 1 is correct, and more is a fault.
    shift = pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION
    if (mask >> shift) & 0b1111 > 1:
        faults.append("an incorrect configuration")
    if state == "completed" and info.status != pynvml.NVML_SUCCESS:
        faults.insert(0, f"error {info.status} of the fabric manager")
    return {**facts, "fabric_state": state, "fabric_faults": tuple(faults)}


def _link_errors(handle: Any, link: int) -> dict[str, int]:
    """Return "crc", "replay" or "recovery" -> number of errors that the driver has counted."""
    counts = {
        kind: nvml.ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, counter)
        for kind, (counter, _) in _LINK_ERRORS.items()
    }
    # That function works up to Hopper; newer drivers have fields instead.
    if None in counts.values():
        fields = {kind: (field_id, link) for kind, (_, field_id) in _LINK_ERRORS.items()}
        values = nvml.field_values(handle, tuple(fields.values()))
        for kind, field_of_link in fields.items():
            if counts[kind] is None and field_of_link in values:
                counts[kind] = int(values[field_of_link])
    return {kind: count for kind, count in counts.items() if count is not None}
