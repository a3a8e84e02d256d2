"""Divide a global batch among devices of different speed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

# Shares are corrected until the step times differ by at most 1 %, at most three times.
_LARGEST_DIFFERENCE, _CORRECTIONS = 0.01, 3
# Devices whose speeds differ by at most 3 % count as equally fast.
_EQUAL_SPEED = 0.03

Shares = tuple[int, ...]


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line to (x, y) by least squares of relative differences; return (intercept, slope).

    The line goes through the origin if there is only one point, or if the best line falls or has a
    negative intercept.

    Raises:
        ValueError: there are no points.
    """
    if not points:
        raise ValueError("a line needs a point")
    x, y = np.asarray(points, dtype=np.float64).T
    if len(x) > 1:
        design = np.stack([1 / y, x / y], axis=1)
        (intercept, slope), *_ = np.linalg.lstsq(design, np.ones_like(y), rcond=None)
        # Rounding may give a level line a tiny slope.
        if intercept >= 0 and slope * x.max() > 1e-9 * intercept:
            return float(intercept), float(slope)
    (slope,), *_ = np.linalg.lstsq((x / y)[:, None], np.ones_like(y), rcond=None)
    return 0.0, float(slope)


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """How long a step takes on one device alone.

    The step time of a GPU grows with the number of items in stairs, and not in a line, so times
    are interpolated between measured steps.
    """

    # Seconds of a step that do not depend on the number of items.
    fixed_s: float
    # Rate of further items.
    items_per_s: float
    # The most items that the memory holds; None: no limit. `step_s` ignores the limit.
    most_items: int | None = None
    # Measured (items, seconds), sorted by items.
    steps: tuple[tuple[int, float], ...] = ()

    def step_s(self, items: int) -> float:
        """Return the seconds of a step of `items` items on this device alone; monotone."""
        if not items:
            return 0.0
        knots, seconds = self._knots
        items_beyond = max(0, items - knots[-1])
        return float(np.interp(items, knots, seconds)) + items_beyond / self.items_per_s

    def with_step(self, items: int, seconds: float) -> DeviceSpeed:
        """Return a copy with another measured step of one or more items."""
        return replace(self, steps=tuple(sorted({**dict(self.steps), items: seconds}.items())))

    @cached_property
    def _knots(self) -> tuple[Sequence[int], Sequence[float]]:
        """Items and seconds between which to interpolate, from 0 items on."""
        items, seconds = zip((0, self.fixed_s), *self.steps, strict=True)
        # A larger share must not be predicted to be faster: replace a decrease by a level.
        rising = accumulate(seconds[1:], max, initial=min(seconds))
        return items, list(rising)


def equal_shares(devices: int, batch: int, unit: int = 1) -> Shares:
    """Return the items of each device: multiples of `unit` that differ by at most one unit.

    Larger shares come first.

    Raises:
        ValueError: the batch is not a multiple of the unit.
    """
    units, remaining = divmod(_units(batch, unit), devices)
    return tuple(unit * (units + (device < remaining)) for device in range(devices))


def fast_devices(speeds: Sequence[float]) -> tuple[bool, ...]:
    """Return for each device whether it is fast.

    A gap is the ratio of two neighbours in the sorted speeds. Devices above the widest gap are
    fast. If no gap exceeds 3 %, all devices are fast.
    """
    ordered = sorted(set(speeds))
    gaps = [(fast / slow, fast) for slow, fast in pairwise(ordered)]
    widest, slowest_fast = max(gaps, default=(1.0, ordered[0]))
    least = slowest_fast if widest > 1 + _EQUAL_SPEED else ordered[0]
    return tuple(speed >= least for speed in speeds)


def fast_shares(are_fast: Sequence[bool], batch: int, unit: int = 1) -> Shares:
    """Return `equal_shares` for the fast devices and 0 for the slow devices.

    Raises:
        ValueError: the batch is not a multiple of the unit.
        ZeroDivisionError: no device is fast.
    """
    of_fast = iter(equal_shares(sum(are_fast), batch, unit))
    return tuple(next(of_fast) if is_fast else 0 for is_fast in are_fast)


