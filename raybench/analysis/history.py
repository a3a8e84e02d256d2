"""The step time of a point over many runs, and where it changed its level. Pure.

A step is searched for by binary segmentation (A. J. Scott, M. Knott, "A cluster analysis method
for grouping means in the analysis of variance", Biometrics 30(3), 1974): the place where the runs
before and after differ most is a step if that is too much to be chance, and then either side is
searched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raybench.analysis.rounds import ATTEMPT_COLUMNS, mean_of_rounds
from raybench.analysis.settings import EXECUTION
from raybench.analysis.typed_rows import typed_rows
from raybench.results.point_row import PointRow

# Smaller changes of the step time are none.
THRESHOLD = 0.015
# The chance that a series without a step shows one.
FALSE_STEPS = 0.02
# What `history` reads of the table `points`.
POINT_COLUMNS = (
    *ATTEMPT_COLUMNS,
    *("workload", "params", "scaling"),
    *(*EXECUTION, "world_size", "batch_size", "global_batch_size", "host_bound"),
    *("grad_accumulation", "device_type", "device_name", "node_count"),
    *("step_ms_p50", "step_ms_ci_low", "step_ms_ci_high"),
)
# Runs on other machines are no history of one thing: each has its own.
_MACHINE = ["device_type", "device_name", "node_count"]
# Below this, the differences of neighbours may be the step itself.
_MIN_RUNS = 5
# The efficiency of the median absolute deviation for normal noise, and its scale.
_EFFICIENCY = 0.37
_NORMAL = 1.4826
_TWO_SIDED_95 = 1.96
# Runs that agree to the last digit still differ by as much.
_LEAST_SD = 1e-6

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class HistoryRow(PointRow):
    """A point of a run among those of other runs.

    machine: counts from 0, a number for each model and count of nodes. level_ms: geometric mean of
    the runs between two steps. step: relative change from the level before, in the first run of a
    new level; None in the others.
    """

    machine: int
    level_ms: float
    step: float | None = None


def history_rows(found: pd.DataFrame) -> list[HistoryRow]:
    """Return the rows of what `history` gives."""
    return typed_rows(found, HistoryRow)


def history(points: pd.DataFrame, *, threshold: float = THRESHOLD) -> pd.DataFrame:
    """Find the levels of the ok rows of `points`, by point and in order of time.

    points: rows of the table `points` of any runs, of which POINT_COLUMNS are enough.
    Columns besides those: machine (counts from 0, a number for each model and count of nodes),
    level_ms, the geometric mean of the runs between two steps; step, the relative change from the
    level before, in the first run of a new level, otherwise NaN.
    """
    latest = mean_of_rounds(points)
    ok = latest[(latest["status"] == "ok") & latest["step_ms_p50"].notna()]
    ok = ok.sort_values(["started_at", "run_id"], kind="stable")
    machines = ok.groupby(_MACHINE, dropna=False, sort=False).ngroup()
    ok = ok.assign(machine=machines, level_ms=math.nan, step=math.nan)
    parts = [
        _level(series, threshold) for _, series in ok.groupby(["point_id", "machine"], sort=False)
    ]
    if not parts:
        return ok
    whole = pd.concat(parts).sort_values(["started_at", "run_id"], kind="stable")
    order = {name: place for place, name in enumerate(dict.fromkeys(points["point_id"]))}
    places = whole["point_id"].map(order)
    return whole.iloc[np.argsort(places, kind="stable")].reset_index(drop=True)


def _level(series: pd.DataFrame, threshold: float) -> pd.DataFrame:
    values = np.log(series["step_ms_p50"].to_numpy(np.float64))
    steps_at = find_steps(values, _within(series), threshold)
    firsts = [0, *steps_at, len(values)]
    levels = [values[a:b].mean() for a, b in pairwise(firsts)]
    steps = np.full(len(values), math.nan)
    steps[firsts[1:-1]] = np.expm1(np.diff(levels))
    return series.assign(level_ms=np.exp(np.repeat(levels, np.diff(firsts))), step=steps)


def find_steps(values: Values, within: float, threshold: float) -> list[int]:
    """Find the places where another level begins, in order; none in fewer than five runs.

    values: logarithms of step times, one a run. within: standard deviation that the samples of a
    run alone leave open. threshold: relative; smaller steps are none.
    """
    if len(values) < _MIN_RUNS:
        return []
    # Of the differences of neighbours, of which steps spoil few.
    seen = _NORMAL * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)
    sd, degrees = max(seen, within, _LEAST_SD), _EFFICIENCY * (len(values) - 1)
    found: list[int] = []
    open_ends = [(0, len(values))]
    while open_ends:
        first, end = open_ends.pop()
        place = _largest_step(values[first:end], sd, degrees, threshold)
        if place is not None:
            found.append(first + place)
            open_ends += [(first, first + place), (first + place, end)]
    return sorted(found)


def _largest_step(values: Values, sd: float, degrees: float, threshold: float) -> int | None:
    from scipy.special import stdtr

    count = len(values)
    if count < 2:
        return None
    before = np.arange(1, count)
    sums = np.cumsum(values)[:-1]
    change = (values.sum() - sums) / (count - before) - sums / before
    statistics = np.abs(change) / (sd * np.sqrt(1 / before + 1 / (count - before)))
    place = int(statistics.argmax())
    # Bonferroni: any of the places could have been the largest.
    chance = 2 * float(stdtr(degrees, -statistics[place])) * (count - 1)
    is_large = abs(math.expm1(change[place])) > threshold
    return place + 1 if is_large and chance <= FALSE_STEPS else None


def _within(series: pd.DataFrame) -> float:
    """Return the standard deviation that the samples leave open in the median run."""
    spans = (series["step_ms_ci_high"] / series["step_ms_ci_low"]).to_numpy(np.float64)
    spans = spans[spans > 0]
    return math.log(float(np.median(spans))) / 2 / _TWO_SIDED_95 if len(spans) else 0.0
