"""Shares of a global batch for devices of different speed: how much each gets, and how fast it is.

A step of `items` takes a device alone fixed_s + items / items_per_s, or what was measured of it.
Devices that are to finish together get what each of them does until a moment tau: a closed formula,
with nothing for a device whose fixed seconds are longer, and no more than its memory holds (water
filling). Pure.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter

import numpy as np

# A step that was measured to be no longer than one of fewer items counts as longer by this share.
_LONGER = 1e-9
# Shares are corrected until the devices' own steps differ by a smaller share, or so many times.
_NEAR, _CORRECTIONS = 0.01, 3
# Devices whose speeds differ by a smaller share are alike: none of them is left out.
_ALIKE = 0.03

Shares = tuple[int, ...]


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (intercept, slope) of a line by least squares of relative differences.

    points: (x, y), both above 0. The intercept is 0 where it would be below, and for one point.
    Raises ValueError without any point.
    """
    if not points:
        raise ValueError("a line needs a point")
    x, y = np.asarray(points, dtype=np.float64).T
    if len(x) > 1:
        design = np.stack([1 / y, x / y], axis=1)
        (intercept, slope), *_ = np.linalg.lstsq(design, np.ones_like(y), rcond=None)
        if intercept >= 0 and slope > 0:
            return float(intercept), float(slope)
    (slope,), *_ = np.linalg.lstsq((x / y)[:, None], np.ones_like(y), rcond=None)
    return 0.0, float(slope)


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """How long a step takes one device alone.

    fixed_s: seconds of a step of no items. items_per_s: rate of further items.
    most: items that its memory holds; None where there is no limit.
    steps: measured steps (items, seconds), sorted by items. Between two of them times are
    interpolated; below the first the line begins at fixed_s, beyond the last items_per_s counts.
    Steps of GPUs grow by stairs, so that one line through all of them is right at none.
    """

    fixed_s: float
    items_per_s: float
    most: int | None = None
    steps: tuple[tuple[int, float], ...] = ()

    def step_s(self, items: int) -> float:
        """Return the seconds of a step of so many items; 0 for no items."""
        if not items:
            return 0.0
        place = bisect_right(self.knots, items, key=itemgetter(1)) - 1
        (begin_s, done), rate = self.knots[place], self.rates[place]
        return begin_s + (items - done) / rate

    def items_by(self, moment_s: float) -> float:
        """Return how many items are done this many seconds after the begin of a step."""
        place = bisect_right(self.knots, moment_s, key=itemgetter(0)) - 1
        if place < 0:
            return 0.0
        begin_s, done = self.knots[place]
        return done + (moment_s - begin_s) * self.rates[place]

    def with_step(self, items: int, seconds: float) -> DeviceSpeed:
        """Return the speed with one more measured step, in place of one with as many items."""
        return replace(self, steps=tuple(sorted({**dict(self.steps), items: seconds}.items())))

    @cached_property
    def knots(self) -> Sequence[tuple[float, int]]:
        """The (seconds, items) at which the rate changes, both rising; the first has no items.

        A step that was measured to be shorter than one of fewer items counts as long as that one.
        """
        if not self.steps:
            return ((self.fixed_s, 0),)
        knots = [(min(self.fixed_s, *(seconds for _, seconds in self.steps)), 0)]
        for items, seconds in self.steps:
            knots.append((max(seconds, knots[-1][0] * (1 + _LONGER) + _LONGER), items))
        return knots

    @cached_property
    def rates(self) -> Sequence[float]:
        """Items a second from each knot on."""
        between = [
            (items - done) / (end_s - begin_s)
            for (begin_s, done), (end_s, items) in pairwise(self.knots)
        ]
        return (*between, self.items_per_s)


def equal_shares(devices: int, batch: int, unit: int = 1) -> Shares:
    """Share out the batch equally in whole units; the first devices get the units that remain.

    Raises ValueError where the batch is not a multiple of the unit.
    """
    each, more = divmod(_units(batch, unit), devices)
    return tuple(unit * (each + (place < more)) for place in range(devices))


def fast_devices(speeds: Sequence[float]) -> tuple[bool, ...]:
    """Return for each device whether it is above the largest gap between two speeds.

    True for all where no two neighbours in the order of speed differ by more than 3 %.
    """
    ordered = sorted(set(speeds))
    gaps = [(fast / slow, fast) for slow, fast in pairwise(ordered)]
    widest, slowest_fast = max(gaps, default=(1.0, ordered[0]))
    least = slowest_fast if widest > 1 + _ALIKE else ordered[0]
    return tuple(speed >= least for speed in speeds)


def fast_shares(are_fast: Sequence[bool], batch: int, unit: int = 1) -> Shares:
    """Share out the batch equally among the fast devices; the others get 0.

    Raises ValueError where the batch is not a multiple of the unit.
    """
    of_fast = iter(equal_shares(sum(are_fast), batch, unit))
    return tuple(next(of_fast) if is_fast else 0 for is_fast in are_fast)


