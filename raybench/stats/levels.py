"""Find the runs at which a series of step times changes its level.

Candidates come from binary segmentation (A. J. Scott, M. Knott, "A cluster analysis method for
grouping means in the analysis of variance", Biometrics 30(3), 1974). The weakest candidate is
removed until every remaining step is larger than chance explains.

Runs of neighbouring days are correlated. The t test therefore uses the effective sample size (H.
von Storch, F. W. Zwiers, "Statistical Analysis in Climate Research", 1999, section 6.6).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# Probability of a false step in a series of independent normal values.
# docs/explanation/statistics.md has the simulated probability for correlated runs.
FALSE_STEPS = 0.005
# Shortest level: one or two slow runs are outliers.
LEAST_RUNS = 3
# Every ten runs allow another candidate.
_RUNS_PER_CANDIDATE = 10
# Lower bound of the noise, for runs that agree to the last digit.
_LEAST_SD = 1e-6
# Upper bound of the correlation of neighbouring runs; at 1 no run would be independent.
_MOST_MEMORY = 0.95

Floats = NDArray[np.float64]


def find_steps(values: Floats, within: float, threshold: float) -> list[int]:
    """Return the ascending indices at which a new level begins.

    Args:
        values: logarithms of step times, one per run, in the order of time.
        within: standard deviation of a value, estimated from the samples of its run; 0 if unknown.
        threshold: smaller relative changes are ignored, 0.015 for 1.5 %.
    """
    places = _candidates(values)
    # Remove steps that chance explains, the weakest first.
    while places:
        sd, degrees = _noise(values, places, within)
        strengths = _strengths(values, places, sd)
        weakest = int(strengths.argmin())
        if _chance(float(strengths[weakest]), degrees, len(values)) <= FALSE_STEPS:
            break
        del places[weakest]
    # Remove steps that outliers cause.
    while short := _with_short_levels(values, places):
        places.remove(short[0])
    # Remove steps that are too small to matter.
    while places:
        sizes = np.abs(np.expm1(_changes(values, places)))
        if sizes.min() > threshold:
            break
        del places[int(sizes.argmin())]
    return places


def _candidates(values: Floats) -> list[int]:
    """Return the places of the best splits, one after another: binary segmentation."""
    most_places = 1 + len(values) // _RUNS_PER_CANDIDATE
    places: list[int] = []
    while len(places) < most_places:
        ends = [0, *places, len(values)]
        splits = [_best_split(values, ends[i], ends[i + 1]) for i in range(len(ends) - 1)]
        explained, best = max(splits)
        if explained < 0:
            break
        places = sorted([*places, best])
    return places


def _with_short_levels(values: Floats, places: list[int]) -> list[int]:
    """Return the places where a level of one or two runs would fit better."""
    ends = [0, *places, len(values)]
    short = []
    for split, first, end in zip(places, ends[:-2], ends[2:], strict=True):
        _, best = _best_split(values, first, end, least=1)
        if best != split and min(best - first, end - best) < LEAST_RUNS:
            short.append(split)
    return short


def _best_split(values: Floats, first: int, end: int, least: int = LEAST_RUNS) -> tuple[float, int]:
    """Return the sum of squares that the best split explains, and its place.

    The sum is -1 if there is no split.

    Args:
        first: index of the first value of the range to split.
        end: index after its last value.
        least: least number of values on each side.
    """
    # Numbers of values before and after each possible split.
    before = np.arange(least, end - first - least + 1)
    if not len(before):
        return -1.0, first
    after = end - first - before
    sums = np.cumsum(values[first:end])
    sums_before = sums[before - 1]
    changes = (sums[-1] - sums_before) / after - sums_before / before
    explained = changes**2 / (1 / before + 1 / after)
    best = int(explained.argmax())
    return float(explained[best]), first + int(before[best])


def _noise(values: Floats, places: list[int], within: float) -> tuple[float, float]:
    """Return the standard deviation of an independent run, and its degrees of freedom."""
    levels = np.split(values, places)
    residuals = np.concatenate([level - level.mean() for level in levels])
    squares = float((residuals**2).sum())
    # The memory is the correlation of a run with the run before it.
    memory = float((residuals[1:] * residuals[:-1]).sum()) / squares if squares else 0.0
    # Correct the bias, (1 + 3 memory) / n for each fitted mean: M. G. Kendall, "Note on bias in the
    # estimation of autocorrelation", Biometrika 41, 1954.
    memory += len(levels) * (1 + 3 * memory) / len(values)
    memory = min(max(memory, 0.0), _MOST_MEMORY)
    # Correlated runs count as fewer independent runs.
    inflation = (1 + memory) / (1 - memory)
    degrees = len(values) - len(levels)
    sd = max(math.sqrt(squares / degrees), within, _LEAST_SD)
    return sd * math.sqrt(inflation), max(1.0, degrees / inflation)


def _changes(values: Floats, places: list[int]) -> Floats:
    """Return the change of the level at each place."""
    return np.diff([level.mean() for level in np.split(values, places)])


def _strengths(values: Floats, places: list[int], sd: float) -> Floats:
    """Return the size of each step over its standard error."""
    runs = np.diff([0, *places, len(values)])
    errors = sd * np.sqrt(1 / runs[:-1] + 1 / runs[1:])
    return np.asarray(np.abs(_changes(values, places)) / errors)


def _chance(strength: float, degrees: float, runs: int) -> float:
    """Return an upper bound of the probability that noise causes such a step."""
    from scipy.special import stdtr

    # Bonferroni: the step could have been at any of the places.
    return 2 * float(stdtr(degrees, -strength)) * (runs - 1)
