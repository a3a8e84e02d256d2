"""How well the steps of slow devices among fast ones are predicted, and the best shares with them.

    python benchmarks/uneven_predictions.py [RUN_FOLDER ...] [--ranks 2 4] [-o FILE.json]

Of runs of jobs/uneven_gpus.yaml, given by their folder in `runs`; without any, the job is swept on
CPU workers of this machine first, cut to them: 15 points for each number of ranks, the last of
which is slow, in three minutes each. The machine must be idle. Four workers on two cores share
them, and one that waits leaves its core to another, which no step of a device alone tells of.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import raybench
from raybench.analysis.rounds import records
from raybench.analysis.scaling import scaling
from raybench.analysis.uneven import Fleet, fleets

JOB = Path(__file__).parents[1] / "jobs" / "uneven_gpus.yaml"
CUT = {
    "workload.hidden": "512",
    "workload.layers": "4",
    "workload.grad_accumulation": "1",
    "matrix.batch_size": "256",
    "matrix.precision": "fp32",
    "placement.oversubscribe": "true",
    "measure.min_seconds": "3",
    "measure.max_seconds": "8",
}
# As far off as predictions may be.
WANTED = 0.05


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("runs", type=Path, nargs="*", metavar="RUN_FOLDER")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = chosen.runs or [sweep(ranks, Path(folder)) for ranks in chosen.ranks]
        cells = [cell for run in runs for fleet in fleets_of(run) for cell in cells_of(fleet)]
    for cell in cells:
        print(
            f"{cell['ranks']} ranks, asked {cell['slow_ratio']:<5g} {cell['shares']:<22}"
            f"predicted {cell['predicted_ms']:9.2f} ms, measured {cell['measured_ms']:9.2f} ms"
            f" ({cell['error']:+.1%}), fast ones idle {cell['idle_share_of_fast']:.1%}"
            f"{', called best' * cell['is_called']}{', is best' * cell['is_best']}"
            f"{', may be as good' * cell['may_be_best']}"
        )
    summary = summarize(cells)
    for name, value in summary.items():
        print(f"{name:40} {value:.3f}" if isinstance(value, float) else f"{name:40} {value}")
    if chosen.output:
        chosen.output.write_text(json.dumps({**summary, "cells": cells}, indent=2) + "\n")


def sweep(ranks: int, folder: Path) -> Path:
    """Sweep the job on CPU workers; the folder of the run in `runs`."""
    settings = {**CUT, "matrix.world_size": str(ranks)}
    overrides = [text for name, value in settings.items() for text in ("--set", f"{name}={value}")]
    output = folder / str(ranks)
    command = [sys.executable, "-m", "raybench", "sweep", str(JOB), "-o", str(output)]
    command += ["--address", "local", "--device", "cpu", *overrides]
    # More threads than cores would let the ranks wait for each other inside of a product.
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": threads})
    (run,) = (output / "runs").iterdir()
    return run


def fleets_of(run: Path) -> list[Fleet]:
    """Find the fleets of a run that lies in <results>/runs/<run_id>."""
    points = raybench.load(run.parents[1], "points", run.name)
    return fleets(records(scaling(points, {"shares": "equal"})))


def cells_of(fleet: Fleet) -> Iterator[dict[str, object]]:
    """Yield predicted and measured step of each scenario, and whether it was called best."""
    for name, scenario in fleet.scenarios.items():
        yield {
            "ranks": int(fleet.first["world_size"]),
            "slow_ratio": fleet.slow_ratio,
            "measured_ratio": fleet.probe_ratio,
            "shares": name,
            "predicted_ms": float(scenario.row["predicted_step_ms"]),
            "measured_ms": float(scenario.row["step_ms_p50"]),
            "error": scenario.prediction_error,
            "idle_share_of_fast": scenario.idle_share_of_fast or 0.0,
            "is_called": scenario is fleet.predicted_best,
            "is_best": scenario is fleet.best,
            "may_be_best": name in fleet.as_good(),
        }


def summarize(cells: list[dict[str, object]]) -> dict[str, object]:
    """Say what an issue of this repository asks of predictions."""
    called = [cell for cell in cells if cell["is_called"]]
    right = [cell for cell in called if cell["is_best"] or cell["may_be_best"]]
    errors = [abs(float(str(cell["error"]))) for cell in cells]
    idle = [float(str(c["idle_share_of_fast"])) for c in cells if c["shares"] == "by_speed"]
    return {
        "scenarios": len(cells),
        "largest error of a predicted step": max(errors),
        f"predicted to within {WANTED:.0%}": sum(error <= WANTED for error in errors),
        "fleets": len(called),
        "called best and is, or may be": len(right),
        "largest idle share by_speed": max(idle, default=0.0),
    }


if __name__ == "__main__":
    main()
