"""How often a health check calls a device slow that is not, and finds one that is.

    python -m benchmarks.simulated_fleets [--fleets 1000] [--tests 16] [--only WORD] [-o FILE.json]

Fleets of 8 to 10,000 devices in three passes of several tests go through the verdicts of
`raybench.stats.fleet`. Every value is made here, independent of what is measured.

noise (`NOISES`): what each pass adds to each device, and what a device keeps over all passes, as
the silicon that it is made of. false_alarms: the share of healthy fleets in which any device is
called slow in any test. found: the share of fleets in which the one device that is 8 % slower, in
one test alone, is called so. "level" is a device that is 8 % slower than the median; "made" is one
that is made 8 % slower than it was, whatever it was, which is harder. verdict_s: the time of the
verdicts on a fleet, median and maximum. whole: of all from readings to findings.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.machine import machine
from raybench.doctor.health.subjects import device_subjects
from raybench.doctor.health.verdicts import judge
from raybench.records import Device
from raybench.records.health import HealthTest, Reading
from raybench.stats.fleet import Floats, compare_peers, find_slow

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
KINDS = ("healthy", "level", "made")
# The most values of a row: 1,000 fleets of 10,000 devices would take half an hour.
MOST_VALUES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of many fleets of one size and noise."""

    noise: str
    devices: int
    tests: int
    fleets: int
    false_alarms: float
    found_level: float
    found_made: float
    verdict_s: float
    verdict_s_max: float


def fleet(
    rng: np.random.Generator, kind: str, devices: int, tests: int, noise: tuple[float, float]
) -> Floats:
    """Draw rates [tests, passes, devices]; device 0 is slow in test 0, but of a healthy fleet."""
    of_pass, of_device = noise
    own = of_device * rng.standard_normal((tests, 1, devices))
    if kind == "level":
        own[0, 0, 0] = 0
    level = np.ones((tests, 1, devices))
    if kind != "healthy":
        level[0, 0, 0] = 1 - SLOWER
    drawn = of_pass * rng.standard_normal((tests, PASSES, devices))
    return np.asarray(level * (1 + own + drawn))


def slow_devices(values: Floats) -> Iterator[tuple[int, int]]:
    """Yield each test and device that is called slow."""
    tests = [compare_peers(each, is_time=False, floor=FLOOR) for each in values]
    for place, found in enumerate(find_slow(tests)):
        yield from ((place, int(device)) for device in np.flatnonzero(found))


def simulate(noise: str, devices: int, tests: int, fleets: int, seed: int) -> Row:
    """Judge fleets of each kind."""
    rng = np.random.default_rng(seed)
    count = max(50, min(fleets, MOST_VALUES // (devices * tests * PASSES)))
    hits, spent_s = dict.fromkeys(KINDS, 0), list[float]()
    for kind in KINDS:
        for _ in range(count):
            values = fleet(rng, kind, devices, tests, NOISES[noise])
            start = time.perf_counter()
            called = set(slow_devices(values))
            spent_s.append(time.perf_counter() - start)
            hits[kind] += bool(called) if kind == "healthy" else (0, 0) in called
    return Row(
        noise=noise,
        devices=devices,
        tests=tests,
        fleets=count,
        false_alarms=hits["healthy"] / count,
        found_level=hits["level"] / count,
        found_made=hits["made"] / count,
        verdict_s=round(median(spent_s), 4),
        verdict_s_max=round(max(spent_s), 4),
    )


def time_judge(devices: int, tests: int) -> dict[str, float]:
    """Time all that comes after the readings of a healthy fleet, verdicts and findings."""
    fleet_of = [
        Device(
            kind="cuda",
            node_id=f"node{place // 8}",
            host=f"node{place // 8}",
            address="",
            index=place % 8,
            uuid=f"GPU-{place}",
            name="simulated",
            process_id=place,
            cpu_count=1,
            niceness=0,
            omp_num_threads=1,
        )
        for place in range(devices)
    ]
    values = fleet(np.random.default_rng(0), "healthy", devices, tests, (0.01, 0.0))
    subjects = device_subjects(fleet_of)
    readings = [
        Reading(test=test, subject=subject, pass_number=number, value=value)
        for test, by_pass in zip(map(gemm, range(tests)), values.tolist(), strict=True)
        for number, of_pass in enumerate(by_pass, 1)
        for subject, value in zip(subjects, of_pass, strict=True)
    ]
    start, spent = time.perf_counter(), time.process_time()
    judge(readings, fleet_of)
    return {
        "devices": devices,
        "tests": tests,
        "judge_s": round(time.perf_counter() - start, 2),
        "judge_cpu_s": round(time.process_time() - spent, 2),
    }


def gemm(number: int) -> HealthTest:
    return HealthTest(
        name=f"gemm {number}",
        stage="alone",
        kind="device",
        unit="TFLOP/s",
        is_time=False,
        floor=FLOOR,
        meaning="simulated",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fleets", type=int, default=1_000)
    parser.add_argument("--tests", type=int, default=16)
    parser.add_argument("--only", default="", help="noises whose name has this")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    rows = []
    for seed, noise in enumerate(NOISES):
        for devices in SIZES if asked.only in noise else ():
            row = simulate(noise, devices, asked.tests, asked.fleets, seed)
            rows.append(asdict(row))
            print(json.dumps(rows[-1]), flush=True)
    if asked.output:
        whole = [time_judge(devices, 8) for devices in (1_000, 10_000)]
        content = {"passes": PASSES, "floor": FLOOR, "machine": machine(), "rows": rows}
        content["whole"] = whole
        asked.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
