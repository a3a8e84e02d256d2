"""Is a step in a sweep as fast as by bare torchrun? Interleaved starts of both, same devices.

    python tests/benchmarks/parity.py --device cuda --world-size 4 [--starts 3] [-o FILE.json]

Each start of torchrun runs bare_point.py; each start of raybench is a whole `raybench sweep` of
the same point. The figure is the ratio of the medians over starts of the step time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import raybench

HERE = Path(__file__).parent


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    options.add_argument("--world-size", type=int, default=4)
    options.add_argument("--starts", type=int, default=3)
    options.add_argument("--workload", default="mlp")
    options.add_argument("--params", type=json.loads, default={"hidden": 8192, "layers": 8})
    options.add_argument("--precision", default="bf16")
    options.add_argument("--batch-size", type=int, default=4096)
    options.add_argument("--iterations", type=int, default=100)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    bare, swept = [], []
    for _ in range(chosen.starts):
        bare.append(by_torchrun(chosen))
        swept.append(by_sweep(chosen))
        print(f"torchrun {bare[-1]:.4f} ms   raybench {swept[-1]:.4f} ms", flush=True)
    ratio = statistics.median(swept) / statistics.median(bare)
    print(f"raybench / torchrun = {ratio:.4f}")
    if chosen.output:
        chosen.output.write_text(
            json.dumps({"torchrun_ms": bare, "raybench_ms": swept, "ratio": ratio}) + "\n"
        )


def by_torchrun(chosen: argparse.Namespace) -> float:
    point = {
        "workload": chosen.workload,
        "params": chosen.params,
        "precision": chosen.precision,
        "batch_size": chosen.batch_size,
        "device": chosen.device,
        "warmup": 20,
        "iterations": chosen.iterations,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={chosen.world_size}", str(HERE / "bare_point.py")]
    done = subprocess.run([*command, json.dumps(point)], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["step_ms_p50"])


def by_sweep(chosen: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(
            "version: 1\nname: parity\n"
            f"workload: {json.dumps({'kind': chosen.workload, **chosen.params})}\n"
            f"matrix: {{world_size: {chosen.world_size}, precision: {chosen.precision}, "
            f"batch_size: {chosen.batch_size}}}\n"
            f"measure: {{warmup: 20, iterations: {chosen.iterations}}}\n"
        )
        results = Path(folder) / "results"
        command = [sys.executable, "-m", "raybench", "sweep", str(job), "-o", str(results)]
        subprocess.run(
            [*command, "--address", "local", "--device", chosen.device],
            check=True,
            capture_output=True,
        )
        points = raybench.load(results, "points")
    return float(points["step_ms_p50"].iloc[0])


if __name__ == "__main__":
    main()
