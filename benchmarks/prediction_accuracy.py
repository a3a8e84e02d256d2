"""Hold `raybench predict` against what was measured.

    python -m benchmarks.prediction_accuracy [-o FILE.json]

Of every run in results/examples that trains on 1, 2 and 4 GPUs of one node, the points of 4 are
hidden, and each is predicted from those of 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.common import REPOSITORY, options, write_result
from raybench.analysis.prediction import Prediction, predict
from raybench.analysis.rounds import mean_of_rounds
from raybench.analysis.rows import point_rows
from raybench.records.status import Status
from raybench.results import reader
from raybench.results.point_row import PointRow
from raybench.results.reader import run_ids

EXAMPLES = REPOSITORY / "results" / "examples"
# Trains 1,025 parameters: its steps of a millisecond wait for Python, not for the GPU.
HOST_BOUND = "linear"


def main() -> None:
    chosen = options(__doc__).parse_args()
    write_result({"held_out": held_out()}, chosen.output)


def held_out() -> dict[str, Any]:
    runs = {
        one: point_rows(reader.load_table(EXAMPLES, "points", one)) for one in run_ids(EXAMPLES)
    }
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


if __name__ == "__main__":
    main()
