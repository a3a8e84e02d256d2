"""Checks of the state of GPUs by NVML; each function returns one. Pure.

A fact that NVML does not tell is shown as unknown, and is no reason for a warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from raybench.doctor.facts import UNKNOWN, Check, Facts, Verdict, describe, judge
from raybench.health.device_facts import (
    FREE_MEMORY,
    MEMORY_ERRORS,
    PCIE_LANES,
    facts_readings,
)
from raybench.records import Device
from raybench.records.devices import DeviceFacts

# Data-centre GPUs slow down at about 85 to 90 degrees; before any work they should be far below.
_WARM_C = 75.0
# The driver rounds caps.
_POWER_ROUNDING_W = 1.0
# In the words of `raybench.hardware.nvml`.
_NOTHING_TO_DO = "idle"
_HARDWARE_REASONS = frozenset({"hw_slowdown", "thermal_hw", "power_brake"})


def clocks(facts: Facts) -> Check:
    """Check the highest clock: below that of the other devices somebody has limited it."""
    best = _most(facts.devices, lambda device: device.sm_clock_max_mhz)
    return judge(
        "clocks",
        describe(facts.devices, _clock),
        [d for d in facts.devices if (d.sm_clock_max_mhz or best) < best],
        "lower than on the other devices: undo locked clocks with `nvidia-smi -rgc`",
    )


def throttling(facts: Facts) -> Check:
    """Check that no clock is limited before any work."""
    slowed = [device for device in facts.devices if _reasons(device)]
    by_hardware = any(_HARDWARE_REASONS.intersection(_reasons(device)) for device in slowed)
    return judge(
        "throttling",
        describe(facts.devices, _throttling),
        slowed,
        "clocks are limited before any work: look at cooling, power supply, caps and set clocks "
        "(nvidia-smi -q -d PERFORMANCE)",
        Verdict.FAIL if by_hardware else Verdict.WARN,
    )


def power(facts: Facts) -> Check:
    """Check that the power cap is not below the default of the model."""
    return judge(
        "power cap",
        describe(facts.devices, _cap),
        [device for device in facts.devices if _is_capped(device)],
        "below the default: heavy steps run at lower clocks; if that is not wanted, set it with "
        "`nvidia-smi -pl WATTS`",
    )


def temperature(facts: Facts) -> Check:
    """Check that no device is warm before any work."""
    known = [device for device in facts.devices if device.temperature_c is not None]
    warm = [device for device in known if (device.temperature_c or 0.0) > _WARM_C]
    degrees = [device.temperature_c for device in known if device.temperature_c is not None]
    found = f"{min(degrees):.0f} to {max(degrees):.0f} °C" if degrees else UNKNOWN
    if 0 < len(known) < len(facts.devices):
        found += f" on {len(known)} of {len(facts.devices)} devices, unknown on the others"
    if warm:
        found += (
            f"; above {_WARM_C:.0f} °C: {describe(warm, lambda d: f'{d.temperature_c:.0f} °C')}"
        )
    advice = "warm before any work: look at fans and airflow, and at who else uses the device"
    return judge("temperature", found, warm, advice)


def ecc(facts: Facts) -> Check:
    """Check that there were no memory errors that could not be corrected."""
    return judge(
        "ECC",
        describe(
            facts.devices,
            lambda d: None if d.ecc_errors is None else f"{d.ecc_errors} uncorrected errors",
        ),
        [device for device in facts.devices if device.ecc_errors],
        "memory errors since the driver was loaded: drain the node, reset the GPU, and have it "
        "replaced if they come back (nvidia-smi -q -d ECC,ROW_REMAPPER)",
        Verdict.FAIL,
    )


def memory(facts: Facts) -> Check:
    """Show the memory that workloads can have, and the compute capability; never a warning."""
    states = {state.device.uuid: state for state in facts.states}
    return judge("memory", describe(facts.devices, lambda d: _memory(states.get(d.uuid))), [], "")


def errors(facts: Facts) -> Check:
    """Check for the faults that `raybench health` reads: bad memory, links that are down, Xids.

    Uncorrected errors and PCIe lanes have checks of their own.
    """
    others = (FREE_MEMORY, MEMORY_ERRORS, PCIE_LANES)
    known = [
        reading
        for reading in facts_readings(facts.states, facts.states)
        if reading.value is not None and reading.test.name not in others
    ]
    problems = [(reading.subject, reading.problem.text) for reading in known if reading.problem]
    bad = {subject.uuids[0] for subject, _ in problems}
    lines = [f"{subject.name}: {text}" for subject, text in problems]
    return judge(
        "errors",
        "; ".join(lines) if lines else ("none" if known else UNKNOWN),
        [device for device in facts.devices if device.uuid in bad],
        "the hardware may be at fault: reset the GPU or restart its node, then see what "
        "`raybench health` says of it (nvidia-smi -q -d ROW_REMAPPER; dmesg | grep Xid)",
        Verdict.FAIL,
    )


def mig(facts: Facts) -> Check:
    """Check that the devices are whole GPUs, not slices of them."""
    return judge(
        "MIG",
        describe(facts.devices, lambda device: _switch(device.mig_mode)),
        [device for device in facts.devices if device.mig_mode],
        "a slice of a GPU is measured, NCCL cannot join slices, and clocks and power are shared "
        "with the other slices: switch it off with `nvidia-smi -mig 0`",
    )


def persistence(facts: Facts) -> Check:
    """Check that the driver stays loaded while nobody uses the device."""
    return judge(
        "persistence",
        describe(facts.devices, lambda device: _switch(device.persistence_mode)),
        [device for device in facts.devices if device.persistence_mode is False],
        "the driver unloads when idle: starts take seconds longer and clock settings are lost; "
        "switch it on with `nvidia-smi -pm 1`",
    )


def pcie(facts: Facts) -> Check:
    """Check the lanes of the link to the host; an idle link lowers its generation only."""
    return judge(
        "PCIe",
        describe(facts.devices, _link),
        [device for device in facts.devices if _is_narrow(device)],
        "fewer lanes than the device has: a slot or riser that carries less, or a bad contact; "
        "transfers between host and device are slower by as much",
    )


def nvlink(facts: Facts) -> Check:
    """Check that all devices have as many active NVLinks as the one with most."""
    most = _most(facts.devices, nvlinks)
    return judge(
        "NVLink",
        describe(facts.devices, _topology),
        [d for d in facts.devices if (links := nvlinks(d)) is not None and links < most],
        "fewer links than the others have, so every collective waits for it: see "
        "`nvidia-smi nvlink --status`, the fabric manager and dmesg",
    )


def other_processes(facts: Facts) -> Check:
    """Check that no other process uses the devices."""
    return judge(
        "other use",
        describe(
            facts.devices,
            lambda d: None if d.other_processes is None else _others(d.other_processes),
        ),
        [device for device in facts.devices if device.other_processes],
        "others share the device, and its time: find them with `nvidia-smi`, end them or wait",
    )


def nvlinks(device: Device) -> int | None:
    """Return the number of active NVLinks of a device; None where it is not known."""
    found = re.match(r"NVLink x(\d+)", device.topology or "")
    return int(found[1]) if found else None


def _others(count: int) -> str:
    return f"{count or 'no'} other process{'es' * (count != 1)}"


def _clock(device: Device) -> str | None:
    if device.sm_clock_max_mhz is None:
        return None
    return f"SM up to {device.sm_clock_max_mhz} MHz"


def _reasons(device: Device) -> list[str]:
    return [reason for reason in device.throttle_reasons if reason != _NOTHING_TO_DO]


def _throttling(device: Device) -> str | None:
    if reasons := _reasons(device):
        return ", ".join(reasons)
    # Without a clock NVML has told nothing, and then no reason means nothing.
    return None if device.sm_clock_mhz is None else f"none; SM now {device.sm_clock_mhz} MHz"


def _is_capped(device: Device) -> bool:
    cap, default = device.power_cap_w, device.power_cap_default_w
    return cap is not None and default is not None and cap < default - _POWER_ROUNDING_W


def _cap(device: Device) -> str | None:
    if device.power_cap_w is None:
        return None
    default = device.power_cap_default_w
    of = "default unknown" if default is None else f"default {default:.0f} W"
    return f"{device.power_cap_w:.0f} W, {of}"


def _memory(state: DeviceFacts | None) -> str | None:
    if state is None or state.memory_total_bytes is None or state.memory_free_bytes is None:
        return None
    total, free = state.memory_total_bytes / 2**30, state.memory_free_bytes / 2**30
    capability = state.compute_capability or UNKNOWN
    return f"{total:.0f} GiB, {free:.0f} free; compute capability {capability}"


def _switch(is_on: bool | None) -> str | None:
    return None if is_on is None else ("on" if is_on else "off")


def _lanes(link: str | None) -> int | None:
    found = re.search(r"x(\d+)", link or "")
    return int(found[1]) if found else None


def _is_narrow(device: Device) -> bool:
    now, most = _lanes(device.pcie_link), _lanes(device.pcie_link_max)
    return now is not None and most is not None and now < most


def _link(device: Device) -> str | None:
    if device.pcie_link is None:
        return None
    if device.pcie_link_max in (None, device.pcie_link):
        return device.pcie_link
    idle = "" if _is_narrow(device) else " (idle links lower their speed)"
    return f"{device.pcie_link} of {device.pcie_link_max}{idle}"


def _topology(device: Device) -> str | None:
    links = nvlinks(device)
    if not links:
        return device.topology
    return f"{links} active links"


def _most(devices: tuple[Device, ...], value: Callable[[Device], int | None]) -> int:
    return max((value(device) or 0 for device in devices), default=0)
