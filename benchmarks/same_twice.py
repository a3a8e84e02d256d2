"""A/A: does the same job, run twice, show differences that are none?

    python -m benchmarks.same_twice RUN RUN [--results DIR] [-o FILE.json]

For each point that is ok in both runs: the ratio of the step times, whether the 95 % intervals of
the medians overlap, and whether somebody who calls a change of more than 2 % with intervals apart
a difference would have called this one so. An interval speaks of one start of the processes, so
intervals of two runs overlap less often than in 95 of 100 cases; the 2 % are for that.

Then the speed-ups as reports print them, with intervals that hold over starts: the share whose
interval holds the level of the other run (the level is as unsure as the interval is wide, so of
ideal 95 % intervals about 84 % do), the share of pairs of intervals that overlap, and how many have
no speed-up.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

import raybench
from benchmarks.common import options, write_result
from raybench.analysis.rounds import mean_of_rounds
from raybench.analysis.rows import point_rows

THRESHOLD = 0.02


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("runs", nargs=2)
    parser.add_argument("--results", default="results/examples")
    chosen = parser.parse_args()
    points, scaling = (
        [raybench.load(chosen.results, table, run) for run in chosen.runs]
        for table in ("points", "scaling")
    )
    result = {"runs": chosen.runs, **steps(*points), **speed_ups(*scaling)}
    write_result(result, chosen.output)


def steps(*runs: pd.DataFrame) -> dict[str, Any]:
    """Say how the step times of the two runs agree."""
    means = [pd.DataFrame(map(vars, mean_of_rounds(point_rows(run)))) for run in runs]
    ok = [mean[mean["status"] == "ok"] for mean in means]
    both = ok[0].merge(ok[1], on="point_id", suffixes=("_a", "_b"))
    change = (both["step_ms_p50_b"] / both["step_ms_p50_a"] - 1).abs()
    apart = ~overlap(both, "step_ms_ci")
    return {
        "points": len(both),
        "intervals_overlap": int((~apart).sum()),
        "false_differences": int((apart & (change > THRESHOLD)).sum()),
        "median_change": float(change.median()),
        "largest_change": float(change.max()),
    }


def speed_ups(*runs: pd.DataFrame) -> dict[str, Any]:
    """Say how the speed-ups of the two runs agree, of the points that are compared with another."""
    one, other = (run[run["point_id"] != run["baseline_point_id"]] for run in runs)
    both = one.merge(other, on="point_id", suffixes=("_a", "_b"))
    told = both.dropna(subset=["speed_up_low_a", "speed_up_low_b"])
    holds = [
        told[f"speed_up_{there}"].between(
            told[f"speed_up_low_{here}"], told[f"speed_up_high_{here}"]
        )
        for here, there in (("a", "b"), ("b", "a"))
    ]
    change = (told["speed_up_b"] / told["speed_up_a"] - 1).abs()
    return {
        "speed_ups": len(both),
        "without_speed_up": len(both) - len(told),
        "hold_the_other_level": float(pd.concat(holds).mean()),
        "speed_up_intervals_overlap": float(overlap(told, "speed_up").mean()),
        "median_change_of_speed_up": float(change.median()),
        "largest_change_of_speed_up": float(change.max()),
    }


def overlap(both: pd.DataFrame, name: str) -> pd.Series:
    """Say of each point whether the two intervals overlap."""
    low, high = f"{name}_low", f"{name}_high"
    return (both[f"{low}_a"] <= both[f"{high}_b"]) & (both[f"{low}_b"] <= both[f"{high}_a"])


if __name__ == "__main__":
    main()
