"""State and error counters of the devices of one node, from NVML and the kernel's log.

To be read before and after a health check, not while something is timed: it takes some hundred
calls of NVML a device. A fact that NVML does not tell is None; the kernel's log may need root.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from ctypes import byref
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pynvml

from raybench.hardware import nvml
from raybench.records import Device
from raybench.records.devices import DeviceFacts, NvLink

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


class FactReader:
    """Reads the devices of this node, and watches each for driver errors from its first reading on.

    kernel_log: the log as the kernel offers it to those who may read it.
    """

    def __init__(self, kernel_log: Path = Path("/dev/kmsg")) -> None:
        self._kernel_log = kernel_log
        self._watches: dict[str, _XidWatch] = {}

    def read(self, devices: Sequence[Device]) -> tuple[DeviceFacts, ...]:
        """Return the facts of each device now; those of a CPU, or without NVML, are empty."""
        logged = kernel_xids(self._kernel_log)
        return tuple(self._read_device(device, logged) for device in devices)

    def _read_device(self, device: Device, logged: _LoggedXids | None) -> DeviceFacts:
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
            numa_node=nvml.numa_node(handle),
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
        """Return the numbers of all errors since `since`; None where they are unknown."""
        if self._events is None:
            return None
        for _ in range(_MOST_EVENTS):
            event = nvml.ask(pynvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:  # there is none left
                break
            self._seen.append(int(event.eventData))
        return tuple(self._seen)


def kernel_xids(log: Path) -> dict[tuple[int, ...], list[int]] | None:
    """Return the driver errors in the kernel's log, by PCI domain, bus and device.

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
    memory = nvml.memory(handle)
    rows = nvml.ask(pynvml.nvmlDeviceGetRemappedRows, handle) or (None,) * 4
    pages = [nvml.ask(pynvml.nvmlDeviceGetRetiredPages, handle, cause) for cause in _RETIREMENTS]
    told = [addresses for addresses in pages if addresses is not None]
    pending = nvml.ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return {
        "memory_total_bytes": None if memory is None else memory.total - memory.reserved,
        "memory_free_bytes": None if memory is None else memory.free,
        "ecc_errors": nvml.ecc_errors(handle),
        "remapped_rows_correctable": rows[0],
        "remapped_rows_uncorrectable": rows[1],
        "is_remap_pending": nvml.flag(rows[2]),
        "is_remap_failed": nvml.flag(rows[3]),
        "retired_pages": sum(map(len, told)) if told else None,
        "is_retirement_pending": nvml.flag(pending),
    }


def _link_facts(handle: Any) -> dict[str, Any]:
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
