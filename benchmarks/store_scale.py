"""What the tables of a big run cost: written as a sweep does, read back, listed and reported.

    python benchmarks/store_scale.py [--points 10 100 1000 10000] [-o FILE.json]

The measurements are made up: points of 1 to 8 ranks, 5 warm-up and 30 timed iterations on each,
every tenth point failed. The rows, their statistics and their files are as in a real run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from sizes import tell_sizes

import raybench
from raybench.job.model import Measure
from raybench.job.point import Point, Precision
from raybench.records import Device, Measurement, Record, Repetition, Samples, Status
from raybench.results.rows import point_row
from raybench.results.run import Run, RunStatus
from raybench.results.writer import RunStore

RUN_ID = "store-scale"
RANKS, WARMUP, ITERATIONS = 8, 5, 30
START = datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one process. time_s: its start included, but for a step, which times itself."""

    time_s: float
    memory_mib: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--points", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    options.add_argument("-o", "--output", type=Path)
    options.add_argument("--step", nargs=3, metavar=("STEP", "FOLDER", "POINTS"), help="for itself")
    chosen = options.parse_args()
    if chosen.step:
        step, folder, points = chosen.step
        STEPS[step](Path(folder), int(points))
        return
    results = [measured(count) for count in chosen.points]
    tell_sizes(results, chosen.output)


def measured(points: int) -> dict[str, float]:
    """Seconds and memory for each of the things that are done to a run of so many points."""
    with tempfile.TemporaryDirectory() as folder:
        costs = {name: process(__file__, "--step", name, folder, str(points)) for name in STEPS} | {
            arguments[0]: process("-m", "raybench", *arguments, "--results", folder)
            for arguments in (["list"], ["report"], ["show", RUN_ID])
        }
        load = os.getloadavg()[0]  # ours is about 1 of it: more, and others slowed us down
        size_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
    return {
        "points": points,
        **{f"{name}_s": cost.time_s for name, cost in costs.items()},
        "write_and_load_s": costs["write"].time_s + costs["load"].time_s,
        **{f"{name}_mib": cost.memory_mib for name, cost in costs.items()},
        "files_mib": size_bytes / 2**20,
        "load_1min": load,
    }


def process(*arguments: str) -> Cost:
    """Measure what a Python process costs; of a step, the seconds that it prints."""
    started_s = time.perf_counter()
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    output = child.stdout.read()
    # Not RUSAGE_CHILDREN, which is the largest of all children so far.
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - started_s
    assert child.returncode == 0, arguments
    time_s = float(output) if "--step" in arguments else wall_s
    return Cost(time_s=time_s, memory_mib=usage.ru_maxrss / 2**10)


def write_all(root: Path, points: int) -> None:
    templates = [record(world_size) for world_size in range(1, RANKS + 1)]
    measure = Measure(warmup=WARMUP, iterations=ITERATIONS)
    store = RunStore.create(root, run(points), measure)
    store.write_records([(0, templates[0])])  # imports what it needs
    print_seconds(lambda: write(store, templates, points))


def number_all(_: Path, points: int) -> None:
    """Time the part of writing that computes the rows' figures, again and alone."""
    templates = [record(world_size) for world_size in range(1, RANKS + 1)]
    measure = Measure(warmup=WARMUP, iterations=ITERATIONS)
    measured = [index % RANKS for index in range(points) if index % 10 != 9]
    point_row(RUN_ID, templates[0], measure)
    print_seconds(lambda: [point_row(RUN_ID, templates[rank], measure) for rank in measured])


def load_all(root: Path, points: int) -> None:
    raybench.load(root, "runs")  # imports what it needs
    print_seconds(lambda: [raybench.load(root, table) for table in ("points", "samples")])
    assert len(raybench.load(root, "runs")) == 1
    assert len(raybench.load(root, "points")) == points


def pandas_all(root: Path, _: int) -> None:
    import pandas as pd

    pd.read_parquet(root / "runs")
    print_seconds(lambda: [pd.read_parquet(root / table) for table in ("points", "samples")])


STEPS = {"write": write_all, "figures": number_all, "load": load_all, "pandas": pandas_all}


def print_seconds(act: Callable[[], object]) -> None:
    started_s = time.perf_counter()
    act()
    print(time.perf_counter() - started_s)


def write(store: RunStore, templates: Sequence[Record], points: int) -> None:
    for index in range(points):
        template = templates[index % RANKS]
        made = replace(template, point=point(index, template.point.world_size))
        store.write_records([(index, failed(made) if index % 10 == 9 else made)])


def failed(made: Record) -> Record:
    return replace(
        made,
        status=Status.ERROR,
        measurements=(),
        error_type="ValueError",
        error_message="rank 0 (alpha, cuda:0): no",
        error_rank=0,
        error_detail="a line of a traceback\n" * 30,
    )


def point(index: int, world_size: int) -> Point:
    return Point(
        workload="mlp",
        params={"hidden": 4096, "layers": 8},
        world_size=world_size,
        precision=Precision.BF16,
        batch_size=index + 1,
        global_batch_size=(index + 1) * world_size,
        scaling="weak",
    )


def record(world_size: int) -> Record:

    rng = np.random.default_rng(world_size)
    return Record(
        point=point(0, world_size),
        attempt=1,
        status=Status.OK,
        started_at=START,
        duration_s=1.0,
        devices=tuple(map(device, range(world_size))),
        measurements=tuple(
            Measurement(
                rank=rank,
                repetitions=(
                    Repetition(warmup=samples(rng, WARMUP), timed=samples(rng, ITERATIONS)),
                ),
                items_per_step=64,
                setup_s=0.1,
            )
            for rank in range(world_size)
        ),
    )


def samples(rng: Any, count: int) -> Samples:

    step_ns = (8e6 * (1 + 1e-3 * rng.standard_normal(count))).astype(int).tolist()
    start_ns = [0, *np.cumsum(step_ns)[:-1].tolist()]
    return Samples(start_ns=tuple(start_ns), step_ns=tuple(step_ns), host_ns=tuple(step_ns))


def device(index: int) -> Device:
    return Device(
        kind="cuda",
        node_id="node",
        host="alpha",
        address="10.0.0.1",
        index=index,
        uuid=f"GPU-{index}",
        name="made up",
        process_id=index + 1,
        cpu_count=8,
        niceness=0,
        omp_num_threads=1,
    )


def run(points: int) -> Run:
    return Run(
        run_id=RUN_ID,
        job_name="store_scale",
        job_text="version: 1\n",
        job_sha256="0" * 64,
        argv=("raybench",),
        status=RunStatus.OK,
        started_at=START,
        finished_at=START,
        points_total=points,
        baseline={"world_size": 1},
        cluster="none",
        host="alpha",
        versions={},
        environment={},
        tags={},
    )


if __name__ == "__main__":
    main()
