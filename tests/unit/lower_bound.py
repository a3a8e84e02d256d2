"""What no order of a plan's points can beat."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from raybench.cluster.allocator import Isolation
from raybench.job.plan import Plan
from raybench.job.point import Point


def at_least_s(
    plan: Plan,
    duration_s: Callable[[Point], float],
    devices: int,
    nodes: int,
    isolation: Isolation,
) -> float:
    """Compute what no order can beat, on `nodes` equal nodes of so many devices, in seconds.

    The largest of: the work of all points over what the cluster has; the longest point; the sum of
    the points of which no two have room beside each other. Work is counted in devices, with
    isolation `node` in whole nodes. Graham 1969, doi:10.1137/0117039, for one machine a job.
    """
    units = {"cluster": 1, "node": nodes, "device": devices}[isolation]
    work = []
    for point in plan.points:
        if point.world_size <= devices:
            needed = {
                "cluster": 1,
                "node": ceil(point.world_size * nodes / devices),
                "device": point.world_size,
            }[isolation]
            work.append((needed, duration_s(point)))
    return max(
        sum(needed * seconds for needed, seconds in work) / units,
        max((seconds for _, seconds in work), default=0.0),
        sum(seconds for needed, seconds in work if 2 * needed > units),
    )
