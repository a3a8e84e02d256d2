"""Is a script as fast below raybench as by bare torchrun, where it times itself?

    python benchmarks/script_parity.py [--device cpu|cuda] [--world-size 2] [--starts 5]
        [--only gpu_bound|python_bound] [-o FILE.json]

benchmarks/self_timed_train.py in fresh processes each time, by torchrun and by raybench in turn;
of both the step over its ranks, and their ratio with its 95 % interval over the starts. The script
records an event of its own in each step on both sides.
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
from dataclasses import asdict
from pathlib import Path

from raybench.cluster import Cluster
from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.connection import connect
from raybench.doctor.parity import order
from raybench.job.model import Measure
from raybench.job.point import SCRIPT, Point
from raybench.records import Measurement, Task
from raybench.stats.equivalence import agreement, ratio
from raybench.stats.summary import step_series

TRAIN = Path(__file__).with_name("self_timed_train.py")
WARMUP = 40
# By name: the arguments of the script, its timed steps, and the margin of the ratio.
STEPS = {
    "cuda": {
        "gpu_bound": ("--hidden 4096 --layers 8 --batch-size 1024", 60, 0.01),
        "python_bound": ("--hidden 64 --layers 24 --batch-size 64", 600, 0.05),
    },
    "cpu": {
        "compute_bound": ("--hidden 256 --layers 4 --batch-size 64", 50, 0.01),
        "python_bound": ("--hidden 16 --layers 8 --batch-size 4", 100, 0.05),
    },
}
ENDLESS = 10_000_000


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--world-size", type=int, default=2)
    options.add_argument("--starts", type=int, default=5, help="at least 2")
    options.add_argument("--only", help="one of the steps")
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cluster = RayCluster(connect("local", chosen.device, chosen.world_size))
    found = {}
    try:
        cluster.start(chosen.world_size, "pack")
        for name, (arguments, steps, margin) in STEPS[chosen.device].items():
            if chosen.only in (None, name):
                found[name] = compare(cluster, arguments, steps, margin, chosen.starts)
                print(name, json.dumps(found[name]), flush=True)
    finally:
        cluster.close()
    if chosen.output:
        chosen.output.write_text(json.dumps(found, indent=2) + "\n")


def compare(
    cluster: Cluster, arguments: str, steps: int, margin: float, starts: int
) -> dict[str, object]:
    times_ms: dict[str, list[float]] = {"torchrun": [], "raybench": []}
    for side in order(starts):
        began_s = time.perf_counter()
        run = by_torchrun if side == "torchrun" else by_raybench
        ranks_ns = run(cluster, arguments, steps)
        times_ms[side].append(round(statistics.median(step_series(ranks_ns)) / 1e6, 4))
        took_s = time.perf_counter() - began_s
        print(f"{side}: {times_ms[side][-1]} ms ({took_s:.1f} s)", file=sys.stderr, flush=True)
    of_torchrun = ratio(times_ms["raybench"], times_ms["torchrun"])
    verdict = agreement(of_torchrun, margin)
    return {"step_ms": times_ms, "ratio": asdict(of_torchrun), "margin": margin, "is": verdict}


def by_torchrun(cluster: Cluster, arguments: str, steps: int) -> list[list[int]]:
    world_size = len(cluster.devices)
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        own = f"{arguments} --warmup {WARMUP} --steps {steps} --times {times}".split()
        command = [*launcher, f"--nproc-per-node={world_size}", str(TRAIN), *own]
        subprocess.run(command, check=True, timeout=120)
        return [json.loads(times.with_suffix(f".{rank}").read_text()) for rank in range(world_size)]


def by_raybench(cluster: Cluster, arguments: str, steps: int) -> list[list[int]]:
    world_size = len(cluster.devices)
    args = f"{arguments} --steps {ENDLESS} --times unused"
    params = {"path": str(TRAIN), "args": args, "items_per_step": "", "step_of": ""}
    point = Point(
        workload=SCRIPT,
        params=params,
        world_size=world_size,
        batch_size=None,
        global_batch_size=None,
        scaling=None,
    )
    settings = Measure.model_validate(
        {"warmup": WARMUP, "iterations": steps, "breakdown": False, "timeout_s": 120}
    )
    task = Task(point=point, settings=settings, precisions=None)
    answers = cluster.run(task, range(world_size))
    failures = [answer for answer in answers if not isinstance(answer, Measurement)]
    if failures:
        raise SystemExit("\n".join(f"{one.message}\n{one.detail}" for one in failures))
    return [list(answer.repetitions[0].timed.step_ns) for answer in answers]


if __name__ == "__main__":
    main()
