"""Step times for the action `benchmark-action/github-action-benchmark`.

It draws them over the commits of a repository and warns when one is worse. Its tool
`customSmallerIsBetter` reads a list of `name`, `unit`, `value`, `range` and `extra`.
https://github.com/benchmark-action/github-action-benchmark#examples
"""

from __future__ import annotations

import json

from raybench.errors import ResultsError
from raybench.report.export.points import exported_points
from raybench.report.plain_text import plain
from raybench.report.summary import Summary


def export(summary: Summary) -> str:
    """Return the median step of each ok point in ms, with half of its 95 % interval over rounds.

    A name holds all settings of the point, so that it is the same in every run that has the point.
    Raises ResultsError where no point is ok: the action takes no empty list.
    """
    run = summary.run
    entries = []
    for point in exported_points(summary):
        row = point.row
        if row["status"] != "ok":
            continue
        low, high = row["step_ms_low"], row["step_ms_high"]
        has_interval = low is not None and high is not None
        entries.append(
            {
                "name": f"{plain(run.job_name)}: {point.name}",
                "unit": "ms",
                "value": row["step_ms_p50"],
                **({"range": f"± {(high - low) / 2:.4g}"} if has_interval else {}),
                "extra": f"{run.run_id} {row['point_id']}\n{plain(summary.machine)}",
            }
        )
    if not entries:
        raise ResultsError(f"{run.run_id}: no point is ok, so there is no step time to export")
    return json.dumps(entries, indent=2) + "\n"
