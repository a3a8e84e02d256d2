"""The driver of a sweep, killed by SIGKILL at random moments and resumed after each.

    python -m benchmarks.killed_driver [--kills 10] [--points 40] [--seed N] [-o FILE.json]

Real processes on CPU workers. After each kill every table is read by pandas and by raybench, and
the run must be shown as interrupted; at the end each point must be ok exactly once. It prints at
what moment each kill came and how many rows there were.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.integration.driver_kills import KilledSweep


def measured(kills: int, points: int, seed: int) -> dict[str, Any]:
    """Check the rows. Raises AssertionError where one is lost, doubled or cannot be read."""
    chance = random.Random(seed)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="killed") as folder:
        sweep = KilledSweep(Path(folder), points)
        moments = []
        for number in range(1, kills + 1):
            kill = sweep.killed(chance)
            moments.append(asdict(kill))
            print(f"kill {number:>2}  in {kill.moment:<8}{kill.rows:>3} rows", flush=True)
        sweep.finish()
        sweep.check_each_point_once(points)
    took_s = time.monotonic() - begun_s
    print(f"{points} points, each ok once; {kills} kills, seed {seed}, {took_s:.0f} s")
    return {"seed": seed, "points": points, "kills": moments, "took_s": round(took_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--points", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    result = measured(given.kills, given.points, given.seed)
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
