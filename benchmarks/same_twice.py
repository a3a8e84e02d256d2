"""A/A: does the same job, run twice, show differences that are none?

    python benchmarks/same_twice.py RUN RUN [--results DIR] [-o FILE.json]

For each point that is ok in both runs: the ratio of the step times, whether the 95 % intervals of
the medians overlap, and whether somebody who calls a change of more than 2 % with intervals apart
a difference would have called this one so. An interval speaks of one start of the processes, so
intervals of two runs overlap less often than in 95 of 100 cases; the 2 % are for that.

Then the speed-ups as reports print them, with intervals that hold over starts: the share whose
interval holds the level of the other run (the level is as unsure as the interval is wide, so of
ideal 95 % intervals about 84 % do), the share of pairs of intervals that overlap, and how many have
no speed-up. RUN may be a path, so that the two runs may lie in different folders.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

import raybench
from raybench.analysis.rounds import mean_of_rounds
from raybench.results import reader

THRESHOLD = 0.02


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("runs", nargs=2)
    options.add_argument("--results", default="results/examples")
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    first, second = (measured(chosen.results, run) for run in chosen.runs)
    both = first.merge(second, on="point_id", suffixes=("_a", "_b"))
    both["ratio"] = both["step_ms_p50_b"] / both["step_ms_p50_a"]
    both["overlap"] = (both["step_ms_ci_low_a"] <= both["step_ms_ci_high_b"]) & (
        both["step_ms_ci_low_b"] <= both["step_ms_ci_high_a"]
    )
    both["differs"] = ~both["overlap"] & ((both["ratio"] - 1).abs() > THRESHOLD)
    result = {
        "runs": chosen.runs,
        "points": len(both),
        "intervals_overlap": int(both["overlap"].sum()),
        "false_differences": int(both["differs"].sum()),
        "median_change": float((both["ratio"] - 1).abs().median()),
        "largest_change": float((both["ratio"] - 1).abs().max()),
        "iterations_a": float(both["all_iterations_a"].median()),
        "iterations_b": float(both["all_iterations_b"].median()),
    }
    result |= speed_ups(chosen.results, *chosen.runs)
    print(both.sort_values("ratio")[["ratio", "overlap", "differs"]].to_string())
    print(json.dumps(result, indent=2))
    if chosen.output:
        chosen.output.write_text(json.dumps(result, indent=2) + "\n")


def speed_ups(results: str, *runs: str) -> dict[str, float]:
    """How the speed-ups of the two runs agree, of the points that are compared with another."""
    one, other = (
        frame[frame["point_id"] != frame["baseline_point_id"]]
        for frame in (raybench.load(results, "scaling", run) for run in runs)
    )
    both = one.merge(other, on="point_id", suffixes=("_a", "_b"))
    told = both.dropna(subset=["speed_up_low_a", "speed_up_low_b"])
    holds = [
        told[f"speed_up_{there}"].between(
            told[f"speed_up_low_{here}"], told[f"speed_up_high_{here}"]
        )
        for here, there in (("a", "b"), ("b", "a"))
    ]
    overlap = (told["speed_up_low_a"] <= told["speed_up_high_b"]) & (
        told["speed_up_low_b"] <= told["speed_up_high_a"]
    )
    change = (told["speed_up_b"] / told["speed_up_a"] - 1).abs()
    return {
        "speed_ups": len(both),
        "without_speed_up": len(both) - len(told),
        "hold_the_other_level": float(pd.concat(holds).mean()),
        "speed_up_intervals_overlap": float(overlap.mean()),
        "median_change_of_speed_up": float(change.median()),
        "largest_change_of_speed_up": float(change.max()),
    }


def measured(results: str, run: str) -> pd.DataFrame:
    ok = mean_of_rounds(reader.load(results, "points", run))
    ok = ok[ok["status"] == "ok"].copy()
    ok["all_iterations"] = ok["warmup_iterations"] + ok["iterations"] * ok["inner_iterations"]
    columns = ["step_ms_p50", "step_ms_ci_low", "step_ms_ci_high", "all_iterations"]
    return ok.set_index("point_id")[columns]


if __name__ == "__main__":
    main()
