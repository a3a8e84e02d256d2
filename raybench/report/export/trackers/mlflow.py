"""A run to an MLflow server, after the fact and by MLflow's own client.

One MLflow run for the run, and below it one for each point.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from raybench.errors import UsageError
from raybench.report.export.points import ExportedPoint, exported_points, facts_of_run
from raybench.report.plain_text import plain
from raybench.report.summary import Summary

_RUN_TAG = "raybench.run_id"


def upload(summary: Summary) -> str:
    """Write the run to the server that MLFLOW_TRACKING_URI names; return a line about it.

    The experiment is MLFLOW_EXPERIMENT_NAME, or has the job's name. Settings become params,
    figures metrics, in the units of `raybench.units("points")`. Raises UsageError where mlflow is
    not installed, the server cannot be used, or it has the run already.
    """
    # Else mlflow reports its use to its makers; nothing here is sent where nobody asked for it.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ModuleNotFoundError as error:
        missing = f"--to mlflow: no module {error.name}; pip install 'raybench[mlflow]'"
        raise UsageError(missing) from error
    try:
        return _write(MlflowClient(), summary)
    except (MlflowException, ModuleNotFoundError) as error:
        raise UsageError(f"--to mlflow: {plain(error)}") from error


def _write(client: Any, summary: Summary) -> str:
    """Return a line about a run and its points, after writing them.

    Raises UsageError, before anything is written, where the experiment has the run already.
    """
    run = summary.run
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.job_name
    experiment_id = _experiment(client, experiment)
    known = client.search_runs(
        [experiment_id], f"tags.`{_RUN_TAG}` = '{run.run_id}'", max_results=1
    )
    if known:
        raise UsageError(
            f"--to mlflow: experiment {experiment} has {run.run_id} already; delete its MLflow "
            f"runs first, such as {known[0].info.run_id}"
        )
    tags = {_RUN_TAG: run.run_id, "cluster": run.cluster, **facts_of_run(summary)}
    parent = client.create_run(experiment_id, _ms(run.started_at), tags, run.run_id).info.run_id
    points = exported_points(summary)
    for point in points:
        _write_point(client, experiment_id, parent, point, run.run_id)
    client.log_text(parent, run.job_text, "job.yaml")
    status = "FAILED" if run.status.value == "failed" else "FINISHED"
    client.set_terminated(parent, status, _ms(run.finished_at or run.started_at))
    return f"MLflow experiment {experiment}: run {parent} with {len(points)} points below it"


def _experiment(client: Any, name: str) -> str:
    """Return the id of the experiment of this name; creates it where there is none."""
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))


def _write_point(
    client: Any, experiment_id: str, parent: str, point: ExportedPoint, run_id: str
) -> None:
    """Write a point as an MLflow run below the run `parent`, and end it as the point ended."""
    from mlflow.entities import Metric, Param

    row = point.row
    begun_ms = _ms(datetime.fromisoformat(row["started_at"]))
    ended_ms = begun_ms + round(1000 * (row["duration_s"] or 0))
    tags = {
        "mlflow.parentRunId": parent,
        _RUN_TAG: run_id,
        "raybench.point_id": row["point_id"],
        "status": row["status"],
        "error": point.error,
        "warnings": point.warnings,
    }
    created = client.create_run(experiment_id, begun_ms, tags, point.name).info.run_id
    client.log_batch(
        created,
        metrics=[Metric(name, value, ended_ms, 0) for name, value in point.figures.items()],
        params=[Param(name, value) for name, value in point.settings.items()],
    )
    unfinished = "KILLED" if point.was_not_run else "FINISHED"
    client.set_terminated(created, "FAILED" if point.is_failure else unfinished, ended_ms)


def _ms(time: datetime) -> int:
    """Return milliseconds since 1970, as MLflow has times."""
    return round(1000 * time.timestamp())
