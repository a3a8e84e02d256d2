"""Shares of a global batch for devices of different speed: how much each gets, and how fast it is.

A step of `items` takes a device alone fixed_s + items / items_per_s, or what was measured of it.
Pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

# Shares are corrected until the devices' own steps differ by a smaller share, or so many times.
_NEAR, _CORRECTIONS = 0.01, 3
# Devices whose speeds differ by a smaller share are alike: none of them is left out.
_ALIKE = 0.03

Shares = tuple[int, ...]


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (intercept >= 0, slope > 0) of a line by least squares of relative differences.

    points: (x, y), both above 0, no x twice. For one point, and where the best line does not rise
    or has an intercept below 0, it is the best one through the origin. ValueError for no points.
    """
    if not points:
        raise ValueError("a line needs a point")
    x, y = np.asarray(points, dtype=np.float64).T
    if len(x) > 1:
        design = np.stack([1 / y, x / y], axis=1)
        (intercept, slope), *_ = np.linalg.lstsq(design, np.ones_like(y), rcond=None)
        if intercept >= 0 and slope * x.max() > 1e-9 * intercept:  # a level line, but for rounding
            return float(intercept), float(slope)
    (slope,), *_ = np.linalg.lstsq((x / y)[:, None], np.ones_like(y), rcond=None)
    return 0.0, float(slope)


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """How long a step takes one device alone.

    fixed_s: seconds of a step that do not depend on its items. items_per_s: rate of further items.
    most: items that its memory holds, which `step_s` does not heed; None where there is no limit.
    steps: measured (items, seconds), sorted by items, which are 1 or more. Times between them are
    interpolated; below the first from fixed_s, or from the least seconds if these are less. Beyond
    the last items_per_s counts. Steps of GPUs grow by stairs: one line through them fits none.
    """

    fixed_s: float
    items_per_s: float
    most: int | None = None
    steps: tuple[tuple[int, float], ...] = ()

    def step_s(self, items: int) -> float:
        """Return the seconds of a step of `items` items on this device alone; 0 for no items.

        They never fall with more items: a step measured shorter than one of fewer counts as that.
        """
        if not items:
            return 0.0
        known, seconds = self._knots
        beyond = max(0, items - known[-1])
        return float(np.interp(items, known, seconds)) + beyond / self.items_per_s

    def with_step(self, items: int, seconds: float) -> DeviceSpeed:
        """Return a new speed with a measured step of 1 or more items, replacing one of as many."""
        return replace(self, steps=tuple(sorted({**dict(self.steps), items: seconds}.items())))

    @cached_property
    def _knots(self) -> tuple[Sequence[int], Sequence[float]]:
        """The items and seconds to interpolate between, from 0 items with the least time of all."""
        items, seconds = zip((0, self.fixed_s), *self.steps, strict=True)
        rising = accumulate(seconds[1:], max, initial=min(seconds))
        return items, list(rising)


def equal_shares(devices: int, batch: int, unit: int = 1) -> Shares:
    """Return the items of each device, as equal as multiples of `unit` can be, larger ones first.

    Raises ValueError if the batch is no multiple of the unit, ZeroDivisionError for no devices.
    """
    each, more = divmod(_units(batch, unit), devices)
    return tuple(unit * (each + (place < more)) for place in range(devices))


def fast_devices(speeds: Sequence[float]) -> tuple[bool, ...]:
    """Return for each device whether its speed is above the largest gap between two speeds.

    A gap is the ratio of neighbours in the order of speed. If none is above 3 %, all are fast; of
    equal gaps that of the fastest counts. speeds: above 0, in any unit. IndexError for no devices.
    """
    ordered = sorted(set(speeds))
    gaps = [(fast / slow, fast) for slow, fast in pairwise(ordered)]
    widest, slowest_fast = max(gaps, default=(1.0, ordered[0]))
    least = slowest_fast if widest > 1 + _ALIKE else ordered[0]
    return tuple(speed >= least for speed in speeds)


