"""Find the runs at which the step time of a point changes its level.

Candidates come from binary segmentation (A. J. Scott, M. Knott, "A cluster analysis method for
grouping means in the analysis of variance", Biometrics 30(3), 1974). The weakest candidate is
removed until chance explains none.

Runs of neighbouring days are correlated. The t test therefore uses the effective sample size (H.
von Storch, F. W. Zwiers, "Statistical Analysis in Climate Research", 1999, section 6.6).
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Largest p-value of a change of level.
# docs/explanation/statistics.md has the simulated rate of false changes for correlated runs.
MAX_P_VALUE = 0.005
# One or two slow runs are outliers, and not a level.
MIN_RUNS_OF_LEVEL = 3
_RUNS_PER_CANDIDATE = 10
# Lower bound of the standard deviation, for runs that agree to the last digit.
_MIN_SD = 1e-6
# At a correlation of 1, the effective sample size would be 0.
_MAX_CORRELATION = 0.95

Floats = NDArray[np.float64]


def find_level_starts(values: Floats, sample_sd: float, threshold: float) -> list[int]:
    """Return the ascending indices at which a new level begins; the first level is left out.

    Args:
        values: logarithms of the step times of one point, one per run, in the order of time.
        sample_sd: standard deviation of a value, from the samples of its run; 0 if unknown.
        threshold: smaller relative changes are ignored, 0.015 for 1.5 %.
    """
    starts = _candidate_starts(values)
    # Remove changes that chance explains, the weakest first.
    while starts:
        sd, degrees = _independent_noise(values, starts, sample_sd)
        t_values = _t_values(values, starts, sd)
        weakest = int(t_values.argmin())
        if _p_value(float(t_values[weakest]), degrees, len(values)) <= MAX_P_VALUE:
            break
        del starts[weakest]
    # Remove changes that outliers cause.
    while caused_by_outliers := _starts_of_short_levels(values, starts):
        starts.remove(caused_by_outliers[0])
    # Remove changes that are too small to matter, the smallest first.
    while starts:
        sizes = np.abs(np.expm1(_level_differences(values, starts)))
        if sizes.min() > threshold:
            break
        del starts[int(sizes.argmin())]
    return starts


def _candidate_starts(values: Floats) -> list[int]:
    """Return the indices of repeated splits that explain most: binary segmentation."""
    most_starts = 1 + len(values) // _RUNS_PER_CANDIDATE
    starts: list[int] = []
    while len(starts) < most_starts:
        bounds = [0, *starts, len(values)]
        splits = [_best_split(values, first, end) for first, end in pairwise(bounds)]
        explained, best_start = max(splits)
        # Negative: all levels are too short for a split.
        if explained < 0:
            break
        starts = sorted([*starts, best_start])
    return starts


def _starts_of_short_levels(values: Floats, starts: list[int]) -> list[int]:
    """Return the starts at which a level of one or two runs would fit better."""
    bounds = [0, *starts, len(values)]
    short = []
    for index, start in enumerate(starts):
        # The levels before and after this start.
        first, end = bounds[index], bounds[index + 2]
        _, best = _best_split(values, first, end, min_runs=1)
        if best != start and min(best - first, end - best) < MIN_RUNS_OF_LEVEL:
            short.append(start)
    return short


def _best_split(
    values: Floats, first: int, end: int, min_runs: int = MIN_RUNS_OF_LEVEL
) -> tuple[float, int]:
    """Return (sum of squares that the best split of the range explains, index of the split)."""
    # Numbers of values before and after each possible split.
    before = np.arange(min_runs, end - first - min_runs + 1)
    # -1: the range is too short for a split.
    if not len(before):
        return -1.0, first
    after = end - first - before
    sums = np.cumsum(values[first:end])
    sums_before = sums[before - 1]
    changes = (sums[-1] - sums_before) / after - sums_before / before
    explained = changes**2 / (1 / before + 1 / after)
    best = int(explained.argmax())
    return float(explained[best]), first + int(before[best])


def _independent_noise(values: Floats, starts: list[int], sample_sd: float) -> tuple[float, float]:
    """Return the standard deviation per independent run, and its degrees of freedom."""
    levels = np.split(values, starts)
    residuals = np.concatenate([level - level.mean() for level in levels])
    squares = float((residuals**2).sum())
    # Correlation of a run with the run before it.
    correlation = float((residuals[1:] * residuals[:-1]).sum()) / squares if squares else 0.0
    # Correct its bias, (1 + 3 correlation) / n for each fitted mean: M. G. Kendall, "Note on bias
    # in the estimation of autocorrelation", Biometrika 41, 1954.
    correlation += len(levels) * (1 + 3 * correlation) / len(values)
    correlation = min(max(correlation, 0.0), _MAX_CORRELATION)
    runs_per_independent_run = (1 + correlation) / (1 - correlation)
    degrees = len(values) - len(levels)
    sd = max(math.sqrt(squares / degrees), sample_sd, _MIN_SD)
    effective_degrees = max(1.0, degrees / runs_per_independent_run)
    return sd * math.sqrt(runs_per_independent_run), effective_degrees


def _level_differences(values: Floats, starts: list[int]) -> Floats:
    """Return at each start the mean of the new level minus the mean of the level before."""
    return np.diff([level.mean() for level in np.split(values, starts)])


def _t_values(values: Floats, starts: list[int], sd: float) -> Floats:
    """Return the size of each change divided by its standard error."""
    runs = np.diff([0, *starts, len(values)])
    errors = sd * np.sqrt(1 / runs[:-1] + 1 / runs[1:])
    return np.asarray(np.abs(_level_differences(values, starts)) / errors)


def _p_value(t_value: float, degrees: float, runs: int) -> float:
    """Return the p-value of the largest change in a series; an upper bound that may exceed 1."""
    from scipy.special import stdtr

    # Bonferroni: the level could have changed at any run but the first.
    return 2 * float(stdtr(degrees, -t_value)) * (runs - 1)
