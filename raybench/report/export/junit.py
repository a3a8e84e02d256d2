"""A run as JUnit XML: a test case per point, for CI that shows tests.

The form is what the readers of Jenkins and GitLab have in common; there is no standard.
https://github.com/testmoapp/junitxml
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from raybench.records import NOT_RUN
from raybench.report import formatting, plain_text
from raybench.report.export.rows import facts_of_run, figures, is_failure, point_name, point_rows
from raybench.report.summary import Summary

Row = Any


def export_junit(summary: Summary) -> str:
    """One suite. A point that failed is an error, one that was skipped or cancelled is skipped.

    The figures of a point are its properties, in the units of `raybench.units("points")`; `time` is
    what the attempt took. Running out of memory is no error where a batch size was searched.
    """
    rows = point_rows(summary)
    suites = ET.Element("testsuites")
    suite = ET.SubElement(suites, "testsuite", _counts(summary, rows))
    add_properties(suite, {"run_id": summary.run.run_id, **facts_of_run(summary)})
    for row in rows:
        _add_case(suite, row, summary)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _counts(summary: Summary, rows: Sequence[Row]) -> dict[str, str]:
    run = summary.run
    seconds = sum(row["duration_s"] or 0 for row in rows)
    return {
        "name": plain_text.plain(run.job_name),
        "tests": str(len(rows)),
        "failures": "0",
        "errors": str(sum(is_failure(row, summary) for row in rows)),
        "skipped": str(sum(row["status"] in NOT_RUN for row in rows)),
        "time": f"{seconds:.3f}",
        # Without an offset, as the schema of Ant's reports has it: UTC.
        "timestamp": run.started_at.replace(tzinfo=None).isoformat(timespec="seconds"),
        "hostname": plain_text.plain(run.host),
    }


def _add_case(suite: ET.Element, row: Row, summary: Summary) -> None:
    case = ET.SubElement(
        suite,
        "testcase",
        {
            "classname": plain_text.plain(summary.run.job_name),
            "name": point_name(row),
            "time": f"{row['duration_s'] or 0:.3f}",
        },
    )
    add_properties(case, {"point_id": row["point_id"], **figures(row)})
    reason = plain_text.plain(row["error_message"] or formatting.STATUS_WORDS[row["status"]])
    if is_failure(row, summary):
        kind = plain_text.plain(row["error_type"] or row["status"])
        error = ET.SubElement(case, "error", {"type": kind, "message": reason})
        error.text = "\n".join(plain_text.plain_lines(row["error_detail"] or reason))
    elif row["status"] in NOT_RUN:
        ET.SubElement(case, "skipped", {"message": reason})
    elif row["status"] != "ok":
        ET.SubElement(case, "system-out").text = reason


def add_properties(parent: ET.Element, values: Mapping[str, object]) -> None:
    """Add the properties of a suite or of a case."""
    holder = ET.SubElement(parent, "properties")
    for name, value in values.items():
        shown = plain_text.plain(value)
        ET.SubElement(holder, "property", {"name": plain_text.plain(name), "value": shown})
