"""The step time of a point over many runs, and where it changed its level. Pure.

A step is searched for by binary segmentation (A. J. Scott, M. Knott, "A cluster analysis method
for grouping means in the analysis of variance", Biometrics 30(3), 1974): the place where the runs
before and after differ most is a step if that is too much to be chance, and then either side is
searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raybench.analysis.rounds import ATTEMPT_COLUMNS, mean_of_rounds
from raybench.analysis.rows import EXECUTION
from raybench.records import Status
from raybench.results.tables import PointRow

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


def history(points: Sequence[PointRow], *, threshold: float = THRESHOLD) -> list[HistoryRow]:
    """Return the ok points of all runs with the level of each, by point and in order of time.

    points: of any runs, of which POINT_COLUMNS are enough. threshold: relative; smaller changes are
    no step. A point has a history for each machine; their rows are mixed, in order of time.
    """
    order = {name: place for place, name in enumerate(dict.fromkeys(p.point_id for p in points))}
    ok = [row for row in mean_of_rounds(points) if row.status is Status.OK and row.step_ms_p50]
    ok.sort(key=lambda row: (row.started_at, row.run_id))
    machines: dict[tuple[object, ...], int] = {}
    series: dict[tuple[str, int], list[PointRow]] = {}
    for row in ok:
        key = (row.device_type, row.device_name, row.node_count)
        machine = machines.setdefault(key, len(machines))
        series.setdefault((row.point_id, machine), []).append(row)
    found = []
    for (_, machine), rows in series.items():
        values = np.log([row.step_ms_p50 or math.nan for row in rows])
        spans = [
            row.step_ms_ci_high / row.step_ms_ci_low
            for row in rows
            if row.step_ms_ci_high and row.step_ms_ci_low
        ]
        within = math.log(float(np.median(spans))) / 2 / _TWO_SIDED_95 if spans else 0.0
        firsts = [0, *find_steps(values, within, threshold), len(values)]
        before: float | None = None
        for first, end in pairwise(firsts):
            level = float(values[first:end].mean())
            step = None if before is None else math.expm1(level - before)
            shared: dict[str, Any] = {"machine": machine, "level_ms": math.exp(level)}
            found.append(HistoryRow(**vars(rows[first]), **shared, step=step))
            found += [HistoryRow(**vars(row), **shared) for row in rows[first + 1 : end]]
            before = level
    return sorted(found, key=lambda row: (order[row.point_id], row.started_at, row.run_id))


def find_steps(values: Values, within: float, threshold: float) -> list[int]:
    """Return the places where another level begins, in order; none in fewer than five runs.

    values: logarithms of step times, one a run. within: standard deviation that the samples of a
    run alone leave open. threshold: relative; smaller steps are none.
    """
    from scipy.special import stdtr

    if len(values) < _MIN_RUNS:
        return []
    # Of the differences of neighbours, of which steps spoil few.
    seen = _NORMAL * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)
    sd, degrees = max(seen, within, _LEAST_SD), _EFFICIENCY * (len(values) - 1)
    found: list[int] = []
    open_ends = [(0, len(values))]
    while open_ends:
        first, end = open_ends.pop()
        if (count := end - first) < 2:
            continue
        before, sums = np.arange(1, count), np.cumsum(values[first:end])
        change = (sums[-1] - sums[:-1]) / (count - before) - sums[:-1] / before
        statistics = np.abs(change) / (sd * np.sqrt(1 / before + 1 / (count - before)))
        largest = int(statistics.argmax())
        # Bonferroni: any of the places could have been the largest.
        chance = 2 * float(stdtr(degrees, -statistics[largest])) * (count - 1)
        if abs(math.expm1(change[largest])) > threshold and chance <= FALSE_STEPS:
            place = first + largest + 1
            found.append(place)
            open_ends += [(first, place), (place, end)]
    return sorted(found)
