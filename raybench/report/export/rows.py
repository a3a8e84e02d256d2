"""The points of a run as every exporter takes them: their settings, their figures, their names."""

from __future__ import annotations

from typing import Any

from raybench.analysis.settings import EXECUTION, OPTIONAL, batch_column, setting
from raybench.job.point import RUN_SETTINGS
from raybench.records import FAILURES
from raybench.report import formatting, plain_text
from raybench.report.export.as_json import plain_rows
from raybench.report.summary import Summary

Row = Any

# Numbers that say which point it is, not what was measured.
_NOT_FIGURES = {
    "attempt",
    "error_rank",
    "world_size",
    "node_count",
    *EXECUTION,
    "batch_size",
    "global_batch_size",
    "batch",
    "grad_accumulation",
    "series",
    "is_baseline",
}


def point_rows(summary: Summary) -> list[dict[str, Any]]:
    """List the latest attempt at each point, with what the report derives, as JSON can hold it."""
    return plain_rows(summary.scaling)


def settings(row: Row) -> dict[str, str]:
    """All that defines the point: it is the same in every run that has the point."""
    names = ["precision", *filter(None, [batch_column(row)]), "world_size"]
    options = {
        name: formatting.setting(name, value)
        for name in OPTIONAL
        if (value := setting(row, name)) != RUN_SETTINGS[name].default
    }
    fixed = {name: row[name] for name in names}
    given = {"workload": row["workload"], **row["params"], **options, **fixed}
    return {plain_text.plain(name): plain_text.plain(value) for name, value in given.items()}


def point_name(row: Row) -> str:
    """Write the settings in a line, such as `mlp hidden=4096 precision=bf16 world_size=2`."""
    named = settings(row)
    return f"{named.pop('workload')} {formatting.settings(named)}"


def figures(row: Row) -> dict[str, int | float]:
    """Collect what was measured and derived, as numbers: yes is 1, what is null is left out.

    A metric that the workload declares itself has its own name, unless a column has it.
    """
    return {
        name: int(value) if isinstance(value, bool) else value
        for name, value in ({**(row["workload_metrics"] or {}), **row}).items()
        if isinstance(value, int | float) and name not in _NOT_FIGURES
    }


def facts_of_run(summary: Summary) -> dict[str, str]:
    """Collect what the trackers keep of the run: machine, commit, versions and tags."""
    run = summary.run
    return {
        "machine": summary.machine,
        **({"git_commit": run.git_commit} if run.git_commit else {}),
        **{f"version.{name}": version for name, version in summary.versions.items()},
        **{f"tag.{name}": value for name, value in run.tags.items()},
    }


def is_failure(row: Row, summary: Summary) -> bool:
    """Whether the point went wrong.

    In a search for the largest batch, running out of memory is an answer: the status of the run
    tells.
    """
    if row["status"] == "oom":
        return summary.run.status.value != "ok"
    return row["status"] in FAILURES
