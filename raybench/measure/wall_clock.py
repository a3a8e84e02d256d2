"""What a clock of the host says of a step on a GPU, before the device is done and after it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from raybench.measure.timing import Step
from raybench.records import WallTimes

COLUMNS = ("wall_unsynced_ms_by_rank", "wall_synced_ms_by_rank")
METHODS = {
    "wall_unsynced_ms_by_rank": "host clock around one step of an idle device, not waited for",
    "wall_synced_ms_by_rank": "host clock around one step of an idle device, waited for",
}
NO_GPU = "none: on a CPU nothing goes on behind the host's clock"
_NS_PER_MS = 1e6


def time_by_wall_clock(step: Step, steps: int, wait: Callable[[], None]) -> WallTimes:
    """Time steps one at a time, as a script does that has no events.

    wait: for the device. It is idle before each step.
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
        unsynced_ms=statistics.median(issued_ns) / _NS_PER_MS,
        synced_ms=statistics.median(done_ns) / _NS_PER_MS,
    )
