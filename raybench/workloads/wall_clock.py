"""A step timed by the host's clock, without and with waiting for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from raybench.conversion import NS_PER_MS
from raybench.records.metrics import Metric

WALL_METRICS = (
    Metric(
        name="wall_unsynced_share",
        heading="time.time()/step",
        description="time.time() around a step without synchronizing / step",
        meaning="what time.time() reports without synchronizing, in % of the step time",
        over_ranks="max",
        over_step="share",
        format="share",
    ),
    Metric(
        name="wall_synced_share",
        heading="time.time() synced/step",
        description="time.time() around a step with synchronizing / step",
        meaning="what time.time() reports with synchronizing, in % of the step time",
        over_ranks="max",
        over_step="share",
        format="share",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WallTimes:
    """Duration of a step by the host's clock; the step begins on an idle device."""

    # Until the host has issued the step.
    unsynced_ms: float
    # Until the device has finished the step.
    synced_ms: float


def time_by_wall_clock(step: Callable[[], None], steps: int, wait: Callable[[], None]) -> WallTimes:
    """Return the median ms until a step returns and until its work is done, by the host's clock.

    Args:
        steps: number of steps, above 0; each begins on an idle device.
        wait: blocks until the device is idle.
    """
    issued_ns, done_ns = [], []
    for _ in range(steps):
        wait()
        start_ns = time.perf_counter_ns()
        step()
        issued_ns.append(time.perf_counter_ns() - start_ns)
        wait()
        done_ns.append(time.perf_counter_ns() - start_ns)
    return WallTimes(
        unsynced_ms=statistics.median(issued_ns) / NS_PER_MS,
        synced_ms=statistics.median(done_ns) / NS_PER_MS,
    )
