"""Results as one JSON object each, for other programs: no NaN, times in ISO 8601, no rounding."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from enum import Enum
from typing import Any

import pandas as pd

from raybench.report.summary import Summary
from raybench.report.text.points import PointDetails
from raybench.results.columns import SCHEMA_VERSION
from raybench.results.run import Run
from raybench.results.tables import TABLES, units

_INTEGERS = {
    column.name for columns in TABLES.values() for column in columns if column.kind == "int64"
}


def format_report(summary: Summary) -> str:
    """Write the report of a run.

    Members: run, machine, lead, lost_nodes, points (all columns and those of
    `raybench.analysis.scaling`), largest_batches, failures, warnings, plus_minus (what intervals
    hold over), more_rounds (what they would cost and give), regions (of the step, by point).
    """
    return format_object(
        run=asdict(summary.run),
        machine=summary.machine,
        lead=summary.lead,
        lost_nodes=list(summary.lost_nodes),
        points=[vars(row) for row in summary.scaling],
        largest_batches=[asdict(one) for one in summary.largest_batches],
        failures=[asdict(group) for group in summary.failures],
        warnings=[asdict(group) for group in summary.warnings],
        plus_minus=summary.plus_minus,
        more_rounds=asdict(summary.more_rounds) if summary.more_rounds else None,
        regions={key: list(map(vars, found)) for key, found in summary.regions.items()},
    )


def format_runs(runs: Sequence[Run]) -> str:
    """All runs, oldest first."""
    return format_object(runs=[asdict(run) for run in runs])


def format_point(point: PointDetails) -> str:
    """Write the latest attempt at a point and the rows of all attempts.

    With its ranks, modules and regions, the states of devices, and its traces.
    """
    return format_object(
        point=vars(point.row),
        ranks=records(point.ranks),
        modules=records(point.modules),
        regions=list(map(vars, point.regions)),
        devices=records(point.states),
        traces=list(point.traces),
        attempts=list(map(vars, point.attempts)),
    )


def format_object(**members: Any) -> str:
    """One object that tells its schema version. ASCII alone: nothing in it controls a terminal."""
    content = _jsonable({"schema_version": SCHEMA_VERSION, **members})
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Make one object per row of a table.

    Integers are integers, also where pandas made floats of them because another row has none.
    """
    return [
        {
            str(name): int(value)
            if name in _INTEGERS and isinstance(value, float) and value == value
            else value
            for name, value in row.items()
        }
        for row in frame.to_dict("records")
    ]


def plain_rows(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Make one object per dataclass, of values that JSON can hold: times are ISO 8601."""
    return [_jsonable(vars(row)) for row in rows]


def _jsonable(value: Any) -> Any:
    """Make a value that json can write; NaN, NaT, NA and infinities become null, arrays lists."""
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return _jsonable(value.tolist())
    if value is pd.NaT or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value.isoformat() if isinstance(value, datetime) else value


def export_json(summary: Summary, devices: pd.DataFrame) -> str:
    """Write a run with its points for other programs.

    Members: run, devices, units of the columns of points, and points: the latest attempts, all
    columns and what the report derives.
    """
    return format_object(
        run=asdict(summary.run),
        devices=records(devices),
        units=units("points"),
        points=[vars(row) for row in summary.scaling],
    )
