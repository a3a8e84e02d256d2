"""Speed-up and scaling efficiency of points against the baseline point of their series. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from raybench.point import Precision, Scalar
from raybench.rows import text

# Settings that make a series besides the workload's parameters; the batch of the scaling kind
# joins them. In weak scaling the global batch follows from the others, in strong the local one.
_SETTINGS = ("workload", "scaling", "precision", "cuda_graph", "world_size")
_BATCH = {"weak": "batch_size", "strong": "global_batch_size"}
_DERIVED = {
    "batch": "object",
    "series": "int64",
    "is_baseline": "bool",
    "speed_up": "float64",
    "efficiency": "float64",
    "why": "object",
}


def scaling(points: pd.DataFrame, baseline: Mapping[str, Scalar]) -> pd.DataFrame:
    """The latest attempt at each point, with its speed-up against its series' baseline point.

    points: rows of the table `points`, as `raybench.load` gives them (params are dicts).
    baseline: settings of the baseline points; a series is all points that are equal in every
    other setting (weak: batch_size, strong: global_batch_size; weak and strong apart).

    Columns besides those of `points`: batch (of the scaling kind; None where the workload takes
    none), series (counts from 0), is_baseline, speed_up = throughput / that of the baseline point,
    efficiency = speed_up / (world_size / that of the baseline point), only where the baseline
    names world_size, and why: the reason for which an ok point with a throughput has no speed-up.
    """
    latest = latest_attempts(points)
    rows: list[dict[str, Any]] = [
        {str(name): value for name, value in row.items()} for row in latest.to_dict("records")
    ]
    series: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        row["batch"] = _batch(row)
        row["is_baseline"] = bool(baseline) and all(
            _same(setting(row, name), value) for name, value in baseline.items()
        )
        series.setdefault(_series_key(row, baseline), []).append(row)
    for number, members in enumerate(series.values()):
        _compare(number, members, baseline)
    return _frame(rows, [*latest.columns, *_DERIVED])


def latest_attempts(points: pd.DataFrame) -> pd.DataFrame:
    """The last attempt at each point of each run, in the order of the first ones."""
    ordered = points.sort_values("attempt", kind="stable")
    latest = ordered.drop_duplicates(["run_id", "point_id"], keep="last")
    first = points.drop_duplicates(["run_id", "point_id"])
    return first[["run_id", "point_id"]].merge(latest, on=["run_id", "point_id"], how="left")


def setting(row: Mapping[str, Any], name: str) -> Any:
    """The value of a setting: a column, or a parameter of the workload; None when it has none."""
    return row["params"].get(name) if name not in row else row[name]


def batch_column(row: Mapping[str, Any]) -> str | None:
    """The batch size that the job fixed; None where the workload takes none."""
    return _BATCH.get(row["scaling"])


def _batch(row: Mapping[str, Any]) -> int | None:
    column = batch_column(row)
    return int(row[column]) if column else None


def setting_order(value: Any) -> tuple[int, float, str]:
    """Sort key of settings: numbers by size, precisions from the widest, the rest by name."""
    number = _number(value)
    if number is not None:
        return (0, number, "")
    precisions = [precision.value for precision in Precision]
    return (1, precisions.index(value), "") if value in precisions else (2, 0.0, str(value))


def _series_key(row: Mapping[str, Any], baseline: Mapping[str, Scalar]) -> tuple[Any, ...]:
    names = ("run_id", *_SETTINGS, *filter(None, [batch_column(row)]))
    settings = tuple((name, str(row[name])) for name in names if name not in baseline)
    params = tuple(sorted((k, v) for k, v in row["params"].items() if k not in baseline))
    return (*settings, *params)


def _compare(
    number: int, members: Sequence[dict[str, Any]], baseline: Mapping[str, Scalar]
) -> None:
    """Fill in the derived columns of one series."""
    base = next((row for row in members if row["is_baseline"]), None)
    for row in members:
        why = _why_not(row, base, baseline)
        row |= {"series": number, "speed_up": None, "efficiency": None, "why": why}
        if why is not None or base is None or not _has_throughput(row):
            continue
        row["speed_up"] = row["throughput"] / base["throughput"]
        if "world_size" in baseline:
            row["efficiency"] = row["speed_up"] / (row["world_size"] / base["world_size"])


def _why_not(
    row: Mapping[str, Any], base: Mapping[str, Any] | None, baseline: Mapping[str, Scalar]
) -> str | None:
    """Why an ok point cannot be compared; None when it can, or when there is nothing to compare."""
    if not _has_throughput(row):
        return None
    if not baseline:
        return "the job names no baseline"
    if base is None:
        settings = " ".join(f"{name}={text(value)}" for name, value in baseline.items())
        return f"no ok point with {settings} in this series"
    if base["status"] != "ok":
        return f"baseline point ended {base['status']}"
    if base["device_name"] != row["device_name"]:
        return f"baseline point ran on another device: {base['device_name']}"
    return None if _has_throughput(base) else "baseline point has no throughput"


def _has_throughput(row: Mapping[str, Any]) -> bool:
    return row["status"] == "ok" and not pd.isna(row["throughput"])


def _same(found: Any, wanted: Scalar) -> bool:
    """Equal as text or as numbers: the tables hold parameters as text."""
    if found is None or found != found:
        return False
    if text(found) == text(wanted):
        return True
    number = _number(found)
    return number is not None and number == _number(wanted)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _frame(rows: list[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A frame whose columns and types do not depend on there being rows."""
    return pd.DataFrame(rows, columns=list(columns)).astype(_DERIVED)
