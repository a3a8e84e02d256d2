"""The step time of a point over many runs, and where it changed its level. Pure.

A step is searched for by binary segmentation (A. J. Scott, M. Knott, "A cluster analysis method
for grouping means in the analysis of variance", Biometrics 30(3), 1974): the place where the runs
before and after differ most is a step if that is too much to be chance, and then either side is
searched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raybench.analysis.rounds import ATTEMPT_COLUMNS, mean_of_rounds, records
from raybench.analysis.settings import EXECUTION
from raybench.analysis.start_noise import StartNoise, prior_noise

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

Values = NDArray[np.float64]


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
    rows = records(series)
    sd, degrees = series_noise(prior_noise(rows), rows, values)
    firsts = [0, *find_steps(values, sd, degrees, threshold), len(values)]
    levels = [values[a:b].mean() for a, b in pairwise(firsts)]
    steps = np.full(len(values), math.nan)
    steps[firsts[1:-1]] = np.expm1(np.diff(levels))
    return series.assign(level_ms=np.exp(np.repeat(levels, np.diff(firsts))), step=steps)


def find_steps(values: Values, sd: float, degrees: float, threshold: float) -> list[int]:
    """Find the places where another level begins, in order.

    values: logarithms of step times. sd: of the noise of one value, estimated with `degrees`
    degrees of freedom. threshold: relative; smaller steps are none.
    """
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


def series_noise(
    prior: StartNoise, rows: Sequence[Mapping[str, Any]], values: Values
) -> tuple[float, float]:
    """Estimate the standard deviation of a run's logarithm, with its degrees of freedom.

    rows: of `points`, in order of time. values: logarithms of their step times. As documented for
    starts, with what the intervals of the runs tell; and where there are enough runs, from the
    differences of neighbours, of which steps spoil few.
    """
    spans = np.array([row["step_ms_ci_high"] / row["step_ms_ci_low"] for row in rows])
    spans = spans[~np.isnan(spans)]
    within = math.log(float(np.median(spans))) / 2 / _TWO_SIDED_95 if len(spans) else 0.0
    variance, degrees = prior.sd**2 + within**2, prior.degrees
    if len(values) < _MIN_RUNS:
        return math.sqrt(variance), degrees
    seen = (_NORMAL * float(np.median(np.abs(np.diff(values))))) ** 2 / 2
    more = _EFFICIENCY * (len(values) - 1)
    return math.sqrt((degrees * variance + more * seen) / (degrees + more)), degrees + more