def fast_shares(are_fast: Sequence[bool], batch: int, unit: int = 1) -> Shares:
    """Return the items of each device: `equal_shares` for the fast ones, 0 for the others.

    Raises ValueError if the batch is no multiple of the unit, ZeroDivisionError if none is fast.
    """
    of_fast = iter(equal_shares(sum(are_fast), batch, unit))
    return tuple(next(of_fast) if is_fast else 0 for is_fast in are_fast)


def shares_by_speed(speeds: Sequence[DeviceSpeed], batch: int, unit: int = 1) -> Shares:
    """Return the items of each device with which the last one finishes as early as possible.

    Shares are multiples of `unit` items, may be 0, and add up to `batch`. Unit after unit goes to
    the device that finishes it first, unless its memory is full: optimal, because a step never
    gets shorter with more items. Raises ValueError where the batch is not a multiple of the unit,
    or the devices' memory cannot hold it.
    """
    rooms = [math.inf if speed.most is None else speed.most // unit for speed in speeds]
    units = _units(batch, unit)
    if sum(rooms) < units:
        raise ValueError(f"the devices hold {unit * sum(rooms):.0f} items together, not {batch}")
    shares = [0] * len(speeds)
    queue = [(speed.step_s(unit), at) for at, speed in enumerate(speeds) if rooms[at]]
    heapq.heapify(queue)
    for _ in range(units):
        _, at = heapq.heappop(queue)
        shares[at] += 1
        if shares[at] < rooms[at]:
            heapq.heappush(queue, (speeds[at].step_s(unit * (shares[at] + 1)), at))
    return tuple(unit * share for share in shares)


def balance(
    speeds: Sequence[DeviceSpeed],
    batch: int,
    unit: int,
    time_steps: Callable[[Shares], Sequence[float]],
) -> tuple[Shares, tuple[float, ...]]:
    """Return shares by speed, corrected by timed steps, and the seconds of each device's own step.

    Of all shares that were tried, it takes those whose slowest device is the quickest. Equal shares
    that memory holds count as tried, with the steps that the speeds predict. time_steps: returns
    the measured s of each device's own step for given shares, 0 where a share is 0, else above 0;
    called four times at most, not at all if equal shares are those by speed. Raises as
    `shares_by_speed` does, and ZeroDivisionError for no devices.
    """
    equal = equal_shares(len(speeds), batch, unit)
    fits = all(
        speed.most is None or items <= speed.most
        for items, speed in zip(equal, speeds, strict=True)
    )
    found = {equal: tuple(map(DeviceSpeed.step_s, speeds, equal))} if fits else {}
    for _ in range(1 + _CORRECTIONS):
        shares = shares_by_speed(speeds, batch, unit)
        if shares in found:
            break
        own_s = found[shares] = tuple(time_steps(shares))
        busy_s = [s for s in own_s if s]
        if max(busy_s) - min(busy_s) <= _NEAR * max(busy_s):
            break
        speeds = [
            speed.with_step(items, s) if items else speed
            for speed, items, s in zip(speeds, shares, own_s, strict=True)
        ]
    return min(found.items(), key=lambda one: max(one[1]))


def crossover_batch(
    speeds: Sequence[DeviceSpeed],
    are_fast: Sequence[bool],
    *,
    exchange_s: float,
    fast_exchange_s: float,
) -> float | None:
    """Return the global batch, in items, above which all devices together beat the fast ones alone.

    By fixed_s and items_per_s: all get shares that take equal time, the fast alone equal shares.
    0 if all always beat the fast; None if never, and if all or none are fast. exchange_s,
    fast_exchange_s: seconds that the exchange of gradients adds to a step, among all or the fast.
    """
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
    """Return how many units the batch has. Raises ValueError where it is not a multiple of them."""
    if batch % unit:
        raise ValueError(f"a batch of {batch} is not made up of units of {unit}")
    return batch // unit
