"""Findings and links of health checks, read from the tables `health` and `links`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raybench.health.expected import PastValue
from raybench.records.health import Finding, Link, Verdict
from raybench.results import reader
from raybench.results.columns import from_row


def read_findings(root: Path, run_id: str | None = None) -> list[tuple[str, Finding]]:
    """Return (run_id, finding) of one run, or of all. Raises ResultsError if one cannot be read."""
    found = reader.read_table(root, "health", run_id).to_pylist()
    return [(row["run_id"], from_row(Finding, row)) for row in found]


def read_links(root: Path, run_id: str) -> list[Link]:
    """Return the links of a run. Raises ResultsError where they cannot be read."""
    found = reader.read_table(root, "links", run_id).to_pylist()
    return [from_row(Link, row) for row in found]


def past_values(root: Path) -> Sequence[PastValue]:
    """Return the values of healthy subjects in all checks of a folder; none without a check."""
    if not (root / "health").is_dir():
        return ()
    return tuple(
        PastValue(run_id=of_run, test=finding.test, subject=finding.subject, value=finding.value)
        for of_run, finding in read_findings(root)
        if finding.verdict is Verdict.HEALTHY and finding.value is not None
    )
