"""The points of a run for other programs, as the text of a file.

To add a format, write a function from `RunData` to text, and list it in `FORMATS`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree as ET

from raybench.analysis.rows import EXECUTION, ScaledRow
from raybench.analysis.run_data import defining_settings
from raybench.errors import ResultsError
from raybench.records.status import FAILURES, NOT_RUN
from raybench.report import formatting
from raybench.report.documents import format_object, jsonable, records
from raybench.report.formatting import plain, plain_lines, printable
from raybench.report.words.doubts import doubt_words
from raybench.report.words.failures import failure_of_row
from raybench.report.words.reasons import not_compared_words
from raybench.report.words.run import machine_of_run
from raybench.results.tables import Run, column_units

if TYPE_CHECKING:
    from raybench.analysis.run_data import RunData

# Numbers that identify a point; other numbers were measured.
_NOT_FIGURES = {
    *("attempt", "round", "error_rank", "world_size", "node_count", *EXECUTION, "batch_size"),
    *("global_batch_size", "batch", "grad_accumulation", "series", "is_baseline"),
}
# Columns that hold a map: CSV has a column for each key.
_MAP_COLUMNS = ("params", "workload_metrics")
# A spreadsheet takes a text that begins so for a formula, unless a quote precedes it.
# https://owasp.org/www-community/attacks/CSV_Injection
_FORMULA_STARTS = ("=", "+", "-", "@", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedPoint:
    """A point over all rounds."""

    # The columns as JSON can hold them.
    row: dict[str, Any]
    # Settings that identify the point in every run of the job.
    settings: dict[str, str]
    # The settings in a line: `mlp hidden=4096 precision=bf16 world_size=2`.
    name: str
    # Measured and derived numbers, with metrics of the workload; a boolean is 0 or 1.
    figures: dict[str, int | float]
    # In a search for the largest batch, running out of memory is not a failure.
    is_failure: bool
    # Skipped or cancelled.
    was_not_run: bool
    error: str
    doubts: str
    # Why the point has no speed-up; may be "".
    why: str


def exported_points(data: RunData) -> list[ExportedPoint]:
    """Return the points of a run in the order of `data.rows`."""
    points = []
    for scaled_row in data.rows:
        row = jsonable(vars(scaled_row))  # column -> value
        settings = defining_settings(scaled_row)
        other_settings = {name: value for name, value in settings.items() if name != "workload"}
        figures = {}
        # A column wins over a metric of the workload with the same name.
        values = {**(row["workload_metrics"] or {}), **row}
        for name, value in values.items():
            if isinstance(value, int | float) and name not in _NOT_FIGURES:
                figures[name] = int(value) if isinstance(value, bool) else value
        doubts = [plain(doubt_words(doubt, scaled_row)) for doubt in scaled_row.doubts or ()]
        # A search for the largest batch must run out of memory.
        is_expected = row["status"] == "oom" and data.is_batch_search
        points.append(
            ExportedPoint(
                row=row,
                settings=settings,
                name=f"{settings['workload']} {formatting.settings(other_settings)}",
                figures=figures,
                is_failure=row["status"] in FAILURES and not is_expected,
                was_not_run=row["status"] in NOT_RUN,
                error=plain(failure_of_row(scaled_row)),
                why=not_compared_words(scaled_row.why) if scaled_row.why else "",
                doubts="; ".join(doubts),
            )
        )
    return points


def facts_of_run(data: RunData) -> dict[str, str]:
    """Return the machine, git commit, versions and tags of a run."""
    facts = {"machine": machine_of_run(data)}
    if data.run.git_commit:
        facts["git_commit"] = data.run.git_commit
    facts |= {f"version.{name}": version for name, version in data.versions.items()}
    facts |= {f"tag.{name}": value for name, value in data.run.tags.items()}
    return facts


def export_csv(data: RunData) -> str:
    """Return CSV with a row per point: the columns of `points` and derived columns.

    Parameters are columns `params.NAME`, metrics of the workload `workload_metrics.NAME`. Other
    maps are JSON, lists are joined by "; ", null is empty. Unprintable characters become `�`, and a
    text that a spreadsheet would read as a formula begins with `'`.
    """
    rows = []
    columns_of_keys: set[str] = set()
    for point in exported_points(data):
        cells_of_keys = {}
        for map_column in _MAP_COLUMNS:
            for key, value in (point.row[map_column] or {}).items():
                cells_of_keys[f"{map_column}.{key}"] = value
        rows.append(point.row | cells_of_keys | {"doubts": point.doubts, "why": point.why})
        columns_of_keys |= cells_of_keys.keys()
    left_out = (*_MAP_COLUMNS, "workload_headings")
    columns = [field.name for field in fields(ScaledRow) if field.name not in left_out]
    return csv_text([*columns, *sorted(columns_of_keys)], rows)


def csv_text(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV with these columns, written as in `export_csv`.

    Args:
        names: names of the columns.
        rows: name -> value as `jsonable` returns it; missing values are empty cells.
    """
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(map(_csv_cell, names))
    for row in rows:
        writer.writerow([_csv_cell(row.get(name)) for name in names])
    return target.getvalue()


