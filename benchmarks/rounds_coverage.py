"""Do the intervals of step times and speed-ups hold the level over starts?

    python benchmarks/rounds_coverage.py [--runs 200] [-o FILE.json]

Simulated runs of 36 points (1, 2, 4 GPUs; three precisions whose starts scatter by 0.31 % and one,
fp16, by 1.05 %; a shift of 0.3 % common to each round; 0.2 % left open by the samples) go through
the functions that make a report. The standard deviations are those that two runs of ddp_scaling on
4 H200s fit: docs/benchmarks/same-twice-4xh200.json. Beside the report's interval stands that of the
samples alone, which is what one start tells.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.rounds import mean_of_rounds
from raybench.analysis.scaling import scaling
from raybench.analysis.start_noise import ratio_range
from raybench.results.schema import units

ROUNDS = (1, 2, 3, 5)
STARTS = {"fp32": 0.0031, "tf32": 0.0031, "bf16": 0.0031, "fp16": 0.0105}
COMMON = 0.003
WITHIN = 0.002
BASELINE = {"world_size": 1}
LEVEL_MS = 10.0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=200)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    rng = np.random.default_rng(20261122)
    result = {rounds: simulated(rng, rounds, chosen.runs) for rounds in ROUNDS}
    print(pd.DataFrame(result).T.to_string(float_format="%.3f"))
    if chosen.output:
        table = {"runs": chosen.runs, "rounds": result}
        chosen.output.write_text(json.dumps(table, indent=2) + "\n")


def simulated(rng: np.random.Generator, rounds: int, runs: int) -> dict[str, float]:
    """Coverage and half widths of speed-ups and step times, GPU-bound and in fp16."""
    seen: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(runs):
        points = run_of(rng, rounds)
        for row in scaling(points, BASELINE).to_dict("records"):
            kind = "fp16" if row["precision"] == "fp16" else "gpu_bound"
            note(seen, f"step_{kind}", row, "step_ms", LEVEL_MS)
            if row["world_size"] > 1:
                note(seen, f"speed_up_{kind}", row, "speed_up", row["world_size"])
        of_samples(seen, points)
    return {name: round(float(np.mean(values)), 4) for name, values in sorted(seen.items())}


def note(seen: dict[str, list[float]], name: str, row: Any, column: str, level: float) -> None:
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    seen[f"{name}_covered"].append(low <= level <= high)
    seen[f"{name}_half_width"].append(math.log(high / low) / 2)


def of_samples(seen: dict[str, list[float]], points: pd.DataFrame) -> None:
    """How often the interval of the samples alone holds the speed-up."""
    rows = mean_of_rounds(points).to_dict("records")
    bases = {(row["precision"], row["batch_size"]): row for row in rows if row["world_size"] == 1}
    for row in rows:
        base = bases[row["precision"], row["batch_size"]]
        around = ratio_range(base, row)
        if row is not base and around is not None:
            ratio = base["step_ms_p50"] / row["step_ms_p50"]
            kind = "fp16" if row["precision"] == "fp16" else "gpu_bound"
            covered = ratio * around[0] <= 1 <= ratio * around[1]
            seen[f"samples_alone_{kind}_covered"].append(covered)


def run_of(rng: np.random.Generator, rounds: int) -> pd.DataFrame:
    """Rows of `points`: every true step time is LEVEL_MS, so the speed-up is the world size."""
    rows = []
    for number in range(1, rounds + 1):
        common = rng.normal(0, COMMON)
        for world_size in (1, 2, 4):
            for precision, scatter in STARTS.items():
                for batch in (64, 256, 1024):
                    error = common + rng.normal(0, scatter) + rng.normal(0, WITHIN / 2)
                    point = (world_size, precision, batch)
                    rows.append(row_of(point, number, LEVEL_MS * math.exp(error)))
    return pd.DataFrame(rows)


def row_of(point: tuple[int, str, int], number: int, step_ms: float) -> dict[str, Any]:
    world_size, precision, batch = point
    unknown = dict.fromkeys(UNKNOWN)
    return unknown | {
        "run_id": "simulated",
        "point_id": f"{precision}-{batch}-{world_size}",
        "attempt": number,
        "round": number,
        "control_of": None,
        "status": "ok",
        "workload": "mlp",
        "params": {},
        "device_type": "cuda",
        "device_name": "simulated",
        "world_size": world_size,
        "precision": precision,
        "scaling": "weak",
        "batch_size": batch,
        "global_batch_size": batch * world_size,
        "step_ms_p50": step_ms,
        "step_ms_ci_low": step_ms * math.exp(-WITHIN),
        "step_ms_ci_high": step_ms * math.exp(WITHIN),
        "throughput": batch * world_size / step_ms,
    }


# What `scaling` looks at besides.
UNKNOWN = tuple(units("points"))


if __name__ == "__main__":
    main()
