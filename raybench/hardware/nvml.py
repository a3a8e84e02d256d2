"""Calls of NVML that return None instead of raising NVMLError.

NVML is opened once per process and stays open, because opening is expensive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pynvml

# A field of `nvmlDeviceGetFieldValues`, or (field, scope). The scope of NVLink fields is the link.
Field = int | tuple[int, int]

# Bit of NVML -> reason why clocks are limited, as tables name it.
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
# Counters of the reasons, in nanoseconds since the driver was loaded. Idling and clocks set by an
# administrator are left out, because they do not slow the work down.
LIMITED_NS_FIELDS = {
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP: "power_cap",
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST: "sync_boost",
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN: "thermal_sw",
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN: "thermal_hw",
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN: "power_brake",
}
# Counters of older drivers. They have one counter for all thermal limits, most of them by software.
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
    """Return the NVML handle of a device; None if NVML cannot open the device.

    Args:
        uuid: UUID of torch with the prefix "GPU-".
    """
    return ask(pynvml.nvmlDeviceGetHandleByUUID, uuid) if _is_open() else None


def devices() -> list[Any]:
    """Return handles of all GPUs that NVML can open, in PCI order, even if hidden from CUDA."""
    count = (ask(pynvml.nvmlDeviceGetCount) or 0) if _is_open() else 0
    handles = [ask(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
    return [handle for handle in handles if handle is not None]


def uuids() -> dict[str, int]:
    """Return UUID -> number in nvidia-smi, for each GPU that NVML can open."""
    numbers = {}
    count = (ask(pynvml.nvmlDeviceGetCount) or 0) if _is_open() else 0
    for number in range(count):
        handle = ask(pynvml.nvmlDeviceGetHandleByIndex, number)
        uuid = None if handle is None else ask(pynvml.nvmlDeviceGetUUID, handle)
        if uuid is not None:
            numbers[uuid] = number
    return numbers


def uuid_of(index: int) -> str | None:
    """Return the UUID of the device with this CUDA index; None if unknown or a MIG device.

    CUDA is assumed to order devices by PCI bus. It is not asked, because a bad device may hang it.

    Raises:
        IndexError: CUDA_VISIBLE_DEVICES has fewer entries.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # An entry is a number in PCI order, or a UUID.
    entry = visible.split(",")[index].strip() if visible else str(index)
    if not entry.isdecimal():
        is_known_gpu = entry.startswith("GPU-") and device(entry) is not None
        return entry if is_known_gpu else None
    handle = ask(pynvml.nvmlDeviceGetHandleByIndex, int(entry)) if _is_open() else None
    return None if handle is None else ask(pynvml.nvmlDeviceGetUUID, handle)


@cache
def _is_open() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def ask(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any | None:
    """Call a function of NVML; return None if it raises NVMLError, such as before NVML is open."""
    try:
        return function(*arguments, **named)
    except pynvml.NVMLError:
        return None


def field_values(handle: Any, fields: Sequence[Field]) -> dict[Field, int | float]:
    """Return field -> value, read in one call; fields without a value are left out."""
    answers = ask(pynvml.nvmlDeviceGetFieldValues, handle, list(fields)) or ()
    values = {}
    for field, answer in zip(fields, answers, strict=False):  # () if the call failed
        if answer.nvmlReturn == pynvml.NVML_SUCCESS and answer.valueType in _MEMBER_OF_TYPE:
            # `answer.value` is a union of C, whose member depends on the type of the value.
            values[field] = getattr(answer.value, _MEMBER_OF_TYPE[answer.valueType])
    return values


def current_throttle_reasons(handle: Any) -> tuple[str, ...]:
    """Return why the clocks are limited now, such as "power_cap" or "idle"; empty if unknown.

    A bit without a name is returned in hexadecimal, as "0x800".
    """
    bits = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is None:
        # Drivers before 535 lack the function above.
        bits = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    positions = range(int(bits).bit_length())
    active = [1 << position for position in positions if bits >> position & 1]
    return tuple(_REASON_OF_BIT.get(bit, hex(bit)) for bit in active)


def temperature_c(handle: Any) -> float | None:
    """Return the temperature of the GPU in degrees Celsius."""
    sensor = pynvml.NVML_TEMPERATURE_GPU
    answer = ask(pynvml.nvmlDeviceGetTemperatureV, handle, sensor)
    if answer is None:
        # Drivers before 570 lack the function above.
        answer = ask(pynvml.nvmlDeviceGetTemperature, handle, sensor)
    return None if answer is None else float(answer)


def watts(function: Callable[..., Any], handle: Any) -> float | None:
    """Return a power in watts.

    Args:
        function: a function of NVML that returns milliwatts for a handle.
    """
    answer = ask(function, handle)
    return None if answer is None else answer / 1000


def ecc_errors(handle: Any) -> int | None:
    """Return the number of uncorrected memory errors since the driver was loaded."""
    kind, counter = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, counter)


def memory(handle: Any) -> Any | None:
    """Return `total`, `free`, `reserved` (by the driver) and `used` (by processes), in bytes."""
    # Only the second version separates the memory that the driver reserves.
    return ask(pynvml.nvmlDeviceGetMemoryInfo, handle, version=pynvml.nvmlMemory_v2)


def nvlink_states(handle: Any) -> dict[int, bool]:
    """Return number of an NVLink -> whether the link is up."""
    answers = {
        link: ask(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
    }
    return {link: bool(state) for link, state in answers.items() if state is not None}


def process_ids(handle: Any) -> set[int]:
    """Return the ids of processes with a context on the GPU; a container may hide some.

    Call it between points, because it may delay other work on the GPU.
    """
    graphics = ask(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()
    return compute_process_ids(handle) | {process.pid for process in graphics}


def compute_process_ids(handle: Any) -> set[int]:
    """Return the ids of processes with a compute context, which desktops do not have."""
    running = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return {process.pid for process in running}


def flag(answer: int | None) -> bool | None:
    """Return 0 or 1 as a bool; None for None."""
    return None if answer is None else bool(answer)
