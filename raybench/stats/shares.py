"""Shares of a global batch for devices of different speed: who gets how much, and what it gives.

A step of `items` takes a device alone fixed_s + items / items_per_s. Devices that are to finish
together get what each of them does until a moment tau: closed formula, with nothing for a device
that would not have begun and no more than its memory holds (water filling). Pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# Devices whose speeds lie nearer together than this are alike: none of them is left out.
_ALIKE = 0.03

Shares = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """How long a step takes one device alone.

    fixed_s: seconds of a step of no items. items_per_s: of further items.
    most: items that its memory holds; None where there is no limit.
    """

    fixed_s: float
    items_per_s: float
    most: int | None = None

    def step_s(self, items: int) -> float:
        """Return the seconds of a step; 0 where the device has nothing to do."""
        return self.fixed_s + items / self.items_per_s if items else 0.0


def longest_step_s(speeds: Sequence[DeviceSpeed], shares: Sequence[int]) -> float:
    """Return the seconds until the last device has done its share, exchange apart."""
    return max(speed.step_s(items) for speed, items in zip(speeds, shares, strict=True))


def equal_shares(devices: int, batch: int, unit: int = 1) -> Shares:
    """Share out the batch in units, equally as far as these allow; the first ones get the rest.

    Raises ValueError where units do not make up the batch.
    """
    each, more = divmod(_units(batch, unit), devices)
    return tuple(unit * (each + (place < more)) for place in range(devices))


def fast_devices(speeds: Sequence[float]) -> tuple[bool, ...]:
    """Tell which devices are the fast ones: those above the largest gap between two speeds.

    All of them, where no two neighbours in the order of speed differ by 3 %.
    """
    ordered = sorted(set(speeds))
    gaps = [(fast / slow, fast) for slow, fast in pairwise(ordered)]
    widest, slowest_fast = max(gaps, default=(1.0, ordered[0]))
    least = slowest_fast if widest > 1 + _ALIKE else ordered[0]
    return tuple(speed >= least for speed in speeds)


def fast_shares(are_fast: Sequence[bool], batch: int, unit: int = 1) -> Shares:
    """Share out the batch equally among the fast devices. Raises ValueError as `equal_shares`."""
    of_fast = iter(equal_shares(sum(are_fast), batch, unit))
    return tuple(next(of_fast) if is_fast else 0 for is_fast in are_fast)


def shares_by_speed(speeds: Sequence[DeviceSpeed], batch: int, unit: int = 1) -> Shares:
    """Share out the batch so that the last device is done as early as can be.

    Each gets the whole units that it does until they would all be done; every further unit goes
    to the device that is done with it first, which no other choice betters.
    Raises ValueError where units do not make up the batch, or the devices cannot hold it.
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


def crossover_batch(
    speeds: Sequence[DeviceSpeed],
    are_fast: Sequence[bool],
    *,
    exchange_s: float,
    fast_exchange_s: float,
) -> float | None:
    """Return the global batch above which all devices by speed beat the fast ones alone.

    exchange_s, fast_exchange_s: what the exchange of all, and of the fast ones, adds to a step.
    None where the fast ones are never beaten, or are all there are.
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
    return max(0, math.floor((tau_s - speed.fixed_s) * speed.items_per_s / unit))


def _finish_s(speeds: Sequence[DeviceSpeed], rooms: Sequence[float], batch: int) -> float:
    """Find when all are done who begin after their fixed seconds and stop when they are full.

    What is done by a moment grows in straight lines between those at which one begins or is full.
    """
    turns = [(speed.fixed_s, speed.items_per_s) for speed in speeds]
    turns += [
        (speed.fixed_s + room / speed.items_per_s, -speed.items_per_s)
        for speed, room in zip(speeds, rooms, strict=True)
        if room < math.inf
    ]
    turns.sort()
    at_s, done, rate = turns[0][0], 0.0, 0.0
    for turn_s, change in turns:
        if done + rate * (turn_s - at_s) >= batch:
            break
        done += rate * (turn_s - at_s)
        at_s, rate = turn_s, rate + change
    return at_s + (batch - done) / rate if rate > 0 else at_s


def _settle(
    shares: list[int],
    speeds: Sequence[DeviceSpeed],
    rooms: Sequence[float],
    units: int,
    unit: int,
) -> None:
    """Give out the units that are left, and take back those too many by rounding errors."""

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
