"""What a point costs beyond its own iterations: a fresh torchrun each, against one sweep.

    python -m benchmarks.point_cost [--device cpu|cuda] [--points 20] [-o FILE.json]

The same points (world_size 2, an MLP, another batch size each) are run both ways on this machine:
each by `benchmarks/bare.py` below torchrun, and all by one `raybench sweep`. From the wall time of
each torchrun its own warm-up and timed steps are taken off; of the sweep, each row's duration less
its samples, and beside it the whole wall time of the command spread over the points, Ray's start
included.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import raybench
from benchmarks.common import options, sweep, write_result
from benchmarks.parity import by_torchrun
from raybench.records.environment import variables_that_matter

WORLD_SIZE, WARMUP, ITERATIONS = 2, 5, 20
WORKLOAD = {"kind": "mlp", "hidden": 256, "layers": 2}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--points", type=int, default=20)
    chosen = parser.parse_args()
    batch_sizes = [8 * (number + 1) for number in range(chosen.points)]
    of_sweep, with_start = by_sweep(chosen.device, batch_sizes)
    of_torchrun = statistics.median(torchrun_s(chosen.device, batch) for batch in batch_sizes)
    result = {
        "device": chosen.device,
        "points": chosen.points,
        "torchrun_s_per_point": of_torchrun,
        "sweep_s_per_point": of_sweep,
        "sweep_with_start_s_per_point": with_start,
        "ratio": of_torchrun / of_sweep,
        "ratio_with_start": of_torchrun / with_start,
    }
    write_result(result, chosen.output)


def torchrun_s(device: str, batch_size: int) -> float:
    """Return the seconds of a torchrun beyond its own iterations."""
    spec = {
        "device": device,
        "indexes": list(range(WORLD_SIZE)),
        "steps": [{"workload": WORKLOAD, "batch_size": batch_size}],
        "warmup": WARMUP,
        "iterations": ITERATIONS,
    }
    started_s = time.perf_counter()
    answer = by_torchrun(spec, WORLD_SIZE, variables_that_matter())
    return time.perf_counter() - started_s - float(answer["seconds"])


def by_sweep(device: str, batch_sizes: list[int]) -> tuple[float, float]:
    """Return the seconds of a point, by the rows' durations and by the command's wall time."""
    job = {
        "workload": WORKLOAD,
        "matrix": {"world_size": [WORLD_SIZE], "batch_size": batch_sizes},
        "measure": {"warmup": WARMUP, "iterations": ITERATIONS},
    }
    with tempfile.TemporaryDirectory() as folder:
        started_s = time.perf_counter()
        points = sweep(Path(folder), job, device)
        wall_s = time.perf_counter() - started_s
        samples = raybench.load(Path(folder) / "results", "samples")
    samples_s = samples.groupby(["point_id", "rank"])["step_ns"].sum() / 1e9
    samples_s = samples_s.groupby("point_id").max()
    beyond_s = points.set_index("point_id")["duration_s"] - samples_s
    return float(beyond_s.median()), (wall_s - float(samples_s.sum())) / len(points)


if __name__ == "__main__":
    main()
