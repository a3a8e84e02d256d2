"""Hold `raybench predict` against what was measured: from 1 and 2 devices, 4.

    python benchmarks/prediction_accuracy.py > docs/benchmarks/prediction-4xh200.json

Of every run in results/examples that trains on 1, 2 and 4 GPUs the points of 4 are hidden; each
is then predicted from those of 1 and 2: by the run alone, and with the all_reduces of a committed
run of collectives on 2 and 4 other devices of the same model, which take no step of training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.prediction import Network, Prediction, predict, reduce_times
from raybench.analysis.rounds import mean_of_rounds, records
from raybench.analysis.settings import setting
from raybench.errors import ResultsError
from raybench.results import reader
from raybench.results.run import run_ids

EXAMPLES = Path(__file__).resolve().parent.parent / "results" / "examples"
_FIT, _PREDICT = (1, 2), 4
_GOAL_ERROR, _GOAL_COVERAGE = 0.05, 0.90
# Trains 1,025 parameters: its steps of a millisecond wait for Python, not for the GPU.
_HOST_BOUND = "linear"


def main() -> None:
    runs = {run_id: reader.load(EXAMPLES, "points", run_id) for run_id in run_ids(EXAMPLES)}
    collectives = next(points for run_id, points in runs.items() if run_id.startswith("collective"))
    networks = {
        "by the run alone": Network(),
        "with a run of collectives on 2 and 4 devices": Network(
            times=reduce_times(records(collectives))
        ),
    }
    found = {name: list(_hold(runs, network)) for name, network in networks.items()}
    summary = {name: _summarize(rows) for name, rows in found.items()}
    print(json.dumps({"goal": _GOAL, "summary": summary, "points": found}, indent=1))


_GOAL = {"within": _GOAL_ERROR, "interval_holds": _GOAL_COVERAGE}


def _hold(runs: Mapping[str, pd.DataFrame], network: Network) -> Iterator[dict[str, Any]]:
    for run_id, points in runs.items():
        if not {*_FIT, _PREDICT} <= set(points["world_size"]) or run_id.startswith("collective"):
            continue
        known = points[points["world_size"].isin(_FIT)]
        try:
            predictions = predict(known, [_PREDICT], network)
        except ResultsError:
            continue
        hidden = points[(points["world_size"] == _PREDICT) & (points["status"] == "ok")]
        truths = records(mean_of_rounds(hidden))
        for one in predictions:
            for row in truths:
                if _is_same(row, one.measured):
                    yield _compare(run_id, one, row)


def _is_same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    names = ("workload", "precision", "batch_size", "params")
    return all(row[name] == other[name] for name in names)


def _compare(run_id: str, one: Prediction, truth: Mapping[str, Any]) -> dict[str, Any]:
    measured_ms = float(truth["step_ms_p50"])
    is_gpu_bound = truth["host_bound"] is not True and truth["workload"] != _HOST_BOUND
    return {
        "run_id": run_id,
        "workload": truth["workload"],
        "preset": setting(truth, "preset"),
        "precision": truth["precision"],
        "batch_size": int(truth["batch_size"]),
        "is_gpu_bound": is_gpu_bound,
        "predicted_ms": round(one.step_ms, 4),
        "low_ms": round(one.step_ms_low, 4),
        "high_ms": round(one.step_ms_high, 4),
        "measured_ms": round(measured_ms, 4),
        "error": round(one.step_ms / measured_ms - 1, 4),
        "is_held": one.step_ms_low <= measured_ms <= one.step_ms_high,
    }


def _summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        kind: {
            "points": len(of_kind),
            "median_error": round(float(np.median(errors)), 4),
            "worst_error": round(float(max(errors)), 4),
            "within_goal": sum(error <= _GOAL_ERROR for error in errors),
            "interval_holds": round(sum(row["is_held"] for row in of_kind) / len(of_kind), 3),
            "median_half_interval": round(float(np.median([_half(row) for row in of_kind])), 4),
        }
        for kind, of_kind in (
            ("gpu_bound", [row for row in rows if row["is_gpu_bound"]]),
            ("others", [row for row in rows if not row["is_gpu_bound"]]),
        )
        if (errors := [abs(row["error"]) for row in of_kind])
    }


def _half(row: Mapping[str, Any]) -> float:
    return float((row["high_ms"] - row["low_ms"]) / 2 / row["predicted_ms"])


if __name__ == "__main__":
    main()
