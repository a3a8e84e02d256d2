"""The rounds of a run: the last attempt at each trial, and one row for each point. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from raybench.records import Status
from raybench.results.quality import half_interval
from raybench.results.schema import TABLES

Row = dict[str, Any]
_POINT = ["run_id", "point_id"]
# What tells the trials of a point apart; null where there was one round.
_TRIAL = ("round", "control_of")
# What tells the attempts of some runs apart, and what came of them.
ATTEMPT_COLUMNS = (*_POINT, "attempt", *_TRIAL, "status", "started_at")
_KINDS = {column.name: column.kind for column in TABLES["points"]}
# How the rounds of a point become one row, where it is not by their mean, the largest or any of
# them. The times of an attempt are those of the last one. What is loaded by the first process of a
# host has no other that is alike, so of cold steps the median is taken.
_MEDIANS = ("first_step_ms", "compiled_step_ms")
_ENDS_OF_ALL: Mapping[str, Callable[[Sequence[float]], float]] = {
    "step_ms_min": min,
    "step_ms_max": max,
}
_SUMS = ("iterations", "warmup_iterations", "energy_j")
_OF_LAST = ("attempt", "started_at", "duration_s", "round", "error_rank", "models_by_rank")
_ENDS = ("step_ms_ci_low", "step_ms_ci_high")
_WORST_FIRST = tuple(Status)
# A control that moved by more than this is a drift of the machine, and no noise of the step time.
LARGEST_DRIFT = 0.01


def latest_trials(points: pd.DataFrame) -> pd.DataFrame:
    """Select the last attempt at each trial of each run, in the order of the first ones.

    points: rows of that table; of its columns the keys are enough.
    """
    keys = [name for name in (*_POINT, *_TRIAL) if name in points]
    columns = [*_POINT, *points.columns.drop(_POINT)]
    # Of the keys alone: pandas goes through all columns of a frame, however few are asked for.
    is_later = points[keys].duplicated()
    if not is_later.any():
        return points[columns].reset_index(drop=True)
    ordered = points.sort_values("attempt", kind="stable")
    latest = ordered[~ordered[keys].duplicated(keep="last")]
    first = points[~is_later]
    return first[keys].merge(latest, on=keys, how="left")[columns]


def without_controls(trials: pd.DataFrame) -> pd.DataFrame:
    """Select the rows that are a point of the report."""
    if "control_of" not in trials:
        return trials
    return trials[trials["control_of"].isna()].reset_index(drop=True)


def mean_of_rounds(points: pd.DataFrame) -> pd.DataFrame:
    """One row for each point of each run: its last attempt, of several rounds their mean.

    Step times, rates and parts are geometric means over the rounds that are ok, cold steps medians,
    samples are counted together, and a doubt in one round is a doubt. A round that failed is told
    as a warning. The interval of the step time is that of the samples alone. points: as of
    `latest_trials`.
    """
    trials = without_controls(latest_trials(points))
    if not trials[_POINT].duplicated().any():
        return trials
    by_point: dict[tuple[Any, ...], list[Row]] = {}
    for row in records(trials):
        by_point.setdefault(tuple(row[name] for name in _POINT), []).append(row)
    merged = [_merge(rows) for rows in by_point.values()]
    return pd.DataFrame(merged, columns=trials.columns).astype(trials.dtypes.to_dict())


def records(frame: pd.DataFrame) -> list[Row]:
    """List the rows of a frame. By columns, which takes two thirds of "records"."""
    columns = {str(name): values for name, values in frame.to_dict("list").items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _merge(rows: Sequence[Row]) -> Row:
    ok = [row for row in rows if row["status"] == "ok"]
    if not ok:
        return min(rows, key=lambda row: _worst_first(row["status"]))
    merged = {name: _as_one(name, [row[name] for row in ok]) for name in ok[0]}
    if len(ok) > 1 and all(name in merged for name in ("step_ms_p50", *_ENDS)):
        merged |= _interval_of_mean(ok, merged["step_ms_p50"])
    if failed := [row for row in rows if row["status"] != "ok" and "warnings" in row]:
        merged["warnings"] = [*_list(merged["warnings"]), *map(_failure, failed)]
    return merged


def _worst_first(status: str) -> int:
    return _WORST_FIRST.index(Status(status)) if status in _WORST_FIRST else -1


def _as_one(name: str, values: Sequence[Any]) -> Any:
    """Combine the values of a column in several rounds."""
    kind = _KINDS.get(name, "")
    if name in _OF_LAST:
        return values[-1]
    if kind in _OF_CONTAINERS:
        return _OF_CONTAINERS[kind](values)
    if name == "slowest_rank":
        # None stands out in most of the rounds: then none does.
        return Counter(v if _is_known(v) else None for v in values).most_common(1)[0][0]
    known = [value for value in values if _is_known(value)]
    if not known:
        return values[-1]
    if name in _SUMS:
        return sum(known) if len(known) == len(values) else None
    if kind == "bool":
        # The interval holds over the rounds, so one unsteady round of many spoils little.
        return 2 * sum(known) >= len(known) if name == "stable" else any(known)
    if kind == "double":
        return _one_number(name, known)
    if kind == "int64":
        return max(known) if name.endswith("_bytes") else round(float(np.median(known)))
    return known[-1]


def _one_number(name: str, known: Sequence[float]) -> float:
    if name in _ENDS_OF_ALL:
        return _ENDS_OF_ALL[name](known)
    if name in _MEDIANS:
        return float(np.median(known))
    # Geometric, so that a rate is still what a step does over its time.
    is_positive = min(known) > 0
    return float(np.exp(np.mean(np.log(known)))) if is_positive else float(np.mean(known))


def _interval_of_mean(rows: Sequence[Row], mean_ms: float) -> Row:
    """Take the interval of the samples: the rounds are measured apart, so squares add up."""
    if not all(row[name] > 0 for row in rows for name in _ENDS):
        return dict.fromkeys(_ENDS, math.nan)
    down, up = (
        math.hypot(*(math.log(row[name] / row["step_ms_p50"]) for row in rows)) / len(rows)
        for name in _ENDS
    )
    return dict(zip(_ENDS, (mean_ms * math.exp(-down), mean_ms * math.exp(up)), strict=True))


def _mean_by_rank(values: Sequence[Any]) -> list[float] | None:
    known = [list(value) for value in values if value is not None and np.ndim(value)]
    return [float(mean) for mean in np.mean(known, axis=0)] if known else None


def _mean_by_name(values: Sequence[Any]) -> dict[str, float] | None:
    known = [value for value in values if isinstance(value, Mapping)]
    names = dict.fromkeys(name for value in known for name in value)
    means = {n: float(np.mean([value[n] for value in known if n in value])) for n in names}
    return means if known else None


def _union(values: Sequence[Any]) -> list[Any] | None:
    known = [value for value in values if value is not None and np.ndim(value)]
    return list(dict.fromkeys(one for value in known for one in value)) if known else None


_OF_CONTAINERS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "list<double>": _mean_by_rank,
    "list<string>": _union,
    "map<string,double>": _mean_by_name,
}


def _list(value: Any) -> list[Any]:
    return [] if value is None or not np.ndim(value) else list(value)


def _failure(row: Row) -> str:
    reason = row.get("error_message") or "no reason known"
    return f"round {row['round']:.0f} ended {row['status']}: {reason}"


def _is_known(value: Any) -> bool:
    return value is not None and not (np.ndim(value) == 0 and pd.isna(value))


class Trials:
    """The ok trials of some runs, by point and round, and their controls."""

    def __init__(self, points: pd.DataFrame) -> None:
        self._rounds: dict[tuple[str, str], dict[int, Row]] = {}
        self._controls: dict[tuple[str, int, int], Row] = {}
        for row in records(latest_trials(points)):
            number, block = (_number(row.get(name)) for name in _TRIAL)
            if row["status"] != "ok":
                continue
            if block is None:
                of_point = self._rounds.setdefault((row["run_id"], row["point_id"]), {})
                of_point[number or 1] = row
            else:
                self._controls[row["run_id"], number or 1, block] = row

    def rounds(self, row: Mapping[str, Any]) -> dict[int, Row]:
        """Get the rows of a point, by round."""
        return self._rounds.get((row["run_id"], row["point_id"]), {})

    def log_ratios(self, base: Mapping[str, Any], row: Mapping[str, Any]) -> dict[int, float]:
        """Round -> logarithm of the ratio of the two throughputs, in the rounds that both have.

        The baseline point of another block is taken half way between its own time and that of the
        control at the end of the block: both stand at an end of what the machine drifted.
        """
        of_base, of_row = self.rounds(base), self.rounds(row)
        return {
            number: math.log(of_row[number]["throughput"] / of_base[number]["throughput"])
            - self._half_drift(number, of_base[number], of_row[number])
            for number in of_row
            if number in of_base
            and of_row[number]["throughput"] > 0
            and of_base[number]["throughput"] > 0
        }

    def _half_drift(self, number: int, base: Row, row: Row) -> float:
        if base["world_size"] == row["world_size"]:
            return 0.0
        return self._drift((row["run_id"], number, int(row["world_size"]))) / 2

    def _drift(self, block: tuple[str, int, int]) -> float:
        """By what a control is faster than its point in the same round; 0 where that is unknown."""
        control = self._controls.get(block)
        first = None if control is None else self.rounds(control).get(block[1])
        if control is None or first is None:
            return 0.0
        return math.log(first["step_ms_p50"] / control["step_ms_p50"])

    def drifts(self) -> Iterator[tuple[int, int, float]]:
        """(round, block, relative change of the step time) of the controls that moved.

        By more than LARGEST_DRIFT, and than the samples of the two leave open.
        """
        for (run_id, number, block), control in self._controls.items():
            drift = -self._drift((run_id, number, block))
            first = self.rounds(control).get(number, control)
            unsure = math.hypot(half_interval(first) or 0.0, half_interval(control) or 0.0)
            if abs(drift) > max(LARGEST_DRIFT, unsure):
                yield number, block, math.expm1(drift)


def _number(value: Any) -> int | None:
    return int(value) if _is_known(value) else None
