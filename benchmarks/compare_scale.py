"""What `raybench compare` of two runs costs, as a process of its own.

    python benchmarks/compare_scale.py [--points 10 100 1000] [-o FILE.json]

The measurements are made up: points of 1 to 8 ranks, 5 warm-up and 30 timed iterations on each,
every tenth point failed. The rows, their statistics and their files are as in a real run.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from sizes import tell_sizes
from store_scale import ITERATIONS, RANKS, WARMUP, process, record, run, write

from raybench.job.model import Measure
from raybench.results.writer import RunStore

RUNS = ("base", "new")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--points", type=int, nargs="+", default=[10, 100, 1000])
    options.add_argument("--times", type=int, default=3)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    sizes = [measured(count, chosen.times) for count in chosen.points]
    tell_sizes(sizes, chosen.output, iterations=ITERATIONS)


def measured(points: int, times: int) -> dict[str, float]:
    """Seconds (the least of several calls: others use the machine too) and memory."""
    with tempfile.TemporaryDirectory() as folder:
        for run_id in RUNS:
            write_run(Path(folder), run_id, points)
        costs = [
            process("-m", "raybench", "compare", *RUNS, "--results", folder) for _ in range(times)
        ]
    return {
        "points": points,
        "compare_s": min(cost.time_s for cost in costs),
        "compare_mib": max(cost.memory_mib for cost in costs),
    }


def write_run(root: Path, run_id: str, points: int) -> None:
    templates = [record(world_size) for world_size in range(1, RANKS + 1)]
    made = replace(run(points), run_id=run_id)
    store = RunStore.create(root, made, Measure(warmup=WARMUP, iterations=ITERATIONS))
    store.write_devices(templates[-1].devices)
    write(store, templates, points)


if __name__ == "__main__":
    main()
