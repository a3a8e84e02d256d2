"""Reference values that a run supports, as the YAML that `--references` reads."""

from __future__ import annotations

from collections.abc import Iterable

from raybench.analysis.references import ReferenceFile, format_references, pool
from raybench.analysis.rounds import latest_trials, without_controls
from raybench.errors import ResultsError
from raybench.report.json_text import records
from raybench.report.references import point_references
from raybench.report.summary import Summary


def export(summary: Summary) -> str:
    """Return the entries of a run with the value of each start. Raises ResultsError as `write`."""
    return write(summary.run.run_id, files(summary))


def files(summary: Summary) -> list[ReferenceFile]:
    """Return the entries of a run, one file for each model of GPU."""
    trials = without_controls(latest_trials(summary.points))
    return point_references(summary.run, records(summary.devices), trials)


def write(runs: str, found: Iterable[ReferenceFile]) -> str:
    """Return the entries of all files, pooled, as one.

    runs: their names. Raises ResultsError where there is no entry, or more than one model.
    """
    pooled = pool(found)
    if not pooled:
        raise ResultsError(
            f"{runs}: no ok point on GPUs that nothing else used, so there is no reference"
        )
    if len(pooled) > 1:
        models = " and ".join(file.model for file in pooled)
        raise ResultsError(f"{runs}: measured {models}; name runs of one model at a time")
    return format_references(pooled[0])
