"""The points of a run for other programs, as the text of a file.

To add a format, write a function of the data that returns the text, and list it in `FORMATS`.
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
from raybench.report.words.run import machine
from raybench.results.tables import Run, column_units

if TYPE_CHECKING:
    from raybench.analysis.run_data import RunData

# Numbers that say which point it is, not what was measured.
_NOT_FIGURES = {
    *("attempt", "round", "error_rank", "world_size", "node_count", *EXECUTION, "batch_size"),
    *("global_batch_size", "batch", "grad_accumulation", "series", "is_baseline"),
}
# In CSV these have a column for each of their keys.
_MAPS = ("params", "workload_metrics")
# What a spreadsheet takes for a formula, unless a quote is before it; a number is none.
# https://owasp.org/www-community/attacks/CSV_Injection
_BEGINS_FORMULA = ("=", "+", "-", "@", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedPoint:
    """A point by its latest attempts, its rounds as one.

    row: its columns as JSON can hold them. settings: as `defining_settings`, the same in every run
    of the job. name: the settings in a line: `mlp hidden=4096 precision=bf16 world_size=2`.
    figures: what was measured and derived, as numbers: yes is 1, null is left out, and a metric
    that the workload declares itself has its own name, unless a column has it. is_failure: running
    out of memory is none in a search for the largest batch. was_not_run: skipped or cancelled.
    error, doubts, why (no speed-up): on one line each, empty without one.
    """

    row: dict[str, Any]
    settings: dict[str, str]
    name: str
    figures: dict[str, int | float]
    is_failure: bool
    was_not_run: bool
    error: str
    doubts: str
    why: str


def exported_points(data: RunData) -> list[ExportedPoint]:
    """Return the points of a run, their rounds as one, in the order of `data.rows`."""
    points = []
    for scaled in data.rows:
        row, settings = jsonable(vars(scaled)), defining_settings(scaled)
        named = {name: value for name, value in settings.items() if name != "workload"}
        found = {**(row["workload_metrics"] or {}), **row}
        is_answer = row["status"] == "oom" and data.is_batch_search
        points.append(
            ExportedPoint(
                row=row,
                settings=settings,
                name=f"{settings['workload']} {formatting.settings(named)}",
                figures={
                    name: int(value) if isinstance(value, bool) else value
                    for name, value in found.items()
                    if isinstance(value, int | float) and name not in _NOT_FIGURES
                },
                is_failure=row["status"] in FAILURES and not is_answer,
                was_not_run=row["status"] in NOT_RUN,
                error=plain(failure_of_row(scaled)),
                why=not_compared_words(scaled.why) if scaled.why else "",
                doubts="; ".join(
                    plain(doubt_words(doubt, scaled)) for doubt in scaled.doubts or ()
                ),
            )
        )
    return points


def facts_of_run(data: RunData) -> dict[str, str]:
    """Return name -> text of a run: machine, git_commit if known, version.NAME and tag.NAME."""
    run = data.run
    return {
        "machine": machine(data),
        **({"git_commit": run.git_commit} if run.git_commit else {}),
        **{f"version.{name}": version for name, version in data.versions.items()},
        **{f"tag.{name}": value for name, value in run.tags.items()},
    }


def export_csv(data: RunData) -> str:
    """Return names, then a row per point: the columns of `points` and what the report derives.

    A parameter of the workload is a column `params.NAME`, a metric of its own a column
    `workload_metrics.NAME`; other maps are JSON (`workload_headings` is left out), a list is joined
    by "; ", null is empty, a boolean `true` or `false`. A cell may have line breaks; all else that
    is unprintable is `�`. A text that a spreadsheet would take for a formula begins with `'`.
    """
    rows = []
    more: set[str] = set()
    for point in exported_points(data):
        maps = ((one, point.row[one] or {}) for one in _MAPS)
        own = {f"{one}.{name}": value for one, held in maps for name, value in held.items()}
        rows.append(point.row | own | {"doubts": point.doubts, "why": point.why})
        more |= own.keys()
    left_out = (*_MAPS, "workload_headings")
    names = [field.name for field in fields(ScaledRow) if field.name not in left_out]
    return csv_text([*names, *sorted(more)], rows)


def csv_text(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV: the names, then their values in each row, written as `export_csv` says.

    rows: name -> value as of `jsonable`; one that a row lacks is empty, others are left out.
    """
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(map(_csv_cell, names))
    writer.writerows([_csv_cell(row.get(name)) for name in names] for row in rows)
    return target.getvalue()


