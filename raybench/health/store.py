"""Findings and links of health checks, read from the tables `health` and `links`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from raybench.health.expected import PastValue
from raybench.records.health import Action, Finding, Link, Subject, Verdict
from raybench.results import reader


def read_findings(root: Path, run_id: str | None = None) -> list[tuple[str, Finding]]:
    """Return (run_id, finding) of one run, or of all. Raises ResultsError if one cannot be read."""
    found = reader.read_table(root, "health", run_id).to_pylist()
    return [(row["run_id"], _finding(row)) for row in found]


def read_links(root: Path, run_id: str) -> list[Link]:
    """Return the links of a run. Raises ResultsError where they cannot be read."""
    names = [field.name for field in fields(Link)]
    return [
        Link(**{name: row[name] for name in names})
        for row in reader.read_table(root, "links", run_id).to_pylist()
    ]


def past_values(root: Path) -> Sequence[PastValue]:
    """Return the values of healthy subjects in all checks of a folder; none without a check."""
    if not (root / "health").is_dir():
        return ()
    return tuple(
        PastValue(run_id=of_run, test=finding.test, subject=finding.subject, value=finding.value)
        for of_run, finding in read_findings(root)
        if finding.verdict is Verdict.HEALTHY and finding.value is not None
    )


def _finding(row: Mapping[str, Any]) -> Finding:
    """Return the finding of a row; a verdict that a later version added is taken as unknown."""
    verdicts = {verdict.value: verdict for verdict in Verdict}
    actions = {action.value: action for action in Action}
    texts = ("test", "unit", "expected", "reason", "evidence", "culprit", "command")
    return Finding(
        stage=row["stage"],
        subject=Subject(
            kind=row["kind"],
            uuids=tuple(row["uuids"] or ()),
            name=row["subject"] or "",
            model=row["model"] or "",
        ),
        passes=row["passes"] or 0,
        value=row["value"],
        ratio=row["ratio"],
        verdict=verdicts.get(row["verdict"], Verdict.UNKNOWN),
        action=actions.get(row["action"] or ""),
        **{name: row[name] or "" for name in texts},
    )
