"""A run to Weights & Biases, after the fact and by its own library.

One W&B run for each point, all of them in a group that has the run's id.
"""

from __future__ import annotations

import os
from typing import Any

from raybench.errors import UsageError
from raybench.report import plain_text
from raybench.report.export.rows import figures, is_failure, point_name, point_rows, settings
from raybench.report.summary import Summary

Row = Any

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


def to_wandb(summary: Summary) -> str:
    """Write each point as a W&B run; what was done, as one line.

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
    rows = point_rows(summary)
    try:
        for row in rows:
            _write_point(wandb, project, row, summary)
    except wandb.Error as error:
        raise UsageError(f"--to wandb: {plain_text.plain(error)}") from error
    return f"Weights & Biases project {project}, group {summary.run.run_id}: {len(rows)} runs"


def _write_point(wandb: Any, project: str, row: Row, summary: Summary) -> None:
    run = summary.run
    written = wandb.init(
        project=project,
        group=run.run_id,
        # Always the same, so that a second export resumes the run instead of adding one.
        id=f"{run.run_id}-{row['point_id']}",
        resume="allow",
        name=point_name(row),
        config=settings(row) | _of_run(summary),
        tags=[row["status"]],
        settings=wandb.Settings(**_QUIET),
    )
    written.summary.update(figures(row) | _summary_of(row))
    written.finish(exit_code=int(is_failure(row, summary)))


def _of_run(summary: Summary) -> dict[str, Any]:
    run = summary.run
    return {
        "run_id": run.run_id,
        "job_name": run.job_name,
        "started_at": run.started_at.isoformat(),
        "git_commit": run.git_commit,
        "machine": summary.machine,
        "versions": dict(summary.versions),
        "tags": dict(run.tags),
    }


def _summary_of(row: Row) -> dict[str, Any]:
    return {
        "point_id": row["point_id"],
        "status": row["status"],
        "error": plain_text.plain(row["error_message"] or ""),
        "warnings": "; ".join(map(plain_text.plain, row["warnings"] or [])),
    }