def shares_by_speed(speeds: Sequence[DeviceSpeed], batch: int, unit: int = 1) -> Shares:
    """Return the items of each device that let the last device finish as early as possible.

    Each unit goes to the device that would finish it first and whose memory holds it. This is
    optimal because step times are monotone.

    Raises:
        ValueError: the batch is not a multiple of the unit, or exceeds the memory of the devices.
    """
    # Units that the memory of each device holds.
    limits = [
        math.inf if speed.most_items is None else speed.most_items // unit for speed in speeds
    ]
    units = _units(batch, unit)
    if sum(limits) < units:
        raise ValueError(f"the devices hold {unit * sum(limits):.0f} items together, not {batch}")
    # Units of each device. The queue has the time at which a device would finish its next unit.
    shares = [0] * len(speeds)
    queue = [(speed.step_s(unit), device) for device, speed in enumerate(speeds) if limits[device]]
    heapq.heapify(queue)
    for _ in range(units):
        _, device = heapq.heappop(queue)
        shares[device] += 1
        if shares[device] < limits[device]:
            next_s = speeds[device].step_s(unit * (shares[device] + 1))
            heapq.heappush(queue, (next_s, device))
    return tuple(unit * share for share in shares)


def balance(
    speeds: Sequence[DeviceSpeed],
    batch: int,
    unit: int,
    time_steps: Callable[[Shares], Sequence[float]],
) -> tuple[Shares, tuple[float, ...]]:
    """Return the best shares that were tried, and the seconds of a step of each device.

    Shares by speed are timed, and corrected by the timed steps. The slowest device finishes first
    with the best shares. Equal shares are tried too, with predicted times.

    Args:
        time_steps: times the given shares, and returns the seconds of each device; 0 for a share
            of 0. Called at most four times.

    Raises:
        ValueError: as `shares_by_speed`.
    """
    equal = equal_shares(len(speeds), batch, unit)
    fits = all(
        speed.most_items is None or items <= speed.most_items
        for items, speed in zip(equal, speeds, strict=True)
    )
    tried = {equal: tuple(map(DeviceSpeed.step_s, speeds, equal))} if fits else {}
    for _ in range(1 + _CORRECTIONS):
        shares = shares_by_speed(speeds, batch, unit)
        if shares in tried:
            break
        device_s = tried[shares] = tuple(time_steps(shares))
        busy_s = [s for s in device_s if s]
        if max(busy_s) - min(busy_s) <= _LARGEST_DIFFERENCE * max(busy_s):
            break
        speeds = [
            speed.with_step(items, s) if items else speed
            for speed, items, s in zip(speeds, shares, device_s, strict=True)
        ]
    return min(tried.items(), key=lambda entry: max(entry[1]))


def crossover_batch(
    speeds: Sequence[DeviceSpeed],
    are_fast: Sequence[bool],
    *,
    exchange_s: float,
    fast_exchange_s: float,
) -> float | None:
    """Return the global batch above which all devices together beat the fast devices alone.

    0 if all devices always win; None if they never do, and if all or no devices are fast.

    Args:
        exchange_s: seconds that the exchange of gradients among all devices adds to a step.
        fast_exchange_s: the same among the fast devices.
    """
    # The step of all devices at a batch B takes start_s + B / together, if shares are by speed. The
    # step of n fast devices takes fixed_s + B / (n items_per_s) on each of them. Solve for B. All
    # devices win as soon as one fast device needs longer, so take the smallest B.
    fast = [speed for speed, is_fast in zip(speeds, are_fast, strict=True) if is_fast]
    if len(fast) == len(speeds):
        return None
    together = sum(speed.items_per_s for speed in speeds)
    start_s = sum(speed.items_per_s * speed.fixed_s for speed in speeds) / together + exchange_s
    crossings = [
        (start_s - fast_exchange_s - speed.fixed_s) / gain
        for speed in fast
        if (gain := 1 / (len(fast) * speed.items_per_s) - 1 / together) > 0
    ]
    return max(0.0, min(crossings)) if crossings else None


def _units(batch: int, unit: int) -> int:
    """Return how many units a batch has."""
    if batch % unit:
        raise ValueError(f"a batch of {batch} is not made up of units of {unit}")
    return batch // unit
