"""The devices of one node by NVML and the kernel's log: samples, and state and error counters.

`Sampler` reads once a second while points run, and clocks ten times, in a process of its own: in a
worker a thread would compete with the steps for the interpreter. `FactReader` reads before and
after a health check, not while something is timed: it takes some hundred calls of NVML a device.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from ctypes import byref
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pynvml

from raybench.hardware import nvml
from raybench.records import Device, DeviceSample, SpanNs
from raybench.records.devices import DeviceFacts, NvLink

# When the SM clock was read, by the host's monotonic clock in ns, and the clock in MHz.
ClockReading = tuple[int, int]

_NS_PER_S = 1e9
_BYTES_PER_KIB = 1024
# A reading of the clock takes some 30 us.
_CLOCK_PERIOD_S = 0.1
# Half an hour of readings.
_MOST_CLOCKS = 18_000
# NVML's scope for the sum over all links.
_ALL_LINKS = 0xFFFFFFFF
_NVLINK_TX = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS)
_NVLINK_RX = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS)

# PCI domain, bus and device of the GPU, and the number of the error.
_XID_LINE = re.compile(rb"NVRM: Xid \(PCI:([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)[^)]*\): (\d+)", re.I)
_RECORD_BYTES = 8192
# A burst of errors may leave so many events to be read at once.
_MOST_EVENTS = 1000

_FABRIC_STATES = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "not started",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "in progress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: "completed",
}
# Two bits each in the mask of the fabric's health: 1 is true, 2 false, 0 not supported.
_FABRIC_FAULTS = {
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW: "degraded bandwidth",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY: "an unhealthy route",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY: "access timeouts",
}
# The driver has a call for each counter up to Hopper, and a field later.
_LINK_ERRORS = {
    "crc": (pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT, pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC),
    "replay": (pynvml.NVML_NVLINK_ERROR_DL_REPLAY, pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY),
    "recovery": (pynvml.NVML_NVLINK_ERROR_DL_RECOVERY, pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY),
}
_RETIREMENTS = (
    pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
    pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
)

# PCI address (domain, bus, device) -> numbers of the errors in the kernel's log.
_LoggedXids = Mapping[tuple[int, ...], Sequence[int]]


class Sampler:
    """Samples devices of this node in a thread; devices that NVML does not know are left out.

    period_s: between two samples. The SM clock is read each 0.1 s, or each period if that is
    shorter.
    """

    def __init__(self, devices: Sequence[Device], period_s: float = 1.0) -> None:
        asked = [(device, nvml.device(device.uuid)) for device in devices]
        self._devices = [(device, handle) for device, handle in asked if handle is not None]
        self._period_s = period_s
        self._samples: deque[DeviceSample] = deque()
        self._clocks: dict[str, deque[ClockReading]] = {
            device.uuid: deque(maxlen=_MOST_CLOCKS) for device, _ in self._devices
        }
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        """Start the thread; nothing where there are no devices. To be called once."""
        if self._devices:
            self._thread.start()

    def drain(self) -> tuple[DeviceSample, ...]:
        """Return the samples since the last call, oldest first, and drop them."""
        return tuple(self._samples.popleft() for _ in range(len(self._samples)))

    def sm_clocks_mhz(self, uuid: str, spans_ns: Sequence[SpanNs]) -> tuple[int, ...]:
        """Return the SM clocks of a device in these spans of time, as `clocks_within`.

        Empty for a device without samples. spans_ns: (begin, end) by the host's monotonic clock.
        """
        return clocks_within(list(self._clocks.get(uuid, ())), spans_ns)

    def stop(self) -> None:
        """Stop the thread and wait for its end; its samples can still be drained."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """Read clocks and samples of all devices until `stop` is called."""
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
    """Return the clocks in these spans of time, in MHz, the oldest first.

    Where no span contains a reading, the reading that is nearest to the last span, if it is at most
    0.1 s away: the device did the same work just before and afterwards. Else empty.
    clocks: oldest first. spans_ns: (begin, end) by the same clock as the readings.
    """
    within = [mhz for at_ns, mhz in clocks if any(begin <= at_ns <= end for begin, end in spans_ns)]
    if within or not spans_ns:
        return tuple(within)
    begin_ns, end_ns = spans_ns[-1]
    near = [(max(begin_ns - at_ns, at_ns - end_ns), mhz) for at_ns, mhz in clocks]
    away_ns, mhz = min(near, default=(math.inf, 0))
    return (mhz,) if away_ns <= _CLOCK_PERIOD_S * _NS_PER_S else ()


def memory_in_use_bytes() -> dict[str, int]:
    """Return the memory in use on each GPU of this node, by UUID; empty without NVML."""
    read = [
        (nvml.ask(pynvml.nvmlDeviceGetUUID, handle), nvml.memory(handle))
        for handle in nvml.devices()
    ]
    return {uuid: memory.used for uuid, memory in read if uuid is not None and memory is not None}


def _sample(device: Device, handle: Any) -> DeviceSample:
    """Return one sample of a device, from about ten cheap calls; unknown values are None.

    Left out, because they are slow or hold up other processes' work: PCIe throughput (NVML
    measures it while it blocks), running processes, fans.
    """
    use = nvml.ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = nvml.memory(handle)
    traffic = nvml.field_values(handle, (_NVLINK_TX, _NVLINK_RX))
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
        nvlink_tx_bytes=_bytes(traffic.get(_NVLINK_TX)),
        nvlink_rx_bytes=_bytes(traffic.get(_NVLINK_RX)),
        throttle_reasons=nvml.throttle_reasons(handle),
    )


def _bytes(kib: float | None) -> int | None:
    return None if kib is None else int(kib) * _BYTES_PER_KIB


class FactReader:
    """Reads the devices of this node, and watches each for driver errors from its first reading on.

    kernel_log: the log as the kernel offers it to those who may read it.
    """

    def __init__(self, kernel_log: Path = Path("/dev/kmsg")) -> None:
        self._kernel_log = kernel_log
        self._watches: dict[str, _XidWatch] = {}

    def read(self, devices: Sequence[Device]) -> tuple[DeviceFacts, ...]:
        """Return the facts of each device now, in order; unknown facts are None.

        Of a CPU all are unknown; of a GPU that NVML does not know too, and `unread` says so.
        """
        logged = kernel_xids(self._kernel_log)
        return tuple(self._read_device(device, logged) for device in devices)

    def _read_device(self, device: Device, logged: _LoggedXids | None) -> DeviceFacts:
        """Return the facts of one device, and watch it from now on. logged: as of `kernel_xids`."""
        now = datetime.now(UTC)
        handle = nvml.device(device.uuid) if device.kind == "cuda" else None
        if handle is None:
            unread = "NVML does not answer" if device.kind == "cuda" else ""
            return DeviceFacts(device=device, read_at=now, unread=unread)
        if device.uuid not in self._watches:
            self._watches[device.uuid] = _XidWatch(handle, now)
        watch, address = self._watches[device.uuid], nvml.pci_address(handle)
        capability = nvml.ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        return DeviceFacts(
            device=device,
            read_at=now,
            kernel_xids=(
                None if address is None or logged is None else tuple(logged.get(address, ()))
            ),
            new_xids=watch.read(),
            xids_watched_since=watch.since,
            compute_capability=None if capability is None else "{}.{}".format(*capability),
            **_memory_facts(handle),
            **_link_facts(handle),
        )


class _XidWatch:
    """The driver errors of one device since `since`, as NVML reports them by events."""

    def __init__(self, handle: Any, since: datetime) -> None:
        self.since = since
        self._seen: list[int] = []
        self._events = nvml.ask(pynvml.nvmlEventSetCreate)
        if self._events is not None:
            try:
                pynvml.nvmlDeviceRegisterEvents(
                    handle, pynvml.nvmlEventTypeXidCriticalError, self._events
                )
            except pynvml.NVMLError:
                self._events = None

    def read(self) -> tuple[int, ...] | None:
        """Return the Xid numbers of all errors since `since`, oldest first; None if unknown."""
        if self._events is None:
            return None
        for _ in range(_MOST_EVENTS):
            event = nvml.ask(pynvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:  # there is none left
                break
            self._seen.append(int(event.eventData))
        return tuple(self._seen)


def kernel_xids(log: Path) -> dict[tuple[int, ...], list[int]] | None:
    """Return the Xid numbers in the kernel's log, oldest first, by PCI (domain, bus, device).

    None where the log may not be read.
    """
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found: dict[tuple[int, ...], list[int]] = {}
    try:
        for line in b"".join(_records(descriptor)).splitlines():
            if match := _XID_LINE.search(line):
                *address, number = match.groups()
                found.setdefault(tuple(int(part, 16) for part in address), []).append(int(number))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return found


def _records(descriptor: int) -> Iterable[bytes]:
    """Yield the records that the log has now; one that the kernel dropped meanwhile is skipped."""
    while True:
        try:
            record = os.read(descriptor, _RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue
        if not record:
            return
        yield record


def _memory_facts(handle: Any) -> dict[str, Any]:
    """Return the fields of `DeviceFacts` about memory; None where NVML does not answer."""
    memory = nvml.memory(handle)
    remapped = nvml.ask(pynvml.nvmlDeviceGetRemappedRows, handle)
    pages = [nvml.ask(pynvml.nvmlDeviceGetRetiredPages, handle, cause) for cause in _RETIREMENTS]
    told = [addresses for addresses in pages if addresses is not None]
    pending = nvml.ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return {
        "memory_total_bytes": None if memory is None else memory.total - memory.reserved,
        "memory_free_bytes": None if memory is None else memory.free,
        "ecc_errors": nvml.ecc_errors(handle),
        # Those after errors that could be corrected, and those after others.
        "remapped_rows": remapped[0] + remapped[1] if remapped else None,
        "is_remap_pending": nvml.flag(remapped and remapped[2]),
        "is_remap_failed": nvml.flag(remapped and remapped[3]),
        "retired_pages": sum(map(len, told)) if told else None,
        "is_retirement_pending": nvml.flag(pending),
    }


def _link_facts(handle: Any) -> dict[str, Any]:
    """Return the fields of `DeviceFacts` about PCIe, NVLinks and the fabric that NVML answers."""
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
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    if nvml.ask(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, byref(info)) is None:
        return facts
    state = _FABRIC_STATES.get(info.state)
    faults = [name for shift, name in _FABRIC_FAULTS.items() if info.healthMask >> shift & 3 == 1]
    if state == "completed" and info.status != pynvml.NVML_SUCCESS:
        faults.insert(0, f"error {info.status} of the fabric manager")
    return {**facts, "fabric_state": state, "fabric_faults": tuple(faults)}


def _link_errors(handle: Any, link: int) -> dict[str, int]:
    """Return the errors of one NVLink by kind, without kinds that this driver does not count."""
    fields = {name: (field, link) for name, (_, field) in _LINK_ERRORS.items()}
    counted = {
        name: nvml.ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, counter)
        for name, (counter, _) in _LINK_ERRORS.items()
    }
    if None in counted.values():
        values = nvml.field_values(handle, tuple(fields.values()))
        for name, field in fields.items():
            if counted[name] is None and field in values:
                counted[name] = int(values[field])
    return {name: errors for name, errors in counted.items() if errors is not None}
