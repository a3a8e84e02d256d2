"""What the page of a big run costs: `raybench report --format html` as a process of its own.

    python benchmarks/page_scale.py [--points 10 100 1000] [--format html md] [-o FILE.json]

Two cores of a larger machine: `taskset -c 2,3 python ...`.

The measurements are made up: 10,000 samples for each point, on 1 to 8 ranks, four precisions,
eight batch sizes, eight widths, an hour of telemetry of eight devices, and every twentieth point
out of memory. The rows, their statistics and their files are as in a real run.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sizes import tell_sizes
from store_scale import RUN_ID, START, Cost, process, record, run

from raybench.job.model import Measure
from raybench.job.point import Point, Precision
from raybench.records import Record, Status
from raybench.results.schema import schema
from raybench.results.writer import RunStore

SAMPLES, DEVICES, SECONDS = 10_000, 8, 3600
WORLD_SIZES = (1, 2, 4, 8)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--points", type=int, nargs="+", default=[10, 100, 1000])
    options.add_argument("--format", nargs="+", default=["html", "terminal", "md"])
    options.add_argument("--keep", type=Path, help="write the last page here")
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    results = [measured(count, chosen.format, chosen.keep) for count in chosen.points]
    tell_sizes(results, chosen.output, samples_per_point=SAMPLES)


def measured(points: int, formats: list[str], keep: Path | None) -> dict[str, float]:
    """Seconds and memory of the whole process for each format, and the size of what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), points)
        page = keep or Path(folder) / "page"
        found: dict[str, float] = {"points": points, "samples": points * SAMPLES}
        for kind in reversed(formats):
            cost: Cost = process(
                *("-m", "raybench", "report", "--results", folder),
                *("--format", kind, "-o", str(page)),
            )
            found |= {f"{kind}_s": cost.time_s, f"{kind}_mib": cost.memory_mib}
            found[f"{kind}_kib"] = page.stat().st_size / 2**10
    return found


def write(root: Path, points: int) -> None:
    templates = {size: record(size) for size in WORLD_SIZES}
    store = RunStore.create(root, run(points), Measure(warmup=5, iterations=30))
    store.write_devices(templates[DEVICES].devices)
    rng = np.random.default_rng(1)
    settings = itertools.product(range(8), list(Precision)[:4], range(8), WORLD_SIZES)
    for index, (width, precision, batch, world_size) in zip(range(points), settings, strict=False):
        made = replace(
            templates[world_size],
            point=point(width, precision, 2**batch, world_size),
            started_at=START + timedelta(seconds=index),
        )
        if index % 20 == 19:
            made = replace(made, status=Status.OOM, measurements=(), error_message="out of memory")
        store.write_records([(index, made)])
        if made.measurements:
            write_samples(root, index, made, rng)
    write_telemetry(root, rng)


def point(width: int, precision: Precision, batch: int, world_size: int) -> Point:
    return Point(
        workload="mlp",
        params={"hidden": 256 * (width + 1), "layers": 8},
        world_size=world_size,
        precision=precision,
        batch_size=batch,
        global_batch_size=batch * world_size,
        scaling="weak",
    )


def write_samples(root: Path, index: int, made: Record, rng: np.random.Generator) -> None:
    """Many samples in place of the few that the record has."""
    ranks, count = made.point.world_size, SAMPLES // made.point.world_size
    steps = 8e6 * (1 + 0.01 * rng.standard_gamma(2.0, (ranks, count)))
    columns = {
        "run_id": [RUN_ID] * SAMPLES,
        "point_id": [made.point.point_id] * SAMPLES,
        "attempt": np.ones(SAMPLES, int),
        "repeat": np.zeros(SAMPLES, int),
        "rank": np.repeat(np.arange(ranks), count),
        "iteration": np.tile(np.arange(count), ranks),
        "is_warmup": np.zeros(SAMPLES, bool),
        "start_ns": np.cumsum(steps, axis=1).ravel().astype(int),
        "step_ns": steps.ravel().astype(int),
        "host_ns": (steps / 3).ravel().astype(int),
    }
    [path] = (root / "samples" / RUN_ID).glob(f"{index:05d}-*.parquet")
    write_table(path, "samples", columns)


def write_telemetry(root: Path, rng: np.random.Generator) -> None:
    count = DEVICES * SECONDS
    columns = {
        "run_id": [RUN_ID] * count,
        "node_id": ["node"] * count,
        "index": np.tile(np.arange(DEVICES), SECONDS),
        "time": [START + timedelta(seconds=s) for s in range(SECONDS) for _ in range(DEVICES)],
        "sm_clock_mhz": rng.integers(1700, 1980, count),
        "power_w": rng.normal(500, 50, count),
        "temperature_c": rng.normal(50, 5, count),
        "gpu_utilization_pct": rng.uniform(0, 100, count),
    }
    folder = root / "telemetry" / RUN_ID
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / "00000.parquet", "telemetry", columns)


def write_table(path: Path, table: str, columns: dict[str, object]) -> None:
    whole = schema(table)
    size = len(next(iter(columns.values())))  # type: ignore[arg-type]
    arrays = [
        pa.array(columns[field.name], type=field.type)
        if field.name in columns
        else pa.nulls(size, field.type)
        for field in whole
    ]
    pq.write_table(pa.Table.from_arrays(arrays, schema=whole), path, compression="zstd")


if __name__ == "__main__":
    main()
