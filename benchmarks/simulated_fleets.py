"""How often a health check calls a device slow that is not, and finds one that is.

    python -m benchmarks.simulated_fleets [--fleets 1000] [--tests 16] [--only WORD] [-o FILE.json]

Fleets of 8 to 10,000 devices in three passes of several tests go through the verdicts of
`raybench.stats.outliers`. Every value is made here, independent of what is measured.

noise (`NOISES`): what each pass adds to each device, and what a device keeps over all passes, as
the silicon that it is made of. false_alarms: the share of healthy fleets in which any device is
called slow in any test. found: the share of fleets in which the one device that is 8 % slower, in
one test alone, is called so. "level" is a device that is 8 % slower than the median; "made" is one
that is made 8 % slower than it was, whatever it was, which is harder. verdict_s: the time of the
verdicts on a fleet, median and maximum. whole: processor time from readings to findings.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import options, write_result
from benchmarks.made_up import devices
from raybench.health.readings import Reading
from raybench.health.suite import HealthTest, device_subjects
from raybench.health.verdicts import judge
from raybench.stats.outliers import Floats, compare_peers, find_slow

PASSES = 3
FLOOR = 0.01  # as that of a GEMM
SLOWER = 0.08
SIZES = (8, 16, 64, 256, 1_000, 4_000, 10_000)
# The share of values that each pass adds and that a device keeps, by a name.
NOISES = {
    "of each pass, 1 %": (0.01, 0.0),
    "of the device, 1 %": (0.001, 0.01),
    "half of each, 1 % together": (0.01 / 2**0.5, 0.01 / 2**0.5),
    "both, 1 % each": (0.01, 0.01),
    "of the device, 3 %": (0.001, 0.03),
}
# The most values of a row: 1,000 fleets of 10,000 devices would take half an hour.
MOST_VALUES = 100_000_000


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--fleets", type=int, default=1_000)
    parser.add_argument("--tests", type=int, default=16)
    parser.add_argument("--only", default="", help="noises whose name has this")
    chosen = parser.parse_args()
    rows = []
    for seed, noise in enumerate(NOISES):
        for size in SIZES if chosen.only in noise else ():
            rows.append(simulate(noise, size, chosen.tests, chosen.fleets, seed))
            print(rows[-1], flush=True)
    whole = [judge_s(size, 8) for size in (1_000, 10_000)]
    write_result({"passes": PASSES, "floor": FLOOR, "rows": rows, "whole": whole}, chosen.output)


def simulate(noise: str, size: int, tests: int, fleets: int, seed: int) -> dict[str, Any]:
    """Judge fleets of each kind."""
    rng = np.random.default_rng(seed)
    count = max(50, min(fleets, MOST_VALUES // (size * tests * PASSES)))
    hits, spent_s = dict.fromkeys(("healthy", "level", "made"), 0), list[float]()
    for kind in hits:
        for _ in range(count):
            values = fleet(rng, kind, size, tests, NOISES[noise])
            began_s = time.perf_counter()
            peers = [compare_peers(each, is_time=False, floor=FLOOR) for each in values]
            slow = np.asarray(find_slow(peers))
            spent_s.append(time.perf_counter() - began_s)
            hits[kind] += bool(slow.any() if kind == "healthy" else slow[0, 0])
    return {
        **{"noise": noise, "devices": size, "tests": tests, "fleets": count},
        "false_alarms": hits["healthy"] / count,
        "found_level": hits["level"] / count,
        "found_made": hits["made"] / count,
        "verdict_s": round(median(spent_s), 4),
        "verdict_s_max": round(max(spent_s), 4),
    }


def fleet(
    rng: np.random.Generator, kind: str, size: int, tests: int, noise: tuple[float, float]
) -> Floats:
    """Draw rates [tests, passes, devices]; device 0 is slow in test 0, but of a healthy fleet."""
    of_pass, of_device = noise
    own = of_device * rng.standard_normal((tests, 1, size))
    if kind == "level":
        own[0, 0, 0] = 0
    level = np.ones((tests, 1, size))
    if kind != "healthy":
        level[0, 0, 0] = 1 - SLOWER
    drawn = of_pass * rng.standard_normal((tests, PASSES, size))
    return np.asarray(level * (1 + own + drawn))


def judge_s(size: int, tests: int) -> dict[str, float]:
    """Time all that comes after the readings of a healthy fleet, verdicts and findings."""
    fleet_of = devices(size // 8)
    values = fleet(np.random.default_rng(0), "healthy", size, tests, (0.01, 0.0))
    readings = [
        Reading(test=gemm(place), subject=subject, pass_number=number, value=value)
        for place, by_pass in enumerate(values.tolist())
        for number, of_pass in enumerate(by_pass, 1)
        for subject, value in zip(device_subjects(fleet_of), of_pass, strict=True)
    ]
    spent_s = time.process_time()
    judge(readings, fleet_of)
    spent_s = time.process_time() - spent_s
    return {"devices": size, "tests": tests, "judge_cpu_s": round(spent_s, 2)}


def gemm(number: int) -> HealthTest:
    return HealthTest(
        name=f"gemm {number}",
        stage="alone",
        unit="TFLOP/s",
        floor=FLOOR,
    )


if __name__ == "__main__":
    main()
