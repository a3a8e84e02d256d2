"""How long a plan takes on an idle cluster. Pure: a clock that is counted.

The decisions are those of `raybench.sweep.scheduler`; only the durations are given instead of
measured.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from raybench.cluster.allocator import Isolation
from raybench.job.plan import Plan
from raybench.job.point import ANY, Point
from raybench.records import Device
from raybench.sweep.scheduler import Assign, Attempt, Schedule


def makespan_s(
    plan: Plan,
    duration_s: Callable[[Point], float],
    devices: Sequence[Device],
    isolation: Isolation,
) -> float:
    """From the first start to the last end, in seconds; points that do not fit take no time.

    duration_s: of each point, which the schedule learns only when the point ends.
    """
    attempts = [
        # Devices that are imagined have no models.
        Attempt(index=i, point=replace(point, devices=ANY), number=1)
        for i, point in enumerate(plan.points)
    ]
    schedule = Schedule(attempts, isolation)
    schedule.see(devices, len(devices), frozenset(), 0)
    now_s = 0.0
    tie = itertools.count()
    running: list[tuple[float, int, Attempt]] = []
    while True:
        while (decision := schedule.next()) is not None:
            if isinstance(decision, Assign):
                end_s = now_s + duration_s(decision.attempt.point)
                heapq.heappush(running, (end_s, next(tie), decision.attempt))
        if not running:
            return now_s
        now_s, _, attempt = heapq.heappop(running)
        schedule.free(attempt)


def imagine_devices(devices: int, nodes: int) -> tuple[Device, ...]:
    """Devices that nobody has, shared evenly by so many nodes, to plan with."""
    per_node = devices // nodes
    return tuple(
        Device(
            kind="cuda",
            node_id=f"{node:08d}",
            host=f"node {node}",
            address=f"{node:08d}",
            index=index,
            uuid=f"{node}/{index}",
            name="imagined",
            process_id=0,
            cpu_count=0,
            niceness=0,
            omp_num_threads=1,
        )
        for node in range(nodes)
        for index in range(per_node)
    )
