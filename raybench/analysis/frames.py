"""The tables as pandas frames for scripts: `raybench.load` and `raybench.units`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raybench.analysis.rows import EXECUTION, point_rows
from raybench.analysis.scaling import scaling, summary_rows
from raybench.conversion import NS_PER_MS
from raybench.errors import ResultsError
from raybench.job.problems import did_you_mean
from raybench.results import reader, tables
from raybench.results.columns import to_row
from raybench.results.point_row import PointRow
from raybench.results.tables import TABLES

if TYPE_CHECKING:
    import pandas as pd

    from raybench.analysis.compare import ComparedPoint

SCALING, SUMMARY = "scaling", "summary"
_TABLES = (*TABLES, SCALING)
# pandas types that allow nulls, by Arrow type.
_PANDAS_TYPES = {"int64": "Int64", "bool": "boolean", "string": "string", "double": "float64"}
# Columns of `scaling` from the table `points`, and derived columns.
_FROM_POINTS = (
    *("run_id", "point_id", "attempt", "status", "workload", "params", "scaling"),
    *(*EXECUTION, "world_size", "batch_size", "global_batch_size", "grad_accumulation"),
    *("step_ms_p50", "throughput"),
)
_DERIVED = (
    *("baseline_point_id", "speed_up", "speed_up_low", "speed_up_high"),
    *("efficiency", "efficiency_low", "efficiency_high"),
    *("lost_comm", "lost_wait", "lost_compute", "lost_data", "lost_host", "lost_unexplained"),
    *("why_no_losses", "why_not"),
)


def load(
    root: str | Path,
    table: str,
    run_id: str | None = None,
    *,
    params: Literal["dict", "columns"] = "dict",
) -> pd.DataFrame:
    """Return one table as a pandas DataFrame, of all runs or of one run.

    >>> import raybench
    >>> points = raybench.load("results/examples", "points", "gemm", params="columns")
    >>> points[["params.m", "params.n"]].dtypes.astype(str).to_list()
    ['Int64', 'Int64']

    Args:
        root: the results folder.
        table: a stored table (runs, points, samples, devices, telemetry, modules, regions, health),
            or one that is derived from `points`: `scaling` has a row for each point with speed-up,
            efficiency and losses; `summary` has a row for each point of a job with few columns, and
            `params.NAME` and `metrics.NAME`.
        run_id: an id, its unique prefix, the name of a job, `latest`, or a path. None: all runs.
        params: `columns` replaces the column `params`, a dict of texts, by typed columns
            `params.NAME`; only for points and scaling.

    Returns:
        Columns of the current schema; a column that a part lacks is null. The types do not depend
        on the content: Int64, boolean, string, float64, times in UTC, dicts and arrays. Only
        `params.NAME` and `metrics.NAME` have the type of their values. `units` has the units.
        If a driver was killed, samples, modules and regions may have an attempt that has no row in
        points.

    Raises:
        ResultsError: root, table or run does not exist, or the run is damaged. With all runs, a
            damaged run is skipped with a ResultsWarning.
    """
    import pandas as pd
    import pyarrow as pa

    if table not in _TABLES:
        guess = did_you_mean(table, _TABLES)
        raise ResultsError(f"table: must be one of {', '.join(_TABLES)}, got {table!r}{guess}")
    if params == "columns" and table not in ("points", SCALING):
        raise ResultsError(f"params='columns': points and scaling have parameters, {table} has not")
    if table not in (SCALING, SUMMARY):
        # pandas types that have nulls.
        types: dict[Any, Any] = {
            pa.int64(): pd.Int64Dtype(),
            pa.bool_(): pd.BooleanDtype(),
            pa.string(): pd.StringDtype(),
        }
        frame = reader.to_frame(reader.read_table(root, table, run_id), types)
    else:
        folder, run_id = reader.find_run(root, run_id) if run_id else (Path(root), None)
        frame = _scaling(folder, run_id) if table == SCALING else _summary(folder, run_id)
    return _with_param_columns(frame) if params == "columns" else frame


def units(table: str) -> dict[str, str]:
    """Return the unit of each column, in column order; "" for a column without a unit.

    >>> import raybench
    >>> raybench.units("points")["step_ms_p50"]
    'ms'

    The columns `params.NAME` and `metrics.NAME` are left out.

    Args:
        table: a table that `load` returns.

    Raises:
        KeyError: there is no such table.
    """
    if table != SCALING:
        return tables.column_units(table)
    units_of_points = tables.column_units("points")
    return {name: units_of_points.get(name, "") for name in (*_FROM_POINTS, *_DERIVED)}


def timed_samples(samples: pd.DataFrame | Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Return rank, iteration and ms of each timed sample of one repeat.

    Args:
        samples: the table `samples`, or its columns.
    """
    import pandas as pd

    names = ["rank", "iteration", "is_warmup", "step_ns"]
    frame = pd.DataFrame({name: samples[name] for name in names})
    timed = frame[~frame["is_warmup"].astype(bool)].reset_index(drop=True)
    step_ms = timed["step_ns"].astype(float) / NS_PER_MS
    return timed[["rank", "iteration"]].assign(step_ms=step_ms)


