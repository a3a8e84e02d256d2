"""Uploads of a finished run to a tracker of experiments, by the library of the tracker.

To add a tracker, write a function that uploads the data, and list it in `TRACKERS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from raybench.errors import UsageError, how_to_install
from raybench.report.export import exported_points, facts_of_run
from raybench.report.formatting import counted, plain

if TYPE_CHECKING:
    from raybench.analysis.run_data import RunData

_RUN_TAG = "raybench.run_id"
# W&B must not record the machine that uploads, which is not the machine that was measured.
_WANDB_SETTINGS = {
    **{"silent": True, "console": "off", "disable_git": True, "disable_code": True},
    **{"x_disable_meta": True, "x_disable_stats": True, "x_save_requirements": False},
}


def upload_to_mlflow(data: RunData) -> str:
    """Write an MLflow run with a child run for each point, and return a line about them.

    The experiment is MLFLOW_EXPERIMENT_NAME, by default the name of the job. Settings become
    params, figures become metrics. An error leaves the runs that are written already.

    Raises:
        UsageError: mlflow is not installed or fails, or the experiment already has the run.
    """
    # By default mlflow sends usage data to its makers, which nobody asked for.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ModuleNotFoundError as error:
        missing = f"--to mlflow: no module {error.name}; {how_to_install('mlflow')}"
        raise UsageError(missing) from error
    try:
        return _write_to_mlflow(MlflowClient(), data)
    except (MlflowException, ModuleNotFoundError, OSError) as error:  # stores raise OSError
        raise UsageError(f"--to mlflow: {plain(error)}") from error


def _write_to_mlflow(client: Any, data: RunData) -> str:
    """Write the MLflow runs, and return a line about them."""
    from mlflow.entities import Metric, Param

    def since_1970_ms(time: datetime) -> int:
        return round(1000 * time.timestamp())

    run, points = data.run, exported_points(data)
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.job_name
    existing = client.get_experiment_by_name(experiment)
    experiment_id = str(
        existing.experiment_id if existing else client.create_experiment(experiment)
    )
    filter_string = f"tags.`{_RUN_TAG}` = '{run.run_id}'"
    if earlier := client.search_runs([experiment_id], filter_string, max_results=1):
        raise UsageError(
            f"--to mlflow: experiment {experiment} has {run.run_id} already; delete its MLflow "
            f"runs first, such as {earlier[0].info.run_id}"
        )
    tags = {_RUN_TAG: run.run_id, "cluster": run.cluster, **facts_of_run(data)}
    begun_ms = since_1970_ms(run.started_at)
    parent = client.create_run(experiment_id, begun_ms, tags, run.run_id).info.run_id
    for point in points:
        row = point.row
        begun_ms = since_1970_ms(datetime.fromisoformat(row["started_at"]))
        ended_ms = begun_ms + round(1000 * (row["duration_s"] or 0))
        tags = {
            "mlflow.parentRunId": parent,
            _RUN_TAG: run.run_id,
            "raybench.point_id": row["point_id"],
            "status": row["status"],
            "error": point.error,
            "doubts": point.doubts,
        }
        child = client.create_run(experiment_id, begun_ms, tags, point.name).info.run_id
        client.log_batch(
            child,
            # All metrics are those of step 0.
            metrics=[Metric(name, value, ended_ms, 0) for name, value in point.figures.items()],
            params=[Param(name, value) for name, value in point.settings.items()],
        )
        status = "FINISHED"
        if point.is_failure:
            status = "FAILED"
        elif point.was_not_run:
            status = "KILLED"
        client.set_terminated(child, status, ended_ms)
    client.log_text(parent, run.job_text, "job.yaml")
    status = "FAILED" if run.status.value == "failed" else "FINISHED"
    client.set_terminated(parent, status, since_1970_ms(run.finished_at or run.started_at))
    return f"MLflow experiment {experiment}: run {parent}; points below it: {len(points)}"


def upload_to_wandb(data: RunData) -> str:
    """Write a W&B run for each point, grouped by the run id, and return a line about them.

    The project is WANDB_PROJECT, by default the name of the job. Settings become config, figures
    become the summary. A second upload updates the same runs.

    Raises:
        UsageError: wandb is not installed or fails.
    """
    # By default wandb sends crash reports to its makers, which nobody asked for.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb
    except ModuleNotFoundError as error:
        missing = f"--to wandb: no module {error.name}; {how_to_install('wandb')}"
        raise UsageError(missing) from error
    run, points = data.run, exported_points(data)
    project = os.environ.get("WANDB_PROJECT") or run.job_name
    facts = {"run_id": run.run_id, "job_name": run.job_name, **facts_of_run(data)}
    facts["started_at"] = run.started_at.isoformat()
    try:
        for point in points:
            row = point.row
            written = wandb.init(
                project=project,
                group=run.run_id,
                # A constant id, so that a second upload resumes the run.
                id=f"{run.run_id}-{row['point_id']}",
                resume="allow",
                name=point.name,
                config=point.settings | facts,
                tags=[row["status"]],
                settings=wandb.Settings(**_WANDB_SETTINGS),
            )
            texts = {name: row[name] for name in ("point_id", "status")}
            texts |= {"error": point.error, "doubts": point.doubts}
            written.summary.update(point.figures | texts)
            written.finish(exit_code=int(point.is_failure))
    except (wandb.Error, ValueError) as error:  # ValueError: pydantic refuses a WANDB_ variable
        raise UsageError(f"--to wandb: {plain(error)}") from error
    return f"Weights & Biases project {project}, group {run.run_id}: {counted(len(points), 'run')}"


# Name -> uploads a run; returns a line about it.
TRACKERS: dict[str, Callable[[RunData], str]] = {
    "mlflow": upload_to_mlflow,
    "wandb": upload_to_wandb,
}
