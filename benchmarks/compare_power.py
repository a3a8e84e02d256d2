"""How often `raybench compare` is wrong where nothing changed, and finds what did, in simulation.

    python benchmarks/compare_power.py [--runs 200] [--processes 2] [-o FILE.json]

Two runs of 36 points or of one: step times with AR(1) noise of 1 % (`phi`: lag-1 correlation), and
1 % of outliers. Each start of a point has a level of its own, with a standard deviation of 0 or of
0.38 % (which gives the median difference of 0.36 % of the A/A pair on H200s), or with heavy tails
(Student's t with 3 degrees of freedom and the same median), or three times as wide as that. Then
none, one, a quarter or all of the points become 3 % slower. With `again` 1, 2 or 4 either run has
as many more of the same job. Of comparisons of 36 points with no change there are --runs.

comparisons_with_a_false_verdict: share of the comparisons, of whole runs, in which a point that did
not change is called faster or slower. false: share of such points. found: share of the changed
points that are called slower.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raybench.analysis.compare import FASTER, SLOWER, compare
from raybench.analysis.measured_runs import Measured, Other

SCENE = ("points", "again", "phi", "starts", "changed")
POINTS = 36
# What the adaptive measuring takes at this noise, see docs/benchmarks/simulated-noise.json.
SAMPLES = {0.0: 31, 0.5: 54, 0.8: 127}
START = datetime(2026, 11, 1, tzinfo=UTC)
STEP_MS = 5.0
NOISE = 0.01
START_SD = 0.0038
CHANGE = 0.03
NONE, NORMAL, HEAVY, LOUD = "none", "normal", "heavy tails", "3 x heavy tails"
STARTS = (NONE, NORMAL, HEAVY)
# The median of |t| with 3 degrees of freedom over that of |z|.
_HEAVY = 0.765 / 0.674


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=200)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    rows = []
    scenes = [
        *product((POINTS,), (0, 2), (0.5,), STARTS, (0, 1, POINTS)),
        *product((POINTS,), (0, 2), (0.5,), (NONE, NORMAL), (POINTS // 4,)),
        *product((POINTS,), (1,), (0.5,), (NORMAL, HEAVY), (0, 1)),
        *product((POINTS,), (4,), (0.5,), (NORMAL, HEAVY), (1,)),
        *product((POINTS,), (0, 2), (0.5,), (LOUD,), (0,)),
        *product((1,), (0, 2), (0.5,), STARTS, (0, 1)),
        *product((POINTS,), (0,), (0.0, 0.8), (NONE,), (0, POINTS)),
    ]
    with ProcessPoolExecutor(chosen.processes) as pool:
        answers = pool.map(simulated, *zip(*[(chosen.runs, *s) for s in scenes], strict=True))
        for scene, answer in zip(scenes, answers, strict=True):
            rows.append(dict(zip(SCENE, scene, strict=True)) | answer)
            print(rows[-1], flush=True)
    if chosen.output:
        content = {"runs": chosen.runs, "change": CHANGE, "rows": rows}
        chosen.output.write_text(json.dumps(content, indent=2) + "\n")


def simulated(
    runs: int, points: int, again: int, phi: float, starts: str, changed: int
) -> dict[str, Any]:
    """Shares of false and found verdicts, and over how many comparisons they were counted."""
    rng = np.random.default_rng(7)
    count = comparisons(runs, points, changed)
    whole = [verdicts(rng, points, again, phi, starts, changed) for _ in range(count)]
    wrong = np.array([(found[changed:] != "").sum() for found in whole])
    hits = np.array([(found[:changed] == SLOWER).sum() for found in whole])
    unchanged = points - changed
    return {
        "comparisons": count,
        "comparisons_with_a_false_verdict": round(float((wrong > 0).mean()), 4),
        "false": round(float(wrong.sum()) / (count * unchanged), 5) if unchanged else None,
        "found": round(float(hits.sum()) / (count * changed), 4) if changed else None,
    }


def comparisons(runs: int, points: int, changed: int) -> int:
    """As many as are needed: one with many changed points tells more of them."""
    if points == 1:
        return 6 * runs
    if not changed:
        return runs
    return runs // 2 if changed == 1 else runs // 5


def verdicts(
    rng: np.random.Generator, count: int, again: int, phi: float, starts: str, changed: int
) -> NDArray[np.str_]:
    """Of each of `count` points; empty for one that is called the same or unclear."""
    slower = np.where(np.arange(count) < changed, 1 + CHANGE, 1.0)
    base, new = (
        Measured(
            points=points(count, name),
            samples=samples(rng, level * start_levels(rng, count, starts), phi, name),
            named=[
                Other(points=medians(rng, level * start_levels(rng, count, starts), phi))
                for _ in range(again)
            ],
        )
        for name, level in (("base", np.ones(count)), ("new", slower))
    )
    frame = compare(base, new).set_index("point_id").loc[names(count)]
    return np.where(frame["verdict"].isin([SLOWER, FASTER]), frame["verdict"], "").astype(str)


def names(count: int) -> list[str]:
    return [f"{point:012d}" for point in range(count)]


def points(count: int, run_id: str = "run") -> pd.DataFrame:
    """Rows of `points` with the columns that a comparison reads."""
    same = {
        **{"run_id": run_id, "attempt": 1, "status": "ok", "workload": "simulated", "params": {}},
        **{"scaling": "weak", "precision": "bf16", "cuda_graph": False, "world_size": 1},
        **{"batch_size": 1, "global_batch_size": 1, "grad_accumulation": 1, "host_bound": False},
        **{"device_type": "cuda", "device_name": "simulated", "node_count": 1},
        **{"started_at": START, "step_ms_ci_low": np.nan, "step_ms_ci_high": np.nan},
    }
    return pd.DataFrame([{**same, "point_id": name} for name in names(count)])


def medians(rng: np.random.Generator, levels: NDArray[np.float64], phi: float) -> pd.DataFrame:
    """Rows of `points` of one more run."""
    middle = STEP_MS * np.median(series(rng, levels, phi), axis=1)
    return points(len(levels), f"again-{rng.integers(2**32)}").assign(step_ms_p50=middle)


def samples(
    rng: np.random.Generator, levels: NDArray[np.float64], phi: float, run_id: str
) -> pd.DataFrame:
    """Rows of `samples`, one rank."""
    count = SAMPLES[phi]
    steps_ns = STEP_MS * 1e6 * series(rng, levels, phi).ravel()
    return pd.DataFrame(
        {
            "run_id": run_id,
            "point_id": np.repeat(names(len(levels)), count),
            "attempt": 1,
            "repeat": 0,
            "iteration": np.tile(np.arange(count), len(levels)),
            "is_warmup": False,
            "step_ns": steps_ns.astype(np.int64),
        }
    )


def series(
    rng: np.random.Generator, levels: NDArray[np.float64], phi: float
) -> NDArray[np.float64]:
    """Points x samples: AR(1) noise about the levels, 1 % of the samples up to twice as long."""
    noise = rng.standard_normal((len(levels), SAMPLES[phi]))
    for place in range(1, SAMPLES[phi]):
        noise[:, place] = phi * noise[:, place - 1] + np.sqrt(1 - phi**2) * noise[:, place]
    outliers = np.where(rng.random(noise.shape) < 0.01, 1 + rng.random(noise.shape), 1.0)
    return levels[:, np.newaxis] * (1 + NOISE * noise) * outliers


def start_levels(rng: np.random.Generator, count: int, starts: str) -> NDArray[np.float64]:
    """Draw what each point's start makes of its step time."""
    if starts == NONE:
        return np.ones(count)
    if starts == NORMAL:
        return 1 + START_SD * rng.standard_normal(count)
    wider = 3 if starts == LOUD else 1
    return 1 + wider * START_SD / _HEAVY * rng.standard_t(3, count)


if __name__ == "__main__":
    main()
