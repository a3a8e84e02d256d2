"""Hold `raybench predict` against what was measured, and against simulated steps over nodes.

    python -m benchmarks.prediction_accuracy [--starts 20] [-o FILE.json]

Held out: of every run in results/examples that trains on 1, 2 and 4 GPUs the points of 4 are
hidden, and each is predicted from those of 1 and 2.

Simulated: transformers on nodes of 8 devices with 300 GB/s inside and 45 or 12 GB/s between. The
buckets of gradients are ready evenly over the backward pass and are reduced one after the other;
computation beside them is slower by up to a tenth of their time, and starts differ by 1 %. From a
run of 1, 8 and 16 devices, the intervals for 32 and 64 should hold the true step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from benchmarks.common import REPOSITORY, options, write_result
from raybench.analysis.prediction import Prediction, predict
from raybench.analysis.rounds import mean_of_rounds
from raybench.analysis.rows import point_rows
from raybench.records import Status
from raybench.results import reader
from raybench.results.reader import run_ids
from raybench.results.tables import PointRow
from raybench.workloads.base import parameter_count

EXAMPLES = REPOSITORY / "results" / "examples"
# Trains 1,025 parameters: its steps of a millisecond wait for Python, not for the GPU.
HOST_BOUND = "linear"
TEMPLATE = "mixed_precision-20261123-100621-6924"
MODELS, COMPUTE_MS = ("124m", "350m", "1.3b"), (40.0, 100.0, 200.0, 500.0)
MEASURED, ASKED = (1, 8, 16), (32, 64)
A_NODE, INSIDE_GB_S, BETWEEN_GB_S, LATENCY_US, BUCKET = 8, 300.0, (45.0, 12.0), 30.0, 25 * 2**20


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--starts", type=int, default=20, help="simulated starts of each run")
    chosen = parser.parse_args()
    found = {"held_out": held_out(), "simulated": list(simulated(chosen.starts))}
    write_result(found, chosen.output)


def held_out() -> dict[str, Any]:
    runs = {one: point_rows(reader.load(EXAMPLES, "points", one)) for one in run_ids(EXAMPLES)}
    rows = [row for run_id, points in runs.items() for row in _hidden(run_id, points)]
    bound = [row for row in rows if not row["point"].startswith(HOST_BOUND)]
    return {"all": _summary(rows), "bound by GPUs": _summary(bound), "points": rows}


def _hidden(run_id: str, points: list[PointRow]) -> Iterator[dict[str, Any]]:
    if not {1, 2, 4} <= {row.world_size for row in points} or run_id.startswith("collective"):
        return
    names = ("workload", "precision", "batch_size", "params")
    truths = mean_of_rounds([row for row in points if row.world_size == 4])
    predictions, _ = predict([row for row in points if row.world_size < 4], [4], 4)
    for one in predictions:
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
    points = point_rows(reader.load(EXAMPLES, "points", TEMPLATE))
    template = next(row for row in points if row.status is Status.OK)
    for gb_s in BETWEEN_GB_S:
        cells: dict[int, list[dict[str, Any]]] = {}
        for rng in map(np.random.default_rng, range(starts)):
            points = [
                replace(
                    template,
                    **_step(rng, preset, compute_ms, world, gb_s),
                    **{"point_id": f"{preset}{compute_ms}{world}", "world_size": world},
                    **{"node_count": -(-world // A_NODE), "batch_size": int(compute_ms)},
                    **{"workload": "transformer", "params": {"preset": preset, "seq_len": "1024"}},
                )
                for preset, compute_ms, world in product(MODELS, COMPUTE_MS, MEASURED)
            ]
            for one in predict(points, ASKED, A_NODE)[0]:
                preset, compute_ms = one.measured.params["preset"], one.measured.batch_size or 0
                true_ms = _step(rng, preset, float(compute_ms), one.world_size, gb_s)["step_ms_p50"]
                row = _compare(f"{preset} {compute_ms} ms", one, true_ms or math.nan)
                cells.setdefault(one.world_size, []).append(row)
        for world, rows in cells.items():
            what = {"measured": max(MEASURED), "between_gb_s": gb_s, "world_size": world}
            yield {**what, **_summary(rows)}


def _reduce_ms(world: int, size_bytes: float, gb_s: float) -> float:
    nodes = -(-world // A_NODE)
    hops = math.log2(nodes) if nodes > 1 else math.log2(world) / 3
    wire_ms = 2 * (world - 1) / world * size_bytes / (gb_s if nodes > 1 else INSIDE_GB_S) / 1e6
    return LATENCY_US / 1e3 * hops + wire_ms


def _step(
    rng: np.random.Generator, preset: str, compute_ms: float, world: int, gb_s: float
) -> dict[str, Any]:
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


if __name__ == "__main__":
    main()
