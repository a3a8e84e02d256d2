"""A run to Weights & Biases, after the fact and by its own library.

One W&B run for each point, all of them in a group that has the run's id.
"""

from __future__ import annotations

import os
from typing import Any

from raybench.errors import UsageError
from raybench.report.export.points import ExportedPoint, exported_points, facts_of_run
from raybench.report.plain_text import plain
from raybench.report.summary import Summary

# The machine that exports is not the one that was measured.
_QUIET = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


def upload(summary: Summary) -> str:
    """Write each point as a W&B run; return a line about it.

    The project is WANDB_PROJECT, or has the job's name; with WANDB_MODE=offline all stays below
    WANDB_DIR until `wandb sync`. Settings become config, figures the summary, in the units of
    `raybench.units("points")`. Raises UsageError where wandb is not installed, or cannot log in.
    """
    # Else wandb reports its crashes to its makers; nothing here is sent where nobody asked for it.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb
    except ModuleNotFoundError as error:
        missing = f"--to wandb: no module {error.name}; pip install 'raybench[wandb]'"
        raise UsageError(missing) from error
    project = os.environ.get("WANDB_PROJECT") or summary.run.job_name
    points = exported_points(summary)
    try:
        for point in points:
            _write_point(wandb, project, point, summary)
    except wandb.Error as error:
        raise UsageError(f"--to wandb: {plain(error)}") from error
    return f"Weights & Biases project {project}, group {summary.run.run_id}: {len(points)} runs"


def _write_point(wandb: Any, project: str, point: ExportedPoint, summary: Summary) -> None:
    """Write a point as a W&B run; a second time the same run is written again."""
    run, row = summary.run, point.row
    named = {"run_id": run.run_id, "job_name": run.job_name}
    facts = {**named, "started_at": run.started_at.isoformat(), **facts_of_run(summary)}
    written = wandb.init(
        project=project,
        group=run.run_id,
        # Always the same, so that a second export resumes the run instead of adding one.
        id=f"{run.run_id}-{row['point_id']}",
        resume="allow",
        name=point.name,
        config=point.settings | facts,
        tags=[row["status"]],
        settings=wandb.Settings(**_QUIET),
    )
    ended = {
        "point_id": row["point_id"],
        "status": row["status"],
        "error": point.error,
        "warnings": point.warnings,
    }
    written.summary.update(point.figures | ended)
    written.finish(exit_code=int(point.is_failure))
