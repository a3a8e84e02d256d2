"""What a point costs beyond its own iterations: a fresh torchrun each, against one sweep.

    python benchmarks/point_cost.py [--device cpu|cuda] [--points 20] [-o FILE.json]

The same points (world_size 2, an MLP, another batch size each) are run both ways on this machine:
20 times `raybench.doctor.bare_step` by torchrun, and once `raybench sweep`. From the wall time of
each torchrun its own warm-up and samples are taken off; of the sweep, each row's duration less its
samples, and beside it the whole wall time of the command spread over the points, Ray's start
included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import raybench
from raybench.doctor.torchrun import BareStep, run_bare

WORLD_SIZE, WARMUP, ITERATIONS = 2, 5, 20
PARAMS = {"hidden": 256, "layers": 2}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--points", type=int, default=20)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    batch_sizes = [8 * (number + 1) for number in range(chosen.points)]
    sweep = by_sweep(chosen.device, batch_sizes)
    torchrun = by_torchrun(chosen.device, batch_sizes)
    result = {
        "device": chosen.device,
        "points": chosen.points,
        "torchrun_s_per_point": torchrun,
        "sweep_s_per_point": sweep["marginal"],
        "sweep_with_start_s_per_point": sweep["with_start"],
        "ratio": torchrun / sweep["marginal"],
        "ratio_with_start": torchrun / sweep["with_start"],
    }
    for name, value in result.items():
        print(f"{name:32} {value:.3f}" if isinstance(value, float) else f"{name:32} {value}")
    if chosen.output:
        chosen.output.write_text(json.dumps(result, indent=2) + "\n")


def by_torchrun(device: str, batch_sizes: list[int]) -> float:
    """Seconds a point beyond its own iterations, the median over the points."""
    beyond_s = []
    for batch_size in batch_sizes:
        step = BareStep(
            device=device,
            indexes=tuple(range(WORLD_SIZE)),
            workload="mlp",
            params=PARAMS,
            precision="fp32",
            batch_size=batch_size,
            warmup=WARMUP,
            iterations=ITERATIONS,
        )
        started_s = time.perf_counter()
        answer = run_bare(step, os.environ)
        wall_s = time.perf_counter() - started_s
        beyond_s.append(wall_s - answer.iterations_s)
    return statistics.median(beyond_s)


def by_sweep(device: str, batch_sizes: list[int]) -> dict[str, float]:
    """Measure the same from one sweep: by the rows' durations, and by the command's wall time."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(
            "version: 1\nname: point_cost\n"
            f"workload: {json.dumps({'kind': 'mlp', **PARAMS})}\n"
            f"matrix: {{world_size: [{WORLD_SIZE}], batch_size: {batch_sizes}}}\n"
            f"measure: {{warmup: {WARMUP}, iterations: {ITERATIONS}}}\n"
        )
        results = Path(folder) / "results"
        command = [sys.executable, "-m", "raybench", "sweep", str(job), "-o", str(results)]
        started_s = time.perf_counter()
        subprocess.run(
            [*command, "--address", "local", "--device", device], check=True, capture_output=True
        )
        wall_s = time.perf_counter() - started_s
        points = raybench.load(results, "points")
        samples = raybench.load(results, "samples")
    samples_s = samples.groupby(["point_id", "rank"])["step_ns"].sum() / 1e9
    samples_s = samples_s.groupby("point_id").max()
    assert (points["status"] == "ok").all(), points[["status", "error_message"]]
    beyond_s = points.set_index("point_id")["duration_s"] - samples_s
    return {
        "marginal": float(beyond_s.median()),
        "with_start": (wall_s - float(samples_s.sum())) / len(points),
    }


if __name__ == "__main__":
    main()