def shares_by_speed(speeds: Sequence[DeviceSpeed], batch: int, unit: int = 1) -> Shares:
    """Share out the batch so that the last device finishes as early as possible.

    Each gets the whole units that it does until all would be done together; each unit that remains
    goes to the device that finishes it first, which is optimal.
    Raises ValueError where the batch is not a multiple of the unit, or the devices' memory cannot
    hold it.
    """
    units, rooms = _units(batch, unit), [_room(speed, unit) for speed in speeds]
    if sum(rooms) < units:
        raise ValueError(f"the devices hold {unit * sum(rooms):.0f} items together, not {batch}")
    tau_s = _finish_s(speeds, [unit * room for room in rooms], batch)
    shares = [
        int(min(room, _whole_units(speed, tau_s, unit)))
        for speed, room in zip(speeds, rooms, strict=True)
    ]
    _settle(shares, speeds, rooms, units, unit)
    return tuple(unit * share for share in shares)


def balance(
    speeds: Sequence[DeviceSpeed],
    batch: int,
    unit: int,
    time_steps: Callable[[Shares], Sequence[float]],
) -> tuple[Shares, tuple[float, ...]]:
    """Share out the batch by speed, time the steps, and correct the speeds and shares by them.

    Returns the shares whose slowest device takes the shortest time, and the seconds of each
    device's own step. Equal shares, with the steps that the speeds foretell, are candidates too.
    time_steps: measures the seconds of each device's own step, 0 where it has no share.
    Raises as `shares_by_speed`.
    """
    equal = equal_shares(len(speeds), batch, unit)
    found = {equal: tuple(map(DeviceSpeed.step_s, speeds, equal))} if _fits(speeds, equal) else {}
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


def _fits(speeds: Sequence[DeviceSpeed], shares: Shares) -> bool:
    limits = (speed.most for speed in speeds)
    return all(most is None or items <= most for items, most in zip(shares, limits, strict=True))


def crossover_batch(
    speeds: Sequence[DeviceSpeed],
    are_fast: Sequence[bool],
    *,
    exchange_s: float,
    fast_exchange_s: float,
) -> float | None:
    """Return the global batch above which all devices together beat the fast ones alone.

    With shares by speed. None where the fast ones are never beaten, and where all are fast.
    exchange_s, fast_exchange_s: the seconds that the exchange of gradients adds to a step, among
    all devices and among the fast ones.
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
    if batch % unit:
        raise ValueError(f"a batch of {batch} is not made up of units of {unit}")
    return batch // unit


def _room(speed: DeviceSpeed, unit: int) -> float:
    return math.inf if speed.most is None else speed.most // unit


def _whole_units(speed: DeviceSpeed, tau_s: float, unit: int) -> int:
    return max(0, math.floor(speed.items_by(tau_s) / unit))


def _finish_s(speeds: Sequence[DeviceSpeed], rooms: Sequence[float], batch: int) -> float:
    """Return the seconds after which the devices together have done the batch.

    Each begins after its fixed seconds and stops when its memory is full (rooms, in items). The
    items done grow linearly between the moments at which the rate of a device changes.
    """
    turns = [
        turn for speed, room in zip(speeds, rooms, strict=True) for turn in _turns(speed, room)
    ]
    turns.sort()
    at_s, done, rate = turns[0][0], 0.0, 0.0
    for turn_s, change in turns:
        if done + rate * (turn_s - at_s) >= batch:
            break
        done += rate * (turn_s - at_s)
        at_s, rate = turn_s, rate + change
    return at_s + (batch - done) / rate if rate > 0 else at_s


def _turns(speed: DeviceSpeed, room: float) -> Iterator[tuple[float, float]]:
    """Yield (seconds, change of the rate in items per second) of a device until it is full."""
    before = 0.0
    for (begin_s, done), rate in zip(speed.knots, speed.rates, strict=True):
        if done >= room:
            break
        yield begin_s, rate - before
        before = rate
    if room < math.inf:
        yield (speed.step_s(int(room)) if room else speed.knots[0][0]), -before


def _settle(
    shares: list[int],
    speeds: Sequence[DeviceSpeed],
    rooms: Sequence[float],
    units: int,
    unit: int,
) -> None:
    """Change `shares`, in units, until they add up to `units`.

    Units too many, by rounding errors, are taken from the slowest device; each unit that remains
    goes to the device that finishes it first.
    """

    def with_one_more_s(place: int) -> float:
        return speeds[place].step_s(unit * (shares[place] + 1))

    while sum(shares) > units:
        last = max(range(len(shares)), key=lambda p: speeds[p].step_s(unit * shares[p]))
        shares[last] -= 1
    queue = [(with_one_more_s(p), p) for p, share in enumerate(shares) if share < rooms[p]]
    heapq.heapify(queue)
    for _ in range(units - sum(shares)):
        _, place = queue[0]
        shares[place] += 1
        if shares[place] < rooms[place]:
            heapq.heapreplace(queue, (with_one_more_s(place), place))
        else:
            heapq.heappop(queue)