_COMPARED = (
    *("point_id", "workload", "params", "precision", "world_size", "batch_size"),
    *("global_batch_size", "status_base", "status_new", "base_runs", "new_runs"),
    *("base_failed", "new_failed", "unit", "base", "new", "change", "change_low", "change_high"),
    *("verdict", "reason"),
)


def compared_frame(rows: Sequence[ComparedPoint], reasons: Mapping[str, str]) -> pd.DataFrame:
    """Return compared points as a frame, with columns `params.NAME`.

    Args:
        reasons: point_id -> why the verdict is unclear.
    """
    import pandas as pd

    records = []
    for row in rows:
        ratios = {
            "change": row.ratio,
            "change_low": row.interval_low,
            "change_high": row.interval_high,
        }
        changes = {name: None if ratio is None else ratio - 1 for name, ratio in ratios.items()}
        records.append({**vars(row), **changes, "reason": reasons.get(row.point_id)})
    frame = pd.DataFrame(records, columns=[*_COMPARED])
    texts = ("point_id", "workload", "precision", "unit", "verdict", "reason")
    counts = ("world_size", "batch_size", "global_batch_size", "base_runs", "new_runs")
    numbers = ("base_failed", "new_failed", "base", "new", "change", "change_low", "change_high")
    statuses = ("status_base", "status_new")
    frame = frame.astype(
        dict.fromkeys((*texts, *statuses), "string")
        | dict.fromkeys(counts, "Int64")
        | dict.fromkeys(numbers, "float64")
    )
    return _with_param_columns(frame)


# Settings of points that are columns of their own; all other settings are parameters.
_SETTINGS = ("workload", "scaling", *EXECUTION, "world_size", "batch_size", "global_batch_size")
_OF_GATE = {
    "point_id": "string",
    "verdict": "string",
    "reason": "string",
    "pairs": "Int64",
    "unit": "string",
    **dict.fromkeys(("old_rate", "new_rate", "change", "low", "high", "detectable"), "float64"),
}


