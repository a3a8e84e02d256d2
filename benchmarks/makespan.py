"""How near to the lower bound a mixed plan ends on 8 workers, and the cost of one at a time.

    python benchmarks/makespan.py [--points 64] [--plans 50] [-o FILE.json]

Two ways: by a counted clock over many plans (`raybench.sweep.makespan`, the decisions of a real
sweep), and by real sweeps on the in-process cluster whose points are threads that sleep, 50 ms at
the median. Durations are log-normal (sigma 0.6) and unknown to the schedule; world sizes are 1, 2,
4 and 8. The third figure is what the loop itself takes for a point with isolation `cluster`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from fakes import make_cluster, make_measurement, make_point
from lower_bound import at_least_s

from raybench.job.model import Measure
from raybench.job.plan import Plan
from raybench.job.point import Point
from raybench.sweep.loop import SweepSettings, sweep
from raybench.sweep.makespan import imagine_devices, makespan_s
from raybench.sweep.rounds import Rounds

DEVICES = imagine_devices(8, 1)
MEAN_S = 0.05


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--points", type=int, default=64)
    options.add_argument("--plans", type=int, default=50)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    counted = [ratio(*mixed(chosen.points, seed), counted_s) for seed in range(chosen.plans)]
    slept = [ratio(*mixed(chosen.points, seed), slept_s) for seed in range(5)]
    found = {
        "points": chosen.points,
        "counted_clock": summary(counted),
        "sleeping_threads": summary(slept),
        "loop_us_a_point": round(loop_us()),
    }
    print(json.dumps(found, indent=2))
    if chosen.output:
        chosen.output.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(found["counted_clock"]["median"] > 1.15)


def mixed(count: int, seed: int) -> tuple[Plan, Callable[[Point], float]]:
    rng = random.Random(seed)
    sizes = [rng.choice((1, 2, 4, 8)) for _ in range(count)]
    points = tuple(make_point(world_size=n, batch_size=i + 1) for i, n in enumerate(sizes))
    durations_s = {point.point_id: MEAN_S * rng.lognormvariate(0, 0.6) for point in points}
    return Plan(points=points), lambda point: durations_s[point.point_id]


Way = Callable[[Plan, Callable[[Point], float]], float]


def ratio(plan: Plan, duration_s: Callable[[Point], float], way: Way) -> float:
    return way(plan, duration_s) / at_least_s(plan, duration_s, 8, 1, "device")


def counted_s(plan: Plan, duration_s: Callable[[Point], float]) -> float:
    return makespan_s(plan, duration_s, DEVICES, "device")


def slept_s(plan: Plan, duration_s: Callable[[Point], float]) -> float:
    def script(point: Point, rank: int):
        if rank == 0:
            time.sleep(duration_s(point))
        return make_measurement(rank)

    return swept_s(plan, script, "device")


def swept_s(plan: Plan, script, isolation: str) -> float:
    cluster = make_cluster(list(DEVICES), script)
    cluster.start(8, "pack")
    settings = SweepSettings(
        measure=Measure(), strategy="pack", stop_on_error=False, isolation=isolation
    )
    began_s = time.perf_counter()
    list(sweep(Rounds(plan=plan), settings, cluster, lambda *_: None))
    return time.perf_counter() - began_s


def loop_us() -> float:
    """Microseconds that the loop takes for a point of nothing, one at a time."""
    plan, _ = mixed(2000, 0)
    return swept_s(plan, lambda point, rank: make_measurement(rank), "cluster") / 2000 * 1e6


def summary(ratios: list[float]) -> dict[str, float]:
    return {
        "plans": len(ratios),
        "median": round(statistics.median(ratios), 3),
        "worst": round(max(ratios), 3),
        "within_15_pct": round(sum(ratio <= 1.15 for ratio in ratios) / len(ratios), 3),
    }


if __name__ == "__main__":
    main()
