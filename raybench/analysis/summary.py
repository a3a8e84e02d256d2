"""The table `summary` of a run: one row a point, made from its rows of `points`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from raybench.analysis.rows import ScaledRow, point_rows
from raybench.analysis.scaling import scaling
from raybench.analysis.settings import OPTIONAL
from raybench.errors import ResultsError
from raybench.job.point import RUN_SETTINGS
from raybench.results import reader
from raybench.results.point_row import PointRow
from raybench.results.run import Run
from raybench.results.tables import SummaryRow
from raybench.results.writer import RunStore

# Columns that have another name in `points`.
_SOURCES = {
    "step_ms": "step_ms_p50",
    "throughput_items_per_s": "throughput",
    "exposed_comm_ms": "comm_exposed_ms",
    "data_wait_ms": "data_ms",
    "device_idle_ms": "host_gap_ms",
    "peak_memory_bytes": "peak_mem_allocated_bytes",
    "bus_gb_s": "busbw_gb_s",
}
_MADE = ("job_name", "params_json", "metrics_json")
_COPIED = {
    name: _SOURCES.get(name, name) for name in SummaryRow.__dataclass_fields__ if name not in _MADE
}


def write_summary(store: RunStore, run: Run) -> None:
    """Write the table `summary` of a run, unless its points cannot be read.

    Raises ResultsError where the folder cannot be written.
    """
    try:
        points = point_rows(reader.load(store.root, "points", run.run_id))
    except ResultsError:
        return  # the report of the run names the damaged file
    store.write_summary(summary_rows(run, points))


def summary_rows(run: Run, points: Iterable[PointRow]) -> list[SummaryRow]:
    """Return one row for each point of a run. points: its rows of that table, all attempts."""
    return [
        SummaryRow(
            job_name=run.job_name,
            params_json=json.dumps(_typed_settings(row)),
            metrics_json=json.dumps(dict(row.workload_metrics or {})),
            **{name: getattr(row, source) for name, source in _COPIED.items()},
        )
        for row in scaling(points, run.baseline)
    ]


def _typed_settings(row: ScaledRow) -> dict[str, Any]:
    """Return the parameters with their types, and the settings that are not at their defaults."""
    changed = {
        name: value
        for name in OPTIONAL
        if (value := getattr(row, name)) is not None and value != RUN_SETTINGS[name].default
    }
    return {name: _typed(text) for name, text in row.params.items()} | changed


def _typed(text: str) -> bool | int | float | str:
    """Return the number or truth value that a text of the tables stands for, else the text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    is_number = isinstance(value, bool | int | float) and math.isfinite(value)
    return value if is_number else text