def _csv_cell(value: Any) -> Any:
    """Return a value as a cell that no spreadsheet reads as a formula."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        value = "; ".join("" if item is None else str(item) for item in value)
    if not isinstance(value, str):
        return value
    # Control characters could change a terminal that shows the file.
    lines = "\n".join(map(printable, value.splitlines()))
    is_formula = lines.startswith(_FORMULA_STARTS) and not _NUMBER.fullmatch(lines)
    return f"'{lines}" if is_formula else lines


def export_github(data: RunData) -> str:
    """Return a JSON list of median steps in ms, for `customSmallerIsBetter` of the GitHub action.

    https://github.com/benchmark-action/github-action-benchmark#examples

    Raises:
        ResultsError: no point is ok, and the action refuses an empty list.
    """
    run = data.run
    entries = []
    for point in exported_points(data):
        row = point.row
        if row["status"] != "ok":
            continue
        low, high = row["step_ms_low"], row["step_ms_high"]
        has_interval = low is not None and high is not None
        entries.append(
            {
                "name": f"{plain(run.job_name)}: {point.name}",
                "unit": "ms",
                "value": row["step_ms_p50"],
                **({"range": f"± {(high - low) / 2:.4g}"} if has_interval else {}),
                "extra": f"{run.run_id} {row['point_id']}\n{plain(machine_of_run(data))}",
            }
        )
    if not entries:
        raise ResultsError(f"{run.run_id}: no point is ok, so there is no step time to export")
    return json.dumps(entries, indent=2) + "\n"


def export_json(data: RunData) -> str:
    """Return a JSON object of schema_version, run, devices, units of columns, and points."""
    return format_object(
        run=asdict(data.run),
        devices=records(data.devices),
        units=column_units("points"),
        points=list(map(vars, data.rows)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JUnitCase:
    """A test case of JUnit; its texts are not yet escaped."""

    group: str
    name: str
    properties: Mapping[str, object]
    # `ok` passed; `output` passed with a message.
    outcome: Literal["ok", "output", "failure", "error", "skipped"] = "ok"
    # The type of an error or failure.
    kind: str = ""
    message: str = ""
    # Details of an error or failure.
    text: str = ""
    # None if unknown.
    seconds: float | None = None


def export_junit(data: RunData) -> str:
    """Return a JUnit suite with a test case per point; its properties are id and figures.

    Failed points are errors. In a search for the largest batch, a point that ran out of memory
    passes with an output.
    """
    run, cases = data.run, []
    for point in exported_points(data):
        row = point.row
        reason = point.error or formatting.STATUS_WORDS[row["status"]]
        outcome: Literal["ok", "output", "error", "skipped"] = "output"
        if point.is_failure:
            outcome = "error"
        elif point.was_not_run:
            outcome = "skipped"
        elif row["status"] == "ok":
            outcome = "ok"
        cases.append(
            JUnitCase(
                group=run.job_name,
                name=point.name,
                properties={"point_id": row["point_id"], **point.figures},
                outcome=outcome,
                kind=row["error_type"] or row["status"],
                message=reason,
                text=row["error_detail"] or reason,
                seconds=row["duration_s"] or 0,
            )
        )
    return junit_text(run.job_name, run, {"run_id": run.run_id, **facts_of_run(data)}, cases)


def junit_text(
    name: str, run: Run, properties: Mapping[str, object], cases: Sequence[JUnitCase]
) -> str:
    """Return the XML of one suite, as Jenkins and GitLab read it.

    No standard exists: https://github.com/testmoapp/junitxml

    Args:
        name: name of the suite.
        run: gives the start in UTC and the host.
        properties: facts about the suite.
        cases: test cases in order.
    """
    outcomes = [case.outcome for case in cases]
    seconds = [case.seconds for case in cases if case.seconds is not None]
    attributes = {
        "name": plain(name),
        "tests": str(len(cases)),
        "failures": str(outcomes.count("failure")),
        "errors": str(outcomes.count("error")),
        "skipped": str(outcomes.count("skipped")),
        **({"time": f"{sum(seconds):.3f}"} if seconds else {}),
        # UTC without an offset, as the schema of Ant's reports requires.
        "timestamp": run.started_at.replace(tzinfo=None).isoformat(timespec="seconds"),
        "hostname": plain(run.host),
    }
    suites = ET.Element("testsuites")
    suite = ET.SubElement(suites, "testsuite", attributes)
    _add_properties(suite, properties)
    for case in cases:
        time = {} if case.seconds is None else {"time": f"{case.seconds:.3f}"}
        attributes = {"classname": plain(case.group), "name": plain(case.name), **time}
        element = ET.SubElement(suite, "testcase", attributes)
        _add_properties(element, case.properties)
        message = plain(case.message)
        if case.outcome in ("error", "failure"):
            attributes = {"type": plain(case.kind), "message": message}
            outcome = ET.SubElement(element, case.outcome, attributes)
            outcome.text = "\n".join(plain_lines(case.text))
        elif case.outcome == "skipped":
            ET.SubElement(element, "skipped", {"message": message})
        elif case.outcome == "output":
            ET.SubElement(element, "system-out").text = message
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _add_properties(parent: ET.Element, properties: Mapping[str, object]) -> None:
    """Add an element for each name -> value."""
    holder = ET.SubElement(parent, "properties")
    for name, value in properties.items():
        ET.SubElement(holder, "property", {"name": plain(name), "value": plain(value)})


# Name of a format -> function that returns the text of the file.
FORMATS: dict[str, Callable[[RunData], str]] = {
    "csv": export_csv,
    "github-action-benchmark": export_github,
    "json": export_json,
    "junit": export_junit,
}
