"""What the tables of a big run cost: written as a sweep does, read back, listed and reported.

    python -m benchmarks.store_scale [--points 10 100 1000] [--samples 240] [-o FILE.json]

The measurements are made up: points of 1, 2, 4 and 8 ranks that share --samples timed steps of a
point, four precisions, eight batch sizes, and as many widths as it takes; every tenth point
is out of memory, and each of eight devices has an hour of telemetry. The rows, their statistics and
their files are as in a real run. Each command is a process of its own, with the start of Python.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import raybench
from benchmarks.common import options, write_result
from benchmarks.made_up import START, WARMUP, devices, measurement, run, telemetry
from raybench.job.model import Measure
from raybench.job.point import Point, Precision
from raybench.records.measurement import Measurement
from raybench.records.record import Record
from raybench.records.status import Status
from raybench.results.writer import RunStore

RUN_ID = "store-scale"
WORLD_SIZES, SECONDS = (1, 2, 4, 8), 3600
DEVICES = devices(1)
COMMANDS = {
    "list": ["list"],
    "show": ["show", RUN_ID],
    "report": ["report"],
    **{f"report {kind}": ["report", "--format", kind, "-o", os.devnull] for kind in ("md", "html")},
}
MEASURING = """\
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--points", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--samples", type=int, default=240, help="of a point")
    chosen = parser.parse_args()
    sizes = [measured(points, chosen.samples) for points in chosen.points]
    for name in sizes[0]:
        print(f"{name:20}" + "".join(f"{size[name]:>12.4g}" for size in sizes))
    if chosen.output:
        write_result({"samples_per_point": chosen.samples, "sizes": sizes}, chosen.output)


def measured(points: int, samples: int) -> dict[str, float]:
    """Return seconds and MiB of memory for each of the things that are done to a run."""
    with tempfile.TemporaryDirectory() as folder:
        found = {"points": points, "write_s": write_s(Path(folder), points, samples)}
        started_s = time.perf_counter()
        assert len(raybench.load(folder, "points")) == points
        raybench.load(folder, "samples")
        found["load_s"] = time.perf_counter() - started_s
        for name, words in COMMANDS.items():
            command = [sys.executable, "-m", "raybench", *words, "--results", folder]
            found[f"{name}_s"], found[f"{name}_mib"] = cost(command)
        size_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
    return {**found, "files_mib": size_bytes / 2**20}


def cost(command: list[str]) -> tuple[float, float]:
    """Return the seconds and the most MiB of a process."""
    started_s = time.perf_counter()
    # By a small process: what is forked from this one counts its memory too.
    measuring = [sys.executable, "-I", "-S", "-c", MEASURING, *command]
    done = subprocess.run(measuring, check=True, stdout=subprocess.PIPE, text=True)
    return time.perf_counter() - started_s, float(done.stdout) / 2**10


def write_s(root: Path, points: int, samples: int) -> float:
    """Write a run; how long its rows took."""
    store = RunStore.create(root, run(RUN_ID, points), Measure(warmup=WARMUP, iterations=30))
    store.write_devices(DEVICES)
    made = records(points, samples)
    first = (0, next(made))
    store.write_records([first])  # imports what it needs
    store.write_telemetry([first], list(telemetry(DEVICES, range(SECONDS))))
    started_s = time.perf_counter()
    for index, record in enumerate(made, 1):
        store.write_records([(index, record)])
    return time.perf_counter() - started_s


def records(points: int, samples: int) -> Iterator[Record]:
    """Make what a sweep keeps of its points."""
    measured = {
        size: tuple(measurement(rank, samples // size) for rank in range(size))
        for size in WORLD_SIZES
    }
    widths = range(1, points // 128 + 2)
    settings = itertools.product(widths, list(Precision)[:4], range(8), WORLD_SIZES)
    for index, (width, precision, batch, size) in zip(range(points), settings, strict=False):
        yield Record(
            point=Point(
                workload="mlp",
                params={"hidden": 256 * width, "layers": 8},
                world_size=size,
                precision=precision,
                batch_size=2**batch,
                global_batch_size=2**batch * size,
                scaling="weak",
            ),
            attempt=1,
            started_at=START + timedelta(seconds=index),
            duration_s=1.0,
            devices=DEVICES[:size],
            **outcome(index, measured[size]),
        )


def outcome(index: int, measured: Sequence[Measurement]) -> dict[str, Any]:
    """Return how a point ended: every tenth ran out of memory."""
    if index % 10 != 9:
        return {"status": Status.OK, "measurements": measured}
    return {
        "status": Status.OOM,
        "error_type": "OutOfMemoryError",
        "error_message": "rank 0 (alpha, cuda:0): no",
        "error_rank": 0,
        "error_detail": "a line of a traceback\n" * 30,
    }


if __name__ == "__main__":
    main()
