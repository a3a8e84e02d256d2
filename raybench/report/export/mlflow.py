"""A run to an MLflow server, after the fact and by MLflow's own client.

One MLflow run for the run, and below it one for each point.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from raybench.errors import UsageError
from raybench.records import NOT_RUN
from raybench.report import plain_text
from raybench.report.export.rows import (
    facts_of_run,
    figures,
    is_failure,
    point_name,
    point_rows,
    settings,
)
from raybench.report.summary import Summary

Row = Any

_RUN_TAG = "raybench.run_id"


def to_mlflow(summary: Summary) -> str:
    """Write the run to the server that MLFLOW_TRACKING_URI names; what was done, as one line.

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
        raise UsageError(f"--to mlflow: {plain_text.plain(error)}") from error


def _write(client: Any, summary: Summary) -> str:
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
    rows = point_rows(summary)
    for row in rows:
        _write_point(client, experiment_id, parent, row, summary)
    client.log_text(parent, run.job_text, "job.yaml")
    status = "FAILED" if run.status.value == "failed" else "FINISHED"
    client.set_terminated(parent, status, _ms(run.finished_at or run.started_at))
    return f"MLflow experiment {experiment}: run {parent} with {len(rows)} points below it"


def _experiment(client: Any, name: str) -> str:
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))


def _write_point(client: Any, experiment_id: str, parent: str, row: Row, summary: Summary) -> None:
    from mlflow.entities import Metric, Param

    begun_ms = _ms(datetime.fromisoformat(row["started_at"]))
    ended_ms = begun_ms + round(1000 * (row["duration_s"] or 0))
    tags = {
        "mlflow.parentRunId": parent,
        _RUN_TAG: summary.run.run_id,
        "raybench.point_id": row["point_id"],
        "status": row["status"],
        "error": plain_text.plain(row["error_message"] or ""),
        "warnings": "; ".join(map(plain_text.plain, row["warnings"] or [])),
    }
    point = client.create_run(experiment_id, begun_ms, tags, point_name(row)).info.run_id
    client.log_batch(
        point,
        metrics=[Metric(name, value, ended_ms, 0) for name, value in figures(row).items()],
        params=[Param(name, value) for name, value in settings(row).items()],
    )
    unfinished = "KILLED" if row["status"] in NOT_RUN else "FINISHED"
    client.set_terminated(point, "FAILED" if is_failure(row, summary) else unfinished, ended_ms)


def _ms(time: datetime) -> int:
    """Milliseconds since 1970, as MLflow has times."""
    return round(1000 * time.timestamp())
