"""A/A: does the same job, run twice, show differences that are none?

    python benchmarks/same_twice.py RUN RUN [--results DIR] [-o FILE.json]

For each point that is ok in both runs: the ratio of the step times, whether the 95 % intervals of
the medians overlap, and whether somebody who calls a change of more than 2 % with intervals apart
a difference would have called this one so. An interval speaks of one start of the processes, so
intervals of two runs overlap less often than in 95 of 100 cases; the 2 % are for that.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

import raybench

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
    print(both.sort_values("ratio")[["ratio", "overlap", "differs"]].to_string())
    print(json.dumps(result, indent=2))
    if chosen.output:
        chosen.output.write_text(json.dumps(result, indent=2) + "\n")


def measured(results: str, run: str) -> pd.DataFrame:
    points = raybench.load(results, "points", run)
    ok = points[points["status"] == "ok"].copy()
    ok["all_iterations"] = ok["warmup_iterations"] + ok["iterations"] * ok["inner_iterations"]
    columns = ["step_ms_p50", "step_ms_ci_low", "step_ms_ci_high", "all_iterations"]
    return ok.set_index("point_id")[columns]


if __name__ == "__main__":
    main()