def _csv_cell(value: Any) -> Any:
    """Return a value as a cell that no spreadsheet takes for a formula; a number as it is."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        value = "; ".join("" if one is None else str(one) for one in value)
    if not isinstance(value, str):
        return value
    # Somebody will look at it in a terminal.
    lines = "\n".join(map(printable, value.splitlines()))
    is_formula = lines.startswith(_BEGINS_FORMULA) and not _NUMBER.fullmatch(lines)
    return f"'{lines}" if is_formula else lines


def export_github(data: RunData) -> str:
    """Return a JSON list: the median step in ms of ok points, ± half its 95 % interval if known.

    For the action `benchmark-action/github-action-benchmark`, which draws them over the commits of
    a repository and warns when one is worse; its tool is `customSmallerIsBetter`. A name holds the
    job and `defining_settings` of the point, so that it is the same in every run of the job.
    Raises ResultsError where no point is ok: the action takes no empty list.
    https://github.com/benchmark-action/github-action-benchmark#examples
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
                "extra": f"{run.run_id} {row['point_id']}\n{plain(machine(data))}",
            }
        )
    if not entries:
        raise ResultsError(f"{run.run_id}: no point is ok, so there is no step time to export")
    return json.dumps(entries, indent=2) + "\n"


def export_json(data: RunData) -> str:
    """Return a JSON object of schema_version, run, devices, units and points.

    points: one each, its rounds as one, with all columns and what the report derives. units: column
    of the table `points` -> unit, "" for none; what is derived is not in it.
    """
    return format_object(
        run=asdict(data.run),
        devices=records(data.devices),
        units=column_units("points"),
        points=list(map(vars, data.rows)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JUnitCase:
    """A test case; one that is ok shows no message. All text is made harmless when it is written.

    outcome: `output` is a case that passed with something to say. kind, text: of an error or
    failure, its type and the lines below its message. seconds: None where nobody knows.
    """

    group: str
    name: str
    properties: Mapping[str, object]
    outcome: Literal["ok", "output", "failure", "error", "skipped"] = "ok"
    kind: str = ""
    message: str = ""
    text: str = ""
    seconds: float | None = None


def export_junit(data: RunData) -> str:
    """Return one suite as XML. A point that failed is an error, one that was not run is skipped.

    Its id and figures are its properties (`raybench.units("points")` has most units); `time` is the
    seconds of its last ok round, or its worst one if none is ok; 0 if unknown. In a search for the
    largest batch a point without enough memory passes, and its output says so.
    """
    run, cases = data.run, []
    for point in exported_points(data):
        row = point.row
        reason = point.error or formatting.STATUS_WORDS[row["status"]]
        ended: Literal["ok", "output"] = "ok" if row["status"] == "ok" else "output"
        cases.append(
            JUnitCase(
                group=run.job_name,
                name=point.name,
                properties={"point_id": row["point_id"], **point.figures},
                outcome="error" if point.is_failure else "skipped" if point.was_not_run else ended,
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
    """Return the XML of one suite with these cases in their order, and their counts.

    The form is what the readers of Jenkins and GitLab have in common; there is no standard.
    name, properties: of the suite; its start (in UTC) and host are those of `run`, its time the sum
    of the known seconds, left out without any. Properties are written by `plain`: None is "None".
    https://github.com/testmoapp/junitxml
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
        message = plain(case.message)
        if case.outcome in ("error", "failure"):
            kind = {"type": plain(case.kind), "message": message}
            ET.SubElement(element, case.outcome, kind).text = "\n".join(plain_lines(case.text))
        elif case.outcome == "skipped":
            ET.SubElement(element, "skipped", {"message": message})
        elif case.outcome == "output":
            ET.SubElement(element, "system-out").text = message
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _add_properties(parent: ET.Element, values: Mapping[str, object]) -> None:
    """Append an element `properties` with these names and values."""
    holder = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(holder, "property", {"name": plain(name), "value": plain(value)})


# Name -> returns the text of a run's file.
FORMATS: dict[str, Callable[[RunData], str]] = {
    "csv": export_csv,
    "github-action-benchmark": export_github,
    "json": export_json,
    "junit": export_junit,
}