def frame_of_gate(points: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the points of a gate as a frame, with columns for their settings and `params.NAME`.

    Args:
        points: as in the JSON object of the gate.
    """
    import pandas as pd

    rows = []
    names: dict[str, None] = {}
    for point in points:
        settings, why = point["settings"], point["why"]
        params = {name: settings[name] for name in settings if name not in _SETTINGS}
        columns = {name: settings[name] for name in settings if name in _SETTINGS}
        names |= dict.fromkeys(columns)
        reason = why["text"] if why else ""
        rows.append({**point, **columns, "params": params, "reason": reason})
    # With `columns`, a gate that measured no point has the same columns.
    frame = pd.DataFrame(rows, columns=[*names, *_OF_GATE, "params"]).astype(_OF_GATE)
    return _with_param_columns(frame)


def _points_by_run(root: Path, run_id: str | None) -> dict[str, list[PointRow]]:
    """Return the rows of the table `points` by run_id."""
    by_run: dict[str, list[PointRow]] = {}
    for row in point_rows(reader.load_table(root, "points", run_id)):
        by_run.setdefault(row.run_id, []).append(row)
    return by_run


def _scaling(root: Path, run_id: str | None) -> pd.DataFrame:
    """Return the derived table `scaling`, of one run or of all runs."""
    import pandas as pd

    baselines = reader.baselines(root, run_id)
    records = []
    for points_run_id, points in _points_by_run(root, run_id).items():
        # A run without a row in `runs` is left out, because its baseline is unknown.
        if points_run_id not in baselines:
            continue
        rows = scaling(points, baselines[points_run_id])
        # Id of the first baseline point of each series.
        baseline_ids: dict[Any, str] = {}
        for row in rows:
            if row.is_baseline:
                baseline_ids.setdefault(row.series, row.point_id)
        for row in rows:
            derived = {
                "baseline_point_id": baseline_ids.get(row.series),
                "why_not": row.why and row.why.kind,
                "why_no_losses": row.why_no_losses and row.why_no_losses.reason,
            }
            records.append({**vars(row), **derived})
    frame = pd.DataFrame(records, columns=[*_FROM_POINTS, *_DERIVED])
    arrow_types = {column.name: column.kind for column in TABLES["points"]}
    types = {}
    for name in frame.columns:
        # Derived columns are doubles, but for three texts.
        types[name] = _PANDAS_TYPES.get(arrow_types.get(name, "double"), "object")
    texts = ("baseline_point_id", "why_no_losses", "why_not")
    return frame.astype(types | dict.fromkeys(texts, "string"))


def _summary(root: Path, run_id: str | None) -> pd.DataFrame:
    """Return the derived table `summary`, of one run or of all runs, without health checks."""
    import pandas as pd

    runs = reader.read_runs(root) if run_id is None else [reader.read_run(root, run_id)]
    points = _points_by_run(root, run_id)
    rows = []
    for run in runs:
        if not run.is_health_check:
            rows += [to_row(row) for row in summary_rows(run, points.get(run.run_id, []))]
    columns = TABLES[SUMMARY]
    types = {column.name: _PANDAS_TYPES.get(column.kind, "object") for column in columns}
    frame = pd.DataFrame(rows, columns=list(types)).astype(types)
    # Replace each column of JSON objects by a typed column for each of their keys.
    for prefix in ("params", "metrics"):
        objects = [json.loads(text) for text in frame.pop(f"{prefix}_json")]
        arrays = {}
        for name in dict.fromkeys(chain(*objects)):
            # Make an array of each column, because a frame turns integers with nulls into floats.
            arrays[name] = pd.array([values.get(name) for values in objects])
        frame = frame.join(pd.DataFrame(arrays, frame.index).add_prefix(f"{prefix}."))
    return frame


def _with_param_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with a typed column for each parameter in place of `params`."""
    import pandas as pd

    params = pd.DataFrame([texts or {} for texts in frame["params"]], frame.index, dtype="string")
    columns: dict[str, Any] = {}
    for name in sorted(map(str, params.columns)):
        texts = params[name]
        known_texts = texts.dropna()
        numbers = pd.to_numeric(texts, errors="coerce")
        if known_texts.isin(["true", "false"]).all():
            columns[f"params.{name}"] = (texts == "true").astype("boolean").mask(texts.isna())
        # An integer of 18 digits always fits into 64 bits.
        elif known_texts.str.fullmatch(r"[+-]?\d{1,18}").all():
            columns[f"params.{name}"] = numbers.astype("Int64")
        else:
            are_numbers = not numbers[texts.notna()].isna().any()
            columns[f"params.{name}"] = numbers.astype("float64") if are_numbers else texts
    return pd.concat([frame.drop(columns="params"), pd.DataFrame(columns, frame.index)], axis=1)
