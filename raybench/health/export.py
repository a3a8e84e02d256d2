"""A health check for other programs: one JSON object, JUnit XML, CSV."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree as ET

from raybench.health.report import ACTION_WORDS, UNHEALTHY, HealthReport, what_of
from raybench.records.health import Finding, Verdict
from raybench.report import plain_text
from raybench.report.export import csv
from raybench.report.export.as_json import format_object
from raybench.report.export.junit import add_properties
from raybench.results.columns import to_row


def format_json(report: HealthReport) -> str:
    """Write what a check says.

    Members: run, machine, verdict, lamp, headline, exit_code, cases (what is wrong, the worst
    first, with what to do), advice (on the set), notes (what is not known), findings (the table
    `health`), links (the table `links`).
    """
    return format_object(
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
    """Write a line per test and subject: the columns of the table `health`; UTF-8."""
    found = [{"run_id": report.run.run_id, **to_row(one)} for one in report.findings]
    return csv.write(list(found[0]) if found else [], found)


def export_junit(report: HealthReport) -> str:
    """One suite with a case per test and subject.

    What is bad or suspect is a failure, what could not be tested an error, and what is not known,
    or slow because of another subject, is skipped.
    """
    suites = ET.Element("testsuites")
    suite = ET.SubElement(suites, "testsuite", _counts(report))
    add_properties(suite, {"run_id": report.run.run_id, "machine": report.machine})
    for finding in report.findings:
        _add_case(suite, finding)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _counts(report: HealthReport) -> dict[str, str]:
    run = report.run
    kinds = [_kind(finding) for finding in report.findings]
    return {
        "name": plain_text.plain(report.headline),
        "tests": str(len(kinds)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
        "timestamp": run.started_at.replace(tzinfo=None).isoformat(timespec="seconds"),
        "hostname": plain_text.plain(run.host),
    }


def _kind(finding: Finding) -> str:
    """Name the element that tells how a case ended; empty where it is healthy."""
    if finding.verdict is Verdict.UNKNOWN or (finding.culprit and finding.verdict in UNHEALTHY):
        return "skipped"
    if finding.verdict is Verdict.UNTESTED:
        return "error"
    return "failure" if finding.verdict in UNHEALTHY else ""


def _add_case(suite: ET.Element, finding: Finding) -> None:
    subject, plain = finding.subject, plain_text.plain
    case = ET.SubElement(
        suite,
        "testcase",
        {"classname": f"health.{finding.stage}", "name": f"{plain(subject.name)}: {finding.test}"},
    )
    add_properties(case, _figures(finding))
    kind = _kind(finding)
    if not kind:
        return
    blamed = f"because of {finding.culprit}" if finding.culprit else ""
    message = plain(blamed or what_of(finding))
    ended = ET.SubElement(case, kind, {"message": message})
    if kind != "skipped":
        ended.set("type", finding.verdict.value)
        ended.text = "\n".join(filter(None, (plain(finding.evidence), finding.command)))


def _figures(finding: Finding) -> dict[str, Any]:
    named = {
        "value": finding.value,
        "unit": finding.unit or None,
        "expected": finding.expected or None,
        "ratio": finding.ratio,
        "uuids": " ".join(finding.subject.uuids) or None,
    }
    return {name: value for name, value in named.items() if value is not None}
