"""Counters of a device: energy, and the time for which its clocks were limited."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml
import torch

from raybench.hardware import nvml

_NS_PER_S = 1e9
_MJ_PER_J = 1e3
# Limits for a smaller share of the time belong to a ramp-up, not to the measurement.
_LIMITED_SHARE = 0.02
# After a limit, wait until none has acted for so long, but not longer than the second figure; the
# counters are read each time the third has passed.
_UNLIMITED_S, _LONGEST_WAIT_S, _LOOK_S = 0.3, 3.0, 0.05
# Limits by heat or by a fault, not by the work itself.
_HEAT_OR_FAULT = frozenset({"thermal_sw", "thermal_hw", "power_brake"})
# NVML's power is an average over windows of up to a second, and on A100 and H100 only a quarter
# of the time is sampled (arXiv 2312.02741): the energy of a short block is mostly its neighbours'.
_SHORTEST_ENERGY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Counters at one moment.

    time_s: of a monotonic clock. energy_j: used since the driver was loaded; None where unknown.
    limited_s: seconds for which clocks were limited since then, by reason; empty where the device
    counts none.
    """

    time_s: float
    energy_j: float | None = None
    limited_s: Mapping[str, float] = field(default_factory=dict)


class Counters:
    """Reads the counters of one device. handle: of NVML; None where the device has no counters."""

    def __init__(self, handle: Any | None) -> None:
        self._handle = handle

    def read(self) -> Reading | None:
        """Return all counters as they are now; None where the device has none."""
        if self._handle is None:
            return None
        energy_mj = nvml.ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        counted = nvml.field_values(self._handle, tuple(nvml.LIMITED_NS_FIELDS))
        limited_s = {
            reason: counted[field] / _NS_PER_S
            for field, reason in nvml.LIMITED_NS_FIELDS.items()
            if field in counted
        }
        for policy, reason in nvml.LIMITED_NS_POLICIES.items():
            if reason not in limited_s:
                status = nvml.ask(pynvml.nvmlDeviceGetViolationStatus, self._handle, policy)
                if status is not None:
                    limited_s[reason] = status.violationTime / _NS_PER_S
        return Reading(
            time_s=time.monotonic(),
            energy_j=None if energy_mj is None else energy_mj / _MJ_PER_J,
            limited_s=limited_s,
        )


def open_counters(device: torch.device) -> Counters:
    """Return the counters of a device; `read` of a CPU's, or without NVML, returns None."""
    if device.type != "cuda":
        return Counters(None)
    # torch has no prefix, NVML has one.
    return Counters(nvml.device(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))


def wait_until_unlimited(
    counters: Counters, since: Reading | None, at_most_s: float = _LONGEST_WAIT_S
) -> None:
    """Block until no limit of the clocks has acted for 0.3 s, for 3 s at most.

    Limits of the work before must not slow down what is measured next. Returns at once where the
    device counts no limits. since: an earlier reading, from which on time without a limit counts;
    None: do not wait. at_most_s: less than 3 s, where another program may use up the power.
    """
    deadline_s = time.monotonic() + min(at_most_s, _LONGEST_WAIT_S)
    last, unlimited_since_s = since, since.time_s if since else 0.0
    while last is not None and (now := counters.read()) is not None and now.limited_s:
        if now.limited_s != last.limited_s:
            unlimited_since_s = now.time_s
        if now.time_s - unlimited_since_s >= _UNLIMITED_S or time.monotonic() >= deadline_s:
            return
        last = now
        time.sleep(_LOOK_S)


def throttle_reasons(before: Reading | None, after: Reading | None) -> tuple[str, ...]:
    """Return the reasons that limited the clocks for over 2 % of the time between two readings.

    As "power_cap" or "thermal_sw"; empty also where a reading is None. Idling and clocks that an
    administrator set do not count.
    """
    if before is None or after is None:
        return ()
    enough_s = (after.time_s - before.time_s) * _LIMITED_SHARE
    return tuple(
        reason
        for reason, limited_s in after.limited_s.items()
        if reason in before.limited_s and limited_s - before.limited_s[reason] > enough_s
    )


def is_held_back(before: Reading | None, after: Reading | None) -> bool:
    """Return whether heat or a fault limited the clocks between two readings; False if unknown."""
    return not _HEAT_OR_FAULT.isdisjoint(throttle_reasons(before, after))


def energy_j(before: Reading | None, after: Reading | None) -> float | None:
    """Return the energy in J used between two readings; None if unknown or less than 2 s apart."""
    if before is None or after is None or before.energy_j is None or after.energy_j is None:
        return None
    if after.time_s - before.time_s < _SHORTEST_ENERGY_S:
        return None
    return after.energy_j - before.energy_j
