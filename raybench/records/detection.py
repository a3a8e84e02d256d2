"""What a health check can find, as a simulation of it computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from raybench.records.device import DeviceKind

CheckMode = Literal["full", "quick"]

# Probability that the true share of an event is below `rare_share`, if it was never seen.
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionLimit:
    """The smallest slowdown that a check finds in 99 % of checks, and how often it is wrong."""

    mode: CheckMode
    kind: DeviceKind
    # Devices of one model in the check.
    devices: int
    # Whether the model has reference values.
    has_references: bool
    # Share of its speed that a slow device lacks in each product and in its memory. None: the check
    # finds no slow device, because there is nothing to compare it with.
    slowdown: float | None
    # Share of the simulated checks in which a device with this slowdown was named.
    found_share: float
    # Simulated checks with a slow device.
    checks: int
    # Simulated checks of healthy devices. alarms: checks that named something. drains: checks that
    # drain a node.
    healthy_checks: int
    alarms: int
    drains: int

    @property
    def alarm_share(self) -> float:
        """Upper bound of the share of healthy checks that name something."""
        return upper_bound(self.alarms, self.healthy_checks)

    @property
    def drain_share(self) -> float:
        """Upper bound of the share of healthy checks that drain a node."""
        return upper_bound(self.drains, self.healthy_checks)


def upper_bound(events: int, trials: int) -> float:
    """Return the one-sided 95 % upper bound of a share, by C. J. Clopper, E. S. Pearson (1934)."""
    if events >= trials:
        return 1.0
    if not events:
        return 1.0 - math.pow(1.0 - _CONFIDENCE, 1.0 / trials)
    from scipy.stats import beta

    return float(beta.ppf(_CONFIDENCE, events + 1, trials - events))
