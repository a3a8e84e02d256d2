"""Calls of NVML: devices by UUID, and an answer or None, never an NVMLError.

NVML is opened once per process, by `device`, `devices` or `uuid_of`, and stays open: opening it is
expensive, holding it is not. A device, a driver or a container that cannot answer one question may
answer the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pynvml

# A field of `nvmlDeviceGetFieldValues`, alone or with its scope (for NVLink: the link).
Field = int | tuple[int, int]

# Why clocks are limited, by NVML's bit. These words are those of the tables.
_REASON_OF_BIT = {
    pynvml.nvmlClocksEventReasonGpuIdle: "idle",
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "app_clocks",
    pynvml.nvmlClocksEventReasonSwPowerCap: "power_cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "thermal_sw",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "thermal_hw",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power_brake",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display_clocks",
}
# The same reasons where NVML counts the time, in nanoseconds since the driver was loaded.
# Low utilization and the clocks that an administrator set are counted too, but not read: then
# there was little to do, or the device ran at the clocks that it was told; it was not held back.
LIMITED_NS_FIELDS = {
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP: "power_cap",
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST: "sync_boost",
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN: "thermal_sw",
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN: "thermal_hw",
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN: "power_brake",
}
# Older drivers have these only. Thermal limits are one here; most are those of the software.
LIMITED_NS_POLICIES = {
    pynvml.NVML_PERF_POLICY_POWER: "power_cap",
    pynvml.NVML_PERF_POLICY_SYNC_BOOST: "sync_boost",
    pynvml.NVML_PERF_POLICY_THERMAL: "thermal_sw",
}

_MEMBER_OF_TYPE = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


def device(uuid: str) -> Any | None:
    """Return the NVML handle; None where NVML gives none. uuid: torch's with "GPU-" before it."""
    return ask(pynvml.nvmlDeviceGetHandleByUUID, uuid) if _is_open() else None


def devices() -> list[Any]:
    """Return handles of all GPUs that NVML can open, in PCI order, also those hidden from CUDA."""
    count = (ask(pynvml.nvmlDeviceGetCount) or 0) if _is_open() else 0
    handles = [ask(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
    return [handle for handle in handles if handle is not None]


def uuids() -> dict[str, int]:
    """Return UUID -> number of each GPU that NVML can open, as nvidia-smi counts them."""
    found = {}
    for number in range((ask(pynvml.nvmlDeviceGetCount) or 0) if _is_open() else 0):
        handle = ask(pynvml.nvmlDeviceGetHandleByIndex, number)
        uuid = None if handle is None else ask(pynvml.nvmlDeviceGetUUID, handle)
        if uuid is not None:
            found[uuid] = number
    return found


def uuid_of(index: int) -> str | None:
    """Return the UUID of the device with this CUDA index; None if NVML does not know it.

    It follows CUDA_VISIBLE_DEVICES (empty: as if unset), of which an entry MIG-... gives None,
    and assumes the order of the PCI bus. CUDA is not asked, because a bad device may hang the
    process. Raises IndexError for an index beyond CUDA_VISIBLE_DEVICES.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    entry = visible.split(",")[index].strip() if visible else str(index)
    if not entry.isdecimal():
        return entry if entry.startswith("GPU-") and device(entry) is not None else None
    handle = ask(pynvml.nvmlDeviceGetHandleByIndex, int(entry)) if _is_open() else None
    return None if handle is None else ask(pynvml.nvmlDeviceGetUUID, handle)


@cache
def _is_open() -> bool:
    """Open NVML at the first call; return whether it could be opened."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def ask(question: Callable[..., Any], *arguments: Any, **named: Any) -> Any | None:
    """Return the function's answer; None if it raises NVMLError, as all do before NVML is open."""
    try:
        return question(*arguments, **named)
    except pynvml.NVMLError:
        return None


def field_values(handle: Any, fields: Sequence[Field]) -> dict[Field, int | float]:
    """Return the values of fields, read in one call; fields without a value are left out."""
    answers = ask(pynvml.nvmlDeviceGetFieldValues, handle, list(fields)) or ()
    return {
        field: getattr(answer.value, _MEMBER_OF_TYPE[answer.valueType])
        for field, answer in zip(fields, answers, strict=False)
        if answer.nvmlReturn == pynvml.NVML_SUCCESS and answer.valueType in _MEMBER_OF_TYPE
    }


def current_throttle_reasons(handle: Any) -> tuple[str, ...]:
    """Return why the clocks are limited now, as ("power_cap",); empty if they are not, or unknown.

    "idle", and "app_clocks" for clocks that an administrator set, are reasons too. One that has no
    name here is shown as its bit, "0x800".
    """
    bits = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is None:
        # The name before driver 535.
        bits = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    positions = range(int(bits).bit_length())
    active = [1 << position for position in positions if bits >> position & 1]
    return tuple(_REASON_OF_BIT.get(bit, hex(bit)) for bit in active)


def temperature_c(handle: Any) -> float | None:
    """Return the GPU's temperature in degrees Celsius; None where it is unknown."""
    sensor = pynvml.NVML_TEMPERATURE_GPU
    answer = ask(pynvml.nvmlDeviceGetTemperatureV, handle, sensor)
    if answer is None:
        # Drivers before 570 have this one only.
        answer = ask(pynvml.nvmlDeviceGetTemperature, handle, sensor)
    return None if answer is None else float(answer)


def watts(question: Callable[..., Any], handle: Any) -> float | None:
    """Return the power in watts; None where it is unknown.

    question: a function of NVML that returns milliwatts for a handle.
    """
    answer = ask(question, handle)
    return None if answer is None else answer / 1000


def ecc_errors(handle: Any) -> int | None:
    """Return the uncorrected memory errors since the driver was loaded; None if not counted."""
    kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, since)


def memory(handle: Any) -> Any | None:
    """Return bytes: `total`, `free`, `reserved` (by the driver), `used` (by processes); or None."""
    # The second version counts what the driver reserves for itself apart.
    return ask(pynvml.nvmlDeviceGetMemoryInfo, handle, version=pynvml.nvmlMemory_v2)


def nvlink_states(handle: Any) -> dict[int, bool]:
    """Return number -> whether that NVLink of the device is up; empty if none is known."""
    answers = {
        link: ask(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
    }
    return {link: bool(state) for link, state in answers.items() if state is not None}


def process_ids(handle: Any) -> set[int]:
    """Return the ids of the processes with a context on the GPU; empty where NVML does not say.

    In a container some or all may be missing. Call it between points: it may delay others' work.
    """
    graphics = ask(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()
    return compute_process_ids(handle) | {process.pid for process in graphics}


def compute_process_ids(handle: Any) -> set[int]:
    """Return those of `process_ids` that compute, without desktops and displays."""
    running = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return {process.pid for process in running}


def flag(answer: int | None) -> bool | None:
    """Return 0 or 1 as a bool; None for None."""
    return None if answer is None else bool(answer)
