"""Is a script as fast below raybench as by bare torchrun, where it times itself?

    python benchmarks/script_parity.py [--device cpu|cuda] [--world-size 2] [--starts 5]
        [--only gpu_bound|python_bound] [-o FILE.json]

benchmarks/self_timed_train.py in fresh processes each time, by torchrun and by raybench; of both
the step over its ranks, and their ratio with its 95 % interval over the starts. A start of each
loads its libraries beside the other; then one steps, alone, and when its processes have ended the
other, in turn. The script records an event of its own in each step on both sides. FILE is written
after each start.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

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
WARMUP = 20
# By name: the arguments of the script, its timed steps, and the margin of the ratio.
STEPS = {
    "cuda": {
        "gpu_bound": ("--hidden 4096 --layers 8 --batch-size 1024", 40, 0.01),
        "python_bound": ("--hidden 64 --layers 24 --batch-size 64", 250, 0.05),
    },
    "cpu": {
        "compute_bound": ("--hidden 256 --layers 4 --batch-size 64", 50, 0.01),
        "python_bound": ("--hidden 16 --layers 8 --batch-size 4", 100, 0.05),
    },
}
ENDLESS = 10_000_000
READY_WITHIN_S = 120.0

Gates = dict[str, Path]
Runs = dict[str, "Future[list[list[int]]]"]


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
    try:
        cluster.start(chosen.world_size, "pack")
        found: dict[str, Any] = {"machine": machine(cluster), "world_size": chosen.world_size}
        for name, (arguments, steps, margin) in STEPS[chosen.device].items():
            if chosen.only not in (None, name):
                continue
            found[name] = {"arguments": arguments, "timed_steps": steps, "step_ms": {}}
            compare(cluster, found[name], margin, chosen.starts, lambda: keep(found, chosen.output))
            print(name, json.dumps(found[name]), flush=True)
    finally:
        cluster.close()


def machine(cluster: Cluster) -> dict[str, object]:
    import torch

    name = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return {
        "devices": [device.name for device in cluster.devices],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": name,
        "ray": version("ray"),
    }


def keep(found: dict[str, Any], output: Path | None) -> None:
    if output:
        output.write_text(json.dumps(found, indent=2) + "\n")


def compare(
    cluster: Cluster,
    found: dict[str, Any],
    margin: float,
    starts: int,
    after_start: Callable[[], None],
) -> None:
    """Fill in `step_ms` and, from two starts of each side on, their ratio."""
    times_ms: dict[str, list[float]] = {"torchrun": [], "raybench": []}
    sides = order(starts)
    for _ in range(starts):
        began_s = time.perf_counter()
        for side, ranks_ns in start_both(cluster, found, list(islice(sides, 2))).items():
            times_ms[side].append(round(float(statistics.median(step_series(ranks_ns))) / 1e6, 4))
        took_s = time.perf_counter() - began_s
        last = {side: times[-1] for side, times in times_ms.items()}
        print(f"{last} ms ({took_s:.1f} s)", file=sys.stderr, flush=True)
        found["step_ms"] = times_ms
        if len(times_ms["torchrun"]) > 1:
            of_torchrun = ratio(times_ms["raybench"], times_ms["torchrun"])
            verdict = agreement(of_torchrun, margin)
            found |= {"ratio": asdict(of_torchrun), "margin": margin, "is": verdict}
        after_start()


def start_both(
    cluster: Cluster, found: dict[str, Any], sides: list[str]
) -> dict[str, list[list[int]]]:
    """Start both sides together, and let them step one after the other."""
    run = {"torchrun": by_torchrun, "raybench": by_raybench}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        gates = {side: Path(folder, f"{side}.gate") for side in sides}
        runs: Runs = {
            side: pool.submit(run[side], cluster, f"{found['arguments']} --gate {gate}", found)
            for side, gate in gates.items()
        }
        try:
            wait_until_ready(gates, runs, len(cluster.devices))
            samples = {}
            for side in sides:
                gates[side].touch()
                samples[side] = runs[side].result()
            return samples
        finally:
            for gate in gates.values():
                gate.touch()  # nobody waits for ever


def wait_until_ready(gates: Gates, runs: Runs, ranks: int) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    at_gates = [gate.with_suffix(f".{rank}") for gate in gates.values() for rank in range(ranks)]
    while not all(place.exists() for place in at_gates):
        if time.monotonic() > deadline_s or any(run.done() for run in runs.values()):
            raise SystemExit(f"a side never came to its first step: {runs}")
        time.sleep(0.05)


def by_torchrun(cluster: Cluster, arguments: str, found: dict[str, Any]) -> list[list[int]]:
    world_size = len(cluster.devices)
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        own = f"{arguments} --warmup {WARMUP} --steps {found['timed_steps']} --times {times}"
        command = [*launcher, f"--nproc-per-node={world_size}", str(TRAIN), *own.split()]
        subprocess.run(command, check=True, timeout=120)
        return [json.loads(times.with_suffix(f".{rank}").read_text()) for rank in range(world_size)]


def by_raybench(cluster: Cluster, arguments: str, found: dict[str, Any]) -> list[list[int]]:
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
        {"warmup": WARMUP, "iterations": found["timed_steps"], "breakdown": False, "timeout_s": 120}
    )
    task = Task(point=point, settings=settings, precisions=None)
    answers = cluster.run(task, range(world_size))
    failures = [answer for answer in answers if not isinstance(answer, Measurement)]
    if failures:
        raise SystemExit("\n".join(f"{one.message}\n{one.detail}" for one in failures))
    return [list(answer.repetitions[0].timed.step_ns) for answer in answers]


if __name__ == "__main__":
    main()
