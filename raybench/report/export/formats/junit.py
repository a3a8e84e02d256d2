"""A run as JUnit XML: a test case per point, for CI that shows tests.

The form is what the readers of Jenkins and GitLab have in common; there is no standard.
https://github.com/testmoapp/junitxml
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET

from raybench.report import formatting
from raybench.report.export.points import ExportedPoint, exported_points, facts_of_run
from raybench.report.plain_text import plain, plain_lines
from raybench.report.summary import Summary
from raybench.results.reader import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A test case. All text is made harmless when it is written.

    outcome: `output` is a case that passed with something to say. text: of an error or failure,
    lines below its message. seconds: None where nobody knows.
    """

    group: str
    name: str
    properties: Mapping[str, object]
    outcome: Literal["ok", "output", "failure", "error", "skipped"] = "ok"
    kind: str = ""
    message: str = ""
    text: str = ""
    seconds: float | None = None


def export(summary: Summary) -> str:
    """Return one suite. A point that failed is an error, one that was not run is skipped.

    The figures of a point are its properties, in the units of `raybench.units("points")`; `time` is
    what the attempt took. Running out of memory is no error where a batch size was searched.
    """
    cases = [_case(point, summary) for point in exported_points(summary)]
    run = summary.run
    facts = {"run_id": run.run_id, **facts_of_run(summary)}
    return format_suite(run.job_name, run, facts, cases)


def _case(point: ExportedPoint, summary: Summary) -> Case:
    """Return the test case of a point; one that ended otherwise without failing has output."""
    row = point.row
    reason = point.error or formatting.STATUS_WORDS[row["status"]]
    outcome: Literal["ok", "output", "error", "skipped"] = "ok"
    if point.is_failure:
        outcome = "error"
    elif point.was_not_run:
        outcome = "skipped"
    elif row["status"] != "ok":
        outcome = "output"
    return Case(
        group=summary.run.job_name,
        name=point.name,
        properties={"point_id": row["point_id"], **point.figures},
        outcome=outcome,
        kind=row["error_type"] or row["status"],
        message=reason,
        text=row["error_detail"] or reason,
        seconds=row["duration_s"] or 0,
    )


def format_suite(
    name: str, run: Run, properties: Mapping[str, object], cases: Sequence[Case]
) -> str:
    """Return the XML of one suite with these cases in their order, and their counts.

    name: of the suite. run: has its time and host. properties: of the suite.
    """
    outcomes = [case.outcome for case in cases]
    known = [case.seconds for case in cases if case.seconds is not None]
    counts = {
        "name": plain(name),
        "tests": str(len(cases)),
        "failures": str(outcomes.count("failure")),
        "errors": str(outcomes.count("error")),
        "skipped": str(outcomes.count("skipped")),
        **({"time": f"{sum(known):.3f}"} if known else {}),
        # Without an offset, as the schema of Ant's reports has it: UTC.
        "timestamp": run.started_at.replace(tzinfo=None).isoformat(timespec="seconds"),
        "hostname": plain(run.host),
    }
    suites = ET.Element("testsuites")
    suite = ET.SubElement(suites, "testsuite", counts)
    _add_properties(suite, properties)
    for case in cases:
        time = {} if case.seconds is None else {"time": f"{case.seconds:.3f}"}
        names = {"classname": plain(case.group), "name": plain(case.name), **time}
        element = ET.SubElement(suite, "testcase", names)
        _add_properties(element, case.properties)
        _add_outcome(element, case)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _add_outcome(element: ET.Element, case: Case) -> None:
    """Append how a case ended to its element; nothing where it is ok."""
    message = plain(case.message)
    if case.outcome in ("error", "failure"):
        ended = ET.SubElement(element, case.outcome, {"type": plain(case.kind), "message": message})
        ended.text = "\n".join(plain_lines(case.text))
    elif case.outcome == "skipped":
        ET.SubElement(element, "skipped", {"message": message})
    elif case.outcome == "output":
        ET.SubElement(element, "system-out").text = message


def _add_properties(parent: ET.Element, values: Mapping[str, object]) -> None:
    """Append an element `properties` with these names and values."""
    holder = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(holder, "property", {"name": plain(name), "value": plain(value)})
