"""A health check for other programs: members of a JSON object, JUnit XML, CSV."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from raybench.health.report import ACTION_WORDS, UNHEALTHY, HealthReport, what_of
from raybench.records.health import Finding, Verdict
from raybench.report.export.formats import csv
from raybench.report.export.formats.junit import Case, format_suite
from raybench.results.columns import to_row


def members(report: HealthReport) -> dict[str, Any]:
    """Return the members of the JSON object of a check.

    run, machine, verdict, lamp, headline, exit_code, cases (what is wrong, the worst
    first, with what to do), advice (on the set), notes (what is not known), findings (the table
    `health`), links (the table `links`).
    """
    return dict(
        run=asdict(report.run),
        machine=report.machine,
        verdict=report.verdict,
        lamp=report.lamp,
        headline=report.headline,
        exit_code=report.exit_code,
        cases=[
            {
                "subject": asdict(case.subject),
                "verdict": case.verdict,
                "what": case.what,
                "evidence": case.evidence,
                "victims": case.victims,
                "action": case.action,
                "action_words": ACTION_WORDS[case.action] if case.action else "",
                "commands": case.commands,
                "tests": [one.test for one in case.findings],
            }
            for case in report.cases
        ],
        advice=report.advice,
        notes=report.notes,
        findings=[{"run_id": report.run.run_id, **to_row(one)} for one in report.findings],
        links=[{"run_id": report.run.run_id, **to_row(one)} for one in report.links],
    )


def export_csv(report: HealthReport) -> str:
    """Return a line per test and subject: the columns of the table `health`; UTF-8."""
    found = [{"run_id": report.run.run_id, **to_row(one)} for one in report.findings]
    return csv.write(list(found[0]) if found else [], found)


def export_junit(report: HealthReport) -> str:
    """Return one suite with a case per test and subject.

    What is bad or suspect is a failure, what could not be tested an error, and what is not known,
    or slow because of another subject, is skipped.
    """
    facts = {"run_id": report.run.run_id, "machine": report.machine}
    return format_suite(report.headline, report.run, facts, list(map(_case, report.findings)))


def _case(finding: Finding) -> Case:
    named = {
        "value": finding.value,
        "unit": finding.unit or None,
        "expected": finding.expected or None,
        "ratio": finding.ratio,
        "uuids": " ".join(finding.subject.uuids) or None,
    }
    blamed = f"because of {finding.culprit}" if finding.culprit else ""
    return Case(
        group=f"health.{finding.stage}",
        name=f"{finding.subject.name}: {finding.test}",
        properties={name: value for name, value in named.items() if value is not None},
        outcome=_outcome(finding),
        kind=finding.verdict.value,
        message=blamed or what_of(finding),
        text="\n".join(filter(None, (finding.evidence, finding.command))),
    )


def _outcome(finding: Finding) -> Literal["ok", "failure", "error", "skipped"]:
    if finding.verdict is Verdict.UNKNOWN or (finding.culprit and finding.verdict in UNHEALTHY):
        return "skipped"
    if finding.verdict is Verdict.UNTESTED:
        return "error"
    return "failure" if finding.verdict in UNHEALTHY else "ok"
