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
_MAX_DIFFERENCE, _MAX_CORRECTIONS = 0.01, 3
# Devices whose speeds differ by at most 3 % count as equally fast.
_EQUAL_SPEED = 0.03

# Items of each device.
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
    # Rate beyond the largest measured step.
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
        extrapolated_items = max(0, items - knots[-1])
        return float(np.interp(items, knots, seconds)) + extrapolated_items / self.items_per_s

    def with_step(self, items: int, seconds: float) -> DeviceSpeed:
        """Return a copy with another measured step of one or more items."""
        seconds_by_items = {**dict(self.steps), items: seconds}
        return replace(self, steps=tuple(sorted(seconds_by_items.items())))

    @cached_property
    def _knots(self) -> tuple[Sequence[int], Sequence[float]]:
        """The (items, seconds) between which `step_s` interpolates, from 0 items on."""
        points = [(0, self.fixed_s), *self.steps]
        items = [items for items, _ in points]
        seconds = [seconds for _, seconds in points]
        # A larger share must not be predicted to be faster: replace a decrease by a level.
        rising = accumulate(seconds[1:], max, initial=min(seconds))
        return items, list(rising)


def equal_shares(devices: int, batch: int, unit: int = 1) -> Shares:
    """Divide a batch into multiples of `unit` that differ by at most one unit, the largest first.

    Raises:
        ValueError: the batch is not a multiple of the unit.
    """
    units, remaining = divmod(_number_of_units(batch, unit), devices)
    return tuple(unit * (units + (device < remaining)) for device in range(devices))


def fast_devices(speeds: Sequence[float]) -> tuple[bool, ...]:
    """Return for each device whether it is fast.

    Fast devices are above the largest ratio of two neighbours in the sorted speeds. If no
    neighbours differ by more than 3 %, all devices are fast.
    """
    ascending = sorted(set(speeds))
    # (ratio of two neighbours, speed of the faster neighbour).
    ratios = [(faster / slower, faster) for slower, faster in pairwise(ascending)]
    largest_ratio, slowest_fast_speed = max(ratios, default=(1.0, ascending[0]))
    if largest_ratio <= 1 + _EQUAL_SPEED:
        slowest_fast_speed = ascending[0]
    return tuple(speed >= slowest_fast_speed for speed in speeds)


def fast_shares(are_fast: Sequence[bool], batch: int, unit: int = 1) -> Shares:
    """Divide a batch equally among the fast devices; slow devices get 0 items.

    Raises:
        ValueError: the batch is not a multiple of the unit.
        ZeroDivisionError: no device is fast.
    """
    remaining_shares = list(equal_shares(sum(are_fast), batch, unit))
    return tuple(remaining_shares.pop(0) if is_fast else 0 for is_fast in are_fast)


def shares_by_speed(speeds: Sequence[DeviceSpeed], batch: int, unit: int = 1) -> Shares:
    """Divide a batch so that the last device finishes as early as possible.

    Raises:
        ValueError: the batch is not a multiple of the unit, or exceeds the memory of the devices.
    """
    # Number of units that the memory of each device holds.
    limits = [
        math.inf if speed.most_items is None else speed.most_items // unit for speed in speeds
    ]
    units_of_batch = _number_of_units(batch, unit)
    if sum(limits) < units_of_batch:
        raise ValueError(f"the devices hold {unit * sum(limits):.0f} items together, not {batch}")
    # Give each unit to the device that would finish it first. This greedy division is optimal
    # because step times are monotone. The queue has the step time of each device with one more
    # unit.
    units = [0] * len(speeds)
    queue = [(speed.step_s(unit), device) for device, speed in enumerate(speeds) if limits[device]]
    heapq.heapify(queue)
    for _ in range(units_of_batch):
        _, device = heapq.heappop(queue)
        units[device] += 1
        if units[device] < limits[device]:
            next_s = speeds[device].step_s(unit * (units[device] + 1))
            heapq.heappush(queue, (next_s, device))
    return tuple(unit * device_units for device_units in units)


def balance(
    speeds: Sequence[DeviceSpeed],
    batch: int,
    unit: int,
    time_steps: Callable[[Shares], Sequence[float]],
) -> tuple[Shares, tuple[float, ...]]:
    """Find the shares with the shortest step; return them with the step seconds of each device.

    Shares by speed are timed, and corrected by the timed steps. Equal shares are a candidate too,
    with predicted step times.

    Args:
        time_steps: times a step with the given shares, and returns the seconds of each device; 0
            for a share of 0. Called at most four times.

    Raises:
        ValueError: the batch is not a multiple of the unit, or exceeds the memory of the devices.
    """
    # Step seconds of each device, by the shares.
    candidates: dict[Shares, tuple[float, ...]] = {}
    equal = equal_shares(len(speeds), batch, unit)
    equal_fits = all(
        speed.most_items is None or items <= speed.most_items
        for items, speed in zip(equal, speeds, strict=True)
    )
    if equal_fits:
        candidates[equal] = tuple(map(DeviceSpeed.step_s, speeds, equal))
    for _ in range(1 + _MAX_CORRECTIONS):
        shares = shares_by_speed(speeds, batch, unit)
        if shares in candidates:
            break
        steps_s = tuple(time_steps(shares))
        candidates[shares] = steps_s
        # Devices without items do not count.
        busy_s = [step_s for step_s in steps_s if step_s]
        if max(busy_s) - min(busy_s) <= _MAX_DIFFERENCE * max(busy_s):
            break
        speeds = [
            speed.with_step(items, step_s) if items else speed
            for speed, items, step_s in zip(speeds, shares, steps_s, strict=True)
        ]
    best = min(candidates, key=lambda shares: max(candidates[shares]))
    return best, candidates[best]


def crossover_batch(
    speeds: Sequence[DeviceSpeed],
    are_fast: Sequence[bool],
    *,
    exchange_s: float,
    fast_exchange_s: float,
) -> float | None:
    """Return the global batch above which all devices together beat the fast devices alone.

    Args:
        exchange_s: seconds that the exchange of gradients among all devices adds to a step.
        fast_exchange_s: seconds that the exchange among the fast devices adds.

    Returns:
        0 if all devices win at any batch. None if they never win, and if all or no devices are
        fast.
    """
    fast = [speed for speed, is_fast in zip(speeds, are_fast, strict=True) if is_fast]
    if len(fast) == len(speeds):
        return None
    # With shares by speed, all devices take all_fixed_s + batch / all_items_per_s.
    all_items_per_s = sum(speed.items_per_s for speed in speeds)
    weighted_fixed_s = sum(speed.items_per_s * speed.fixed_s for speed in speeds)
    all_fixed_s = weighted_fixed_s / all_items_per_s + exchange_s
    # Alone, the n fast devices get equal shares, so each takes fixed_s + batch / (n items_per_s).
    # Solve for the batch at which both times are equal. The slowest fast device ends the step, so
    # all devices win from the smallest of these batches on.
    crossings = []
    for speed in fast:
        saved_s_per_item = 1 / (len(fast) * speed.items_per_s) - 1 / all_items_per_s
        if saved_s_per_item > 0:
            crossings.append((all_fixed_s - fast_exchange_s - speed.fixed_s) / saved_s_per_item)
    return max(0.0, min(crossings)) if crossings else None


def _number_of_units(batch: int, unit: int) -> int:
    if batch % unit:
        raise ValueError(f"a batch of {batch} is not made up of units of {unit}")
    return batch // unit
