"""A health check for other programs: JUnit XML, CSV and JSON."""

from __future__ import annotations

from typing import Literal

from raybench.health.document import HealthDocument
from raybench.health.report import UNHEALTHY, HealthReport, what_of
from raybench.records.health import Finding, Verdict
from raybench.report.documents import format_document
from raybench.report.export.formats import csv
from raybench.report.export.formats.junit import Case, format_suite
from raybench.results.columns import to_row


def export(report: HealthReport, kind: str) -> str:
    """Return a check as the text of a file; CSV and JUnit XML have a row per test and subject.

    kind: "json", "csv" (the columns of the table `health`) or "junit", where a finding that is bad
    or suspect is a failure, one that could not be tested is an error, and one that is unknown, or
    slow because of another subject, is skipped.
    """
    run = report.run
    if kind == "json":
        return format_document(HealthDocument(report=report), "json")
    if kind == "csv":
        found = [{"run_id": run.run_id, **to_row(one)} for one in report.findings]
        return csv.write(list(found[0]) if found else [], found)
    facts = {"run_id": run.run_id, "machine": report.machine}
    return format_suite(report.headline, run, facts, list(map(_case, report.findings)))


def _case(finding: Finding) -> Case:
    named = {
        "value": finding.value,
        "unit": finding.unit or None,
        "expected": finding.expected or None,
        "ratio": finding.ratio,
        "uuids": " ".join(finding.subject.uuids) or None,
    }
    is_unhealthy = finding.verdict in UNHEALTHY
    outcome: Literal["ok", "failure", "error", "skipped"] = "failure" if is_unhealthy else "ok"
    if finding.verdict is Verdict.UNKNOWN or (finding.culprit and is_unhealthy):
        outcome = "skipped"
    elif finding.verdict is Verdict.UNTESTED:
        outcome = "error"
    return Case(
        group=f"health.{finding.stage}",
        name=f"{finding.subject.name}: {finding.test}",
        properties={name: value for name, value in named.items() if value is not None},
        outcome=outcome,
        kind=finding.verdict.value,
        message=f"because of {finding.culprit}" if finding.culprit else what_of(finding),
        text="\n".join(filter(None, (finding.evidence, finding.command))),
    )
