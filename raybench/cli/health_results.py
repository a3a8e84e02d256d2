"""Health checks, read from the results folder: one, or the history of all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raybench.errors import ResultsError

if TYPE_CHECKING:
    from raybench.analysis.references import References
    from raybench.health.comparison import HealthHistory
    from raybench.health.report import HealthReport
    from raybench.records.health import Finding
    from raybench.results.run import Run


def _is_check(root: Path, run: Run) -> bool:
    """Return whether a run is a health check, also where it was interrupted before its findings."""
    return run.argv[1:2] == ("health",) or (root / "health" / run.run_id).is_dir()


def check_ids(results: Path) -> list[str]:
    """Return the ids of the runs in a folder that are health checks."""
    from raybench.results import reader

    rows = reader.read_table(results, "runs", None, ["run_id", "argv"]).to_pylist()
    return [row["run_id"] for row in rows if (row["argv"] or [])[1:2] == ["health"]]


def load_health(
    results: Path, run: str, references: References | None = None
) -> HealthReport | None:
    """Return the results of a health check; None where the run is not one.

    run: an id, or "latest". references: None: those that come with raybench. Raises ResultsError
    where there is no such run.
    """
    from raybench.analysis.references import SHIPPED
    from raybench.health.references import grades, measurements, read_findings
    from raybench.health.report import HealthReport
    from raybench.records import Device
    from raybench.report import formatting
    from raybench.results import reader
    from raybench.results.columns import from_row

    root, run_id = reader.find_run(results, run)
    found = reader.read_run(root, run_id)
    if not _is_check(root, found):
        return None
    devices = reader.read_table(root, "devices", run_id).to_pylist(maps_as_pydicts="strict")
    findings = [finding for _, finding in read_findings(root, run_id)]
    gpus = {row["uuid"]: from_row(Device, row) for row in devices if row["uuid"]}
    return HealthReport(
        run=found,
        machine=formatting.machine(devices) if devices else found.cluster,
        kinds=[device["kind"] for device in devices],
        findings=findings,
        grades=grades(findings, gpus, references or SHIPPED),
        measurements=measurements(findings, gpus),
    )


def load_health_history(results: Path, threshold: float) -> HealthHistory:
    """Return the history of the figures of all health checks in a folder.

    threshold: the smallest change that counts, as a share. Raises ResultsError where there is none.
    """
    from raybench.health.comparison import HealthHistory, trace_figures
    from raybench.health.references import read_findings
    from raybench.results import reader

    by_run: dict[str, list[Finding]] = {}
    for run_id, finding in read_findings(results):
        by_run.setdefault(run_id, []).append(finding)
    # In order of their starts.
    run_ids = [run.run_id for run in reader.read_runs(results) if run.run_id in by_run]
    if not run_ids:
        raise ResultsError(f"{results}: no health checks yet; `raybench health` makes one")
    kinds = reader.read_table(results, "devices", None, ["kind"])["kind"].to_pylist()
    figures = trace_figures((by_run[run_id] for run_id in run_ids), kinds, 1 + threshold)
    return HealthHistory(figures=figures, run_ids=run_ids)
