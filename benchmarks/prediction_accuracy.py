"""Hold `raybench predict` against what was measured, and against simulated steps over two networks.

    python -m benchmarks.prediction_accuracy [--starts 20] [-o FILE.json]

Held out: of every run in results/examples that trains on 1, 2 and 4 GPUs the points of 4 are
hidden, and each is predicted from those of 1 and 2: by the run alone, and with the all_reduces of a
committed run of collectives on other devices of the same model.

Simulated: transformers on nodes of 8 devices with 300 GB/s inside and 45 or 12 GB/s between. The
buckets of gradients are ready evenly over the backward pass and are reduced one after the other;
computation beside them is slower by up to a tenth of their time, and starts differ by 1 %. A run of
1 and 2 devices, or of up to 8, is written as Parquet. The command must refuse 64 and 512 devices
without a network, and with the right one its intervals should hold the true step.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import REPOSITORY, options, write_result
from raybench.analysis.prediction import Network, Prediction, predict, reduce_times
from raybench.analysis.rounds import mean_of_rounds
from raybench.analysis.rows import point_rows
from raybench.records import Status
from raybench.results import reader
from raybench.results.point_row import PointRow
from raybench.results.run import run_ids
from raybench.stats.communication import Link, ReduceTimes, wire_factor
from raybench.workloads.base import parameter_count

EXAMPLES = REPOSITORY / "results" / "examples"
# Trains 1,025 parameters: its steps of a millisecond wait for Python, not for the GPU.
HOST_BOUND = "linear"
TEMPLATE = "mixed_precision-20261123-100621-6924"
MODELS, COMPUTE_MS, ASKED = ("124m", "350m", "1.3b"), (40.0, 100.0, 200.0, 500.0), (64, 512)
A_NODE, INSIDE_GB_S, BETWEEN_GB_S, LATENCY_US, BUCKET = 8, 300.0, (45.0, 12.0), 30.0, 25 * 2**20


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--starts", type=int, default=20, help="simulated starts of each run")
    chosen = parser.parse_args()
    found = {"held_out": dict(held_out()), "simulated": list(simulated(chosen.starts))}
    write_result(found, chosen.output)


def held_out() -> Iterator[tuple[str, Any]]:
    runs = {one: point_rows(reader.load(EXAMPLES, "points", one)) for one in run_ids(EXAMPLES)}
    collectives = next(points for run_id, points in runs.items() if run_id.startswith("collective"))
    alone = Network(devices_per_node=4)
    measured = Network(devices_per_node=4, times=reduce_times(collectives))
    for name, network in (("run alone", alone), ("with collectives", measured)):
        rows = [row for run_id, points in runs.items() for row in _hidden(run_id, points, network)]
        bound = [row for row in rows if not row["point"].startswith(HOST_BOUND)]
        yield name, {"all": _summary(rows), "bound by GPUs": _summary(bound), "points": rows}


def _hidden(run_id: str, points: list[PointRow], network: Network) -> Iterator[dict[str, Any]]:
    if not {1, 2, 4} <= {row.world_size for row in points} or run_id.startswith("collective"):
        return
    names = ("workload", "precision", "batch_size", "params")
    truths = mean_of_rounds([row for row in points if row.world_size == 4])
    for one in predict([row for row in points if row.world_size < 4], [4], network):
        for row in truths:
            is_same = all(getattr(row, name) == getattr(one.measured, name) for name in names)
            if row.status is Status.OK and row.step_ms_p50 and is_same:
                label = f"{row.workload} {row.precision} {row.batch_size} {run_id}"
                yield _compare(label, one, row.step_ms_p50)


def _compare(point: str, one: Prediction, true_ms: float) -> dict[str, Any]:
    return {
        "point": point,
        "error": round(one.step_ms / true_ms - 1, 4),
        "half": round(one.half_interval, 4),
        "is_held": one.step_ms_low <= true_ms <= one.step_ms_high,
        "is_above_1": one.efficiency_high > max(1.0, one.measured_efficiency),
    }


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    errors, halves = ([abs(row[name]) for row in rows] for name in ("error", "half"))
    return {
        "points": len(rows),
        "held": round(float(np.mean([row["is_held"] for row in rows])), 3),
        "half_median": round(float(np.median(halves)), 3),
        "half_most": round(max(halves), 3),
        "error_median": round(float(np.median(errors)), 4),
        "error_95th": round(float(np.quantile(errors, 0.95)), 4),
        "error_most": round(max(errors), 4),
        "efficiency_above_1": sum(row["is_above_1"] for row in rows),
    }


def simulated(starts: int) -> Iterator[dict[str, Any]]:
    for measured, gb_s in product(((1, 2), (1, 2, 4, 8)), BETWEEN_GB_S):
        link = Network(devices_per_node=A_NODE, link=Link(bus_gb_s=gb_s, latency_us=LATENCY_US))
        run = Network(devices_per_node=A_NODE, between=_all_reduces(2 * A_NODE, gb_s))
        kinds = [("figures", link, world) for world in ASKED]
        kinds += [("run on 2 nodes", run, world) for world in ASKED]
        if max(measured) < A_NODE:
            kinds.append(("none, in the node", Network(devices_per_node=A_NODE), A_NODE))
        refusal = ""
        cells: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for seed in range(starts):
            rng = np.random.default_rng(seed)
            with tempfile.TemporaryDirectory() as folder:
                _write(Path(folder), rng, measured, gb_s)
                refusal = refusal or _refusal(folder)
                points = point_rows(reader.load(Path(folder), "points", TEMPLATE))
            for kind, network, world in kinds:
                for one in predict(points, [world], network):
                    preset, compute_ms = (
                        one.measured.params["preset"],
                        one.measured.batch_size or 0,
                    )
                    true_ms = _step(rng, preset, float(compute_ms), world, gb_s)["step_ms_p50"]
                    row = _compare(f"{preset} {compute_ms} ms", one, true_ms)
                    cells.setdefault((kind, world), []).append(row)
        for (kind, world), rows in cells.items():
            what = {"measured": max(measured), "between_gb_s": gb_s, "network": kind}
            yield {**what, "world_size": world, **_summary(rows), "refused_without": refusal}


def _refusal(folder: str) -> str:
    """Return the line on stderr of the real command. Raises AssertionError where it predicts."""
    asked = ["--world-size", ",".join(map(str, ASKED)), "--results", folder]
    command = [sys.executable, "-m", "raybench", "predict", TEMPLATE, *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 2 or done.stderr.count("\n") != 1:
        raise AssertionError(done)
    return done.stderr.strip()


def _all_reduces(world: int, gb_s: float) -> ReduceTimes:
    sizes = [2.0**exponent for exponent in range(10, 30, 2)]
    return ReduceTimes(by_world={world: [(size, _reduce_ms(world, size, gb_s)) for size in sizes]})


def _reduce_ms(world: int, size_bytes: float, gb_s: float) -> float:
    nodes = -(-world // A_NODE)
    hops = math.log2(nodes) if nodes > 1 else math.log2(world) / 3
    wire_ms = wire_factor(world) * size_bytes / (gb_s if nodes > 1 else INSIDE_GB_S) / 1e6
    return LATENCY_US / 1e3 * hops + wire_ms


def _step(
    rng: np.random.Generator, preset: str, compute_ms: float, world: int, gb_s: float
) -> dict[str, float | None]:
    """Simulate a start: its step and parts in ms. The optimizer takes a twentieth of computing."""
    backward_ms, rest_ms = compute_ms * 0.95 * 2 / 3, compute_ms * (1 - 0.95 * 2 / 3)
    gradients = 4.0 * parameter_count("transformer", {"preset": preset, "seq_len": "1024"})
    buckets = math.ceil(gradients / BUCKET)
    comm_ms = 0.0 if world == 1 else buckets * _reduce_ms(world, gradients / buckets, gb_s)
    contention_ms = rng.uniform(0, 0.1) * min(comm_ms, backward_ms)
    ready_ms = (backward_ms + contention_ms) * np.arange(1, buckets + 1) / buckets
    ends_ms = max(ready_ms + comm_ms * np.arange(buckets, 0, -1) / buckets)
    # All of a start is faster or slower: what it computes too.
    start = math.exp(0.01 * rng.standard_normal())
    step_ms, compute_ms = start * float(ends_ms + rest_ms), start * compute_ms
    return {
        **{"step_ms_p50": step_ms, "step_ms_mean": step_ms, "local_step_ms": compute_ms},
        **{"step_ms_ci_low": 0.998 * step_ms, "step_ms_ci_high": 1.002 * step_ms},
        **{"compute_ms": 0.95 * compute_ms, "optimizer_ms": 0.05 * compute_ms, "host_gap_ms": 0.0},
        "comm_ms": comm_ms if world > 1 else None,
        "comm_exposed_ms": step_ms - compute_ms if world > 1 else None,
    }


def _write(folder: Path, rng: np.random.Generator, worlds: Sequence[int], gb_s: float) -> None:
    """Write a run like the committed one; its batch size stands for how long it computes."""
    for table in ("runs", "devices"):
        shutil.copytree(EXAMPLES / table / TEMPLATE, folder / table / TEMPLATE)
    (devices,) = (folder / "devices" / TEMPLATE).iterdir()
    known = pq.read_table(devices)
    pq.write_table(pa.concat_tables([known.slice(0, 1)] * A_NODE), devices)
    (part,) = (EXAMPLES / "points" / TEMPLATE).iterdir()
    old = pq.read_table(part)
    template = [row for row in old.to_pylist() if row["status"] == "ok"][-1]
    template["params"] = [one for one in template["params"] if one[0] != "preset"]
    rows = [
        {
            **template,
            **_step(rng, preset, compute_ms, world, gb_s),
            **{"point_id": f"{preset}{compute_ms}{world}", "world_size": world},
            **{"batch_size": int(compute_ms), "params": [*template["params"], ("preset", preset)]},
        }
        for preset, compute_ms, world in product(MODELS, COMPUTE_MS, worlds)
    ]
    (folder / "points" / TEMPLATE).mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, old.schema), folder / "points" / TEMPLATE / part.name)


if __name__ == "__main__":
    main()
