"""How long an all_reduce takes on how many devices, and how much of it a step feels. Pure.

An all_reduce of s bytes over n devices moves 2 (n - 1) / n s bytes over the links of each: what
nccl-tests divides by its time to get busbw. That share grows from 1 at two devices to 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


def wire_factor(world_size: int) -> float:
    """Return the bytes that cross the links of a device for each byte that is reduced."""
    return 2 * (world_size - 1) / world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceTimes:
    """Measured all_reduces: world size -> (bytes, milliseconds), smallest first.

    Raises ValueError where there is no time, or one of fewer than two devices.
    """

    by_world: Mapping[int, Sequence[tuple[float, float]]]

    def __post_init__(self) -> None:
        if not self.by_world or min(self.by_world) < 2:
            raise ValueError("times of an all_reduce are of two devices or more")

    @classmethod
    def of(cls, measured: Iterable[tuple[int, float, float]]) -> ReduceTimes | None:
        """Collect (world size, bytes, milliseconds) of two devices or more; None without any.

        Of two with the same size the last one counts.
        """
        by_world: dict[int, dict[float, float]] = {}
        for world, size_bytes, time_ms in measured:
            if world >= 2:
                by_world.setdefault(world, {})[size_bytes] = time_ms
        return (
            cls(by_world={w: sorted(t.items()) for w, t in by_world.items()}) if by_world else None
        )

    @property
    def largest_world(self) -> int:
        """The largest number of devices of which an all_reduce was measured."""
        return max(self.by_world)

    def time_ms(self, world_size: int, size_bytes: float) -> float:
        """Return the milliseconds of one all_reduce.

        Between measured sizes they are interpolated; beyond the largest its bandwidth counts. For
        more devices than were measured, the smallest message waits for log2 n times as many steps,
        and the rest of the time grows with `wire_factor`, at the busbw of the nearest measured
        world.
        """
        if world_size in self.by_world:
            return _interpolate(self.by_world[world_size], size_bytes)
        smaller = [world for world in self.by_world if world < world_size]
        nearest = max(smaller, default=min(self.by_world))
        latency_ms = self.by_world[nearest][0][1]
        wire_ms = max(0.0, _interpolate(self.by_world[nearest], size_bytes) - latency_ms)
        return latency_ms * math.log2(world_size) / math.log2(nearest) + wire_ms * wire_factor(
            world_size
        ) / wire_factor(nearest)


def _interpolate(times: Sequence[tuple[float, float]], size_bytes: float) -> float:
    (largest, longest_ms), sizes = times[-1], [size for size, _ in times]
    if size_bytes > largest:
        return longest_ms * size_bytes / largest
    logs_ms = [math.log(time_ms) for _, time_ms in times]
    return math.exp(float(np.interp(math.log(size_bytes), np.log(sizes), logs_ms)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The network between nodes: busbw of large all_reduces, and the time of a tiny one."""

    bus_gb_s: float
    latency_us: float

    def time_ms(self, world_size: int, nodes: int, size_bytes: float, messages: float) -> float:
        """Return the ms of `messages` all_reduces that have `size_bytes` together."""
        wire_ms = wire_factor(world_size) * size_bytes / self.bus_gb_s / 1e6
        return messages * self.latency_us / 1000 * math.log2(max(2, nodes)) + wire_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """How much of its communication a step feels, on the number of devices where it was measured.

    comm_ms: communication, hidden or not. exposed_ms: by how much it makes the step longer.
    hideable_ms: the computation beside which it can run. local_ms: the step without communication.
    """

    comm_ms: float
    exposed_ms: float
    hideable_ms: float
    local_ms: float

    @property
    def share(self) -> float:
        """The exposed share; above 1 where communication slows the computation beside it too."""
        return max(0.0, self.exposed_ms) / self.comm_ms if self.comm_ms > 0 else 0.0

    def growth_ms(self, comm_ms: float) -> float:
        """Return by how many ms the step grows when its communication takes `comm_ms` instead.

        As long as it fits beside the computation, the exposed share stays the same; communication
        that does not fit is fully exposed.
        """
        return self._growth_ms(comm_ms, self.hideable_ms)

    def bounds_ms(self, comm_ms: float) -> tuple[float, float]:
        """Return bounds of `growth_ms`.

        The lower one hides all that the step can hide, the upper one half of what is expected.
        """
        grown_ms = comm_ms - self.comm_ms
        if grown_ms <= 0:
            return max(1.0, self.share) * grown_ms, 0.0
        most_ms = self._growth_ms(comm_ms, self.hideable_ms / 2)
        return self._beyond_ms(comm_ms, self.local_ms), most_ms

    def _growth_ms(self, comm_ms: float, hidden_ms: float) -> float:
        beside_ms = min(comm_ms, max(self.comm_ms, hidden_ms)) - self.comm_ms
        beyond_ms = self._beyond_ms(comm_ms, hidden_ms)
        return self.share * beside_ms + max(1.0, self.share) * beyond_ms

    def _beyond_ms(self, comm_ms: float, hidden_ms: float) -> float:
        return max(0.0, comm_ms - max(self.comm_ms, hidden_ms))


def fit_growth(worlds: Sequence[int], exposed_ms: Sequence[float]) -> tuple[float, float]:
    """Fit exposed = constant + slope x wire_factor; return (constant, slope), neither below 0.

    With one world the constant is 0.
    """
    factors = np.array([wire_factor(world) for world in worlds])
    known = np.maximum(0.0, np.asarray(exposed_ms, dtype=np.float64))
    if len(worlds) == 1:
        return 0.0, float(known[0] / factors[0])
    from scipy.optimize import nnls

    (constant, slope), _ = nnls(np.column_stack([np.ones_like(factors), factors]), known)
    return float(constant), float(slope)
