"""Step times for the action `benchmark-action/github-action-benchmark`.

It draws them over the commits of a repository and warns when one is worse.

Its tool `customSmallerIsBetter` reads a list of `name`, `unit`, `value`, `range` and `extra`.
https://github.com/benchmark-action/github-action-benchmark#examples
"""

from __future__ import annotations

import json

from raybench.errors import ResultsError
from raybench.report import plain_text
from raybench.report.export.rows import point_name, point_rows
from raybench.report.summary import Summary


def export_github_benchmark(summary: Summary) -> str:
    """Write the median step of each ok point in ms; range: half of its 95 % interval over starts.

    A name holds all settings of the point, so that it is the same in every run that has the point.
    Raises ResultsError where no point is ok: the action takes no empty list.
    """
    run = summary.run
    ok = [row for row in point_rows(summary) if row["status"] == "ok"]
    entries = []
    for row in ok:
        low, high = row["step_ms_low"], row["step_ms_high"]
        entry = {
            "name": f"{plain_text.plain(run.job_name)}: {point_name(row)}",
            "unit": "ms",
            "value": row["step_ms_p50"],
        }
        if low is not None and high is not None:
            entry["range"] = f"± {(high - low) / 2:.4g}"
        entries.append(entry | {"extra": f"{run.run_id} {row['point_id']}\n{summary.machine}"})
    if not entries:
        raise ResultsError(f"{run.run_id}: no point is ok, so there is no step time to export")
    return json.dumps(entries, indent=2) + "\n"
