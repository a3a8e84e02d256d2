"""Statistics of step times: medians over ranks, intervals, changes of level, and starts. Pure.

Step times drift with clocks and temperature, so neighbours resemble each other and n samples say
less than n independent ones. The interval of the median and the change of level are therefore
taken from the medians of batches of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

# scipy is imported where it is needed: `raybench sweep` starts sooner.

# Below this an interval would say more about the method than about the samples.
MIN_SAMPLES = 6
# n samples are cut into n^0.4 batches, and into 20 at most.
_BATCHES_GROW, _MOST_BATCHES = 0.4, 20
# In place of 95 %: neighbouring batches still resemble each other a little.
_CONFIDENCE = 0.965
# Ranks in lockstep take equally long for a step; their medians differ by noise alone.
_LOCKSTEP = 0.01
# With fewer steps a change of level cannot be told from noise.
MIN_LEVEL_STEPS = 25
# Batches of a third of the steps. Shorter ones than 3 steps would resemble their neighbours.
_MOST_LEVEL_BATCHES, _SHORTEST_BATCH = 10, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A range that holds the true value with 95 % confidence, in the unit of the samples."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Location and spread of samples, in their unit.

    std is the sample standard deviation (n - 1), and 0 for one sample.
    """

    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    std: float


def summarize(samples: ArrayLike) -> Summary:
    """Return location and spread; percentiles are interpolated. Raises ValueError if empty."""
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a summary needs at least one sample")
    low, p50, p90, p95, p99, high = np.percentile(values, [0, 50, 90, 95, 99, 100]).tolist()
    std = float(values.std(ddof=1)) if values.size > 1 else 0.0
    return Summary(p50=p50, p90=p90, p95=p95, p99=p99, min=low, max=high, std=std)


def median_interval(repeats: Sequence[ArrayLike]) -> Interval | None:
    """Return the 95 % interval of the median of all samples, in their unit.

    None for fewer than MIN_SAMPLES samples in all, and if a sample is 0 or negative; NaN at both
    ends if one is NaN. repeats: the samples of each in the order in which they were taken.
    Student's t over the logarithms of the medians of batches: the method of batch means (A. M.
    Law, "Simulation modeling and analysis", 2015, section 9.5.3). Samples within a batch may be
    correlated. One repeat is cut into 2 to 20 batches; of several that are not empty each is one.
    """
    series = [np.asarray(samples, dtype=np.float64) for samples in repeats if np.size(samples)]
    values = np.concatenate([[], *series])
    if values.size < MIN_SAMPLES or values.min() <= 0:
        return None
    count = min(_MOST_BATCHES, max(2, round(values.size**_BATCHES_GROW)))
    medians = [np.median(s) for s in series] if len(series) > 1 else _batch_medians(values, count)
    logs = np.log(medians)
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    ratio = math.exp(student_t(len(logs) - 1, _CONFIDENCE) * error)
    median = float(np.median(values))
    # A ratio instead of a difference keeps the lower end above zero.
    return Interval(low=median / ratio, high=median * ratio)


def _batch_medians(samples: ArrayLike, count: int) -> NDArray[np.float64]:
    """Return the medians of `count` equally long batches, without the first samples that remain."""
    series = np.asarray(samples, dtype=np.float64)
    return np.asarray(np.median(series[len(series) % count :].reshape(count, -1), axis=1))


def student_t(degrees: float, confidence: float = 0.95) -> float:
    """Return the quantile of |T| at `confidence`, T of Student's t; NaN for 0 degrees or fewer."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + confidence) / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelChange:
    """How much the level of a series changes, relative to the median of its last two thirds.

    size: three times the last third less the one before it, which is what a straight drift changes
    from the first step to the last; above 0 for a rise. error: the standard error of `size`, with
    `degrees` degrees of freedom, from the scatter of batch medians within the two thirds.
    """

    size: float
    error: float
    degrees: int

    def exceeds(self, least: float, errors: float) -> bool:
        """Return whether |size| is above both `least` (relative too) and `errors` standard errors.

        `errors` is for a normal distribution (3: by chance in 1 of 370 series); the equally likely
        multiple for Student's t is taken. False if size is NaN.
        """
        from scipy.special import ndtr, stdtrit

        multiple = float(stdtrit(self.degrees, ndtr(errors)))
        return abs(self.size) > max(least, multiple * self.error)


def level_change(step_ns: Sequence[float]) -> LevelChange | None:
    """Return how the last third of a series of step times differs from the third before it.

    None for fewer than MIN_LEVEL_STEPS steps. step_ns: in the order in which they were taken.
    """
    if len(step_ns) < MIN_LEVEL_STEPS:
        return None
    third = len(step_ns) // 3
    count = min(_MOST_LEVEL_BATCHES, third // _SHORTEST_BATCH)
    earlier, later = (
        _batch_medians(part, count) for part in (step_ns[-2 * third : -third], step_ns[-third:])
    )
    level = float(np.median(step_ns[-2 * third :])) or 1.0
    variance = float(earlier.var(ddof=1) + later.var(ddof=1)) / count
    return LevelChange(
        size=3 * float(later.mean() - earlier.mean()) / level,
        error=3 * math.sqrt(variance) / level,
        degrees=2 * (count - 1),
    )


def median_step(ranks: Sequence[ArrayLike]) -> float:
    """Return a point's step time: the median of `step_series`. Unit and errors are as there."""
    return float(np.median(step_series(ranks)))


def step_series(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Return the point's time of each iteration, in the unit of the samples.

    ranks: the samples of each rank. Raises ValueError for no ranks or samples, or unequal numbers.
    If the ranks' medians agree within 1 % (lockstep), it is the median over the ranks: all see the
    same steps, with a jitter of their ends, which their maximum would add. Else it is the time of
    the rank with the largest median.
    """
    values = _by_rank(ranks)
    medians = np.median(values, axis=1)
    in_lockstep = bool(np.ptp(medians) <= _LOCKSTEP * medians.max())
    return np.asarray(np.median(values, axis=0) if in_lockstep else values[medians.argmax()])


def per_iteration_max(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Return the maximum over ranks of each iteration. ranks, and what it raises: `step_series`."""
    return np.asarray(_by_rank(ranks).max(axis=0))


def median_skew(ranks: Sequence[ArrayLike]) -> float:
    """Return the median over iterations of the largest time of any rank less the smallest.

    0 for one rank. ranks, and what it raises: as of `step_series`.
    """
    return float(np.median(np.ptp(_by_rank(ranks), axis=0)))


def median_of_smallest(ranks: Sequence[Sequence[float]]) -> float | None:
    """Return the median over steps of the smallest value of any rank; None if a rank has no steps.

    Raises ValueError for no rank, and else for unequal numbers of steps.
    """
    return float(np.median(_by_rank(ranks).min(axis=0))) if all(ranks) else None


def median_above_smallest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return for each rank, in order, the median over steps of its value less the smallest of any.

    ranks, and what it raises: as of `step_series`.
    """
    values = _by_rank(ranks)
    return [float(median) for median in np.median(values - values.min(axis=0), axis=1)]


def _by_rank(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Return an array of [ranks, iterations]; raises ValueError as `step_series` says."""
    counts = sorted({np.size(samples) for samples in ranks})
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"ranks must have samples, and equally many, got {counts}")
    return np.asarray(ranks, dtype=np.float64)


# How much the starts of a point differ. A start is one set of fresh processes: a round of a run for
# `raybench report`, a run for `raybench compare`. The logarithm of a point's time in a start is the
# level of its side plus an effect of the start, whose variance each point has of its own.
#
# Two or three starts of one point estimate that variance poorly. So it is shrunk towards that of
# all points, the more so the more the points are alike (G. K. Smyth, "Linear models and empirical
# Bayes methods for assessing differential expression in microarray experiments", Stat. Appl. Genet.
# Mol. Biol. 3(1), 2004). Points of one start may all be moved by the same cause, and then together
# say hardly more than one: others add degrees of freedom only as far as they are independent.

# All other points together add at most as many as the point's own starts have.
_MOST_OTHERS = 1.0
# A point with a variance of more than so many times the common level borrows nothing from the
# other points, which would make its interval too narrow. Source: B. Phipson et al.,
# "Robust hyperparameter estimation protects against hypervariable genes", Ann. Appl. Stat. 10(2),
# 2016. The number is by simulation: `python -m benchmarks.simulations.noisy_points`.
_NOISY = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Standard deviation of the logarithms of a point's starts, with its degrees of freedom."""

    sd: float
    degrees: float

    def half_width(self, share: float, confidence: float = 0.95) -> float:
        """Return half the width of the confidence interval of a mean, or of a difference of means.

        It is a logarithm. share: variance of that mean or difference / variance of one start, so
        1 / n for the mean of n starts.
        """
        return student_t(self.degrees, confidence) * self.sd * math.sqrt(share)

    def p_value(self, size: float, share: float) -> float:
        """Return the one-sided p-value of a difference above 0: small for a large positive `size`.

        size: a difference of logarithms. share: variance of the difference / variance of one start,
        2 for two single starts. For a standard deviation of 0 it is 0, 0.5 (size 0) or 1.
        """
        from scipy.special import stdtr

        error = self.sd * math.sqrt(share)
        if error == 0:
            return 0.5 if size == 0 else float(size < 0)
        return float(stdtr(self.degrees, -size / error))

    def detectable(self, share: float, level: float) -> float:
        """Return the true difference that a one-sided test at `level` finds in 95 % of cases.

        By the noncentral t distribution, with a median-unbiased standard deviation.

        Args:
            share: as of `p_value`.
            level: false-positive rate of the test.
        """
        from scipy.special import chdtri, nctdtrinc

        sd = self.sd * math.sqrt(self.degrees / chdtri(self.degrees, 0.5))
        reach = student_t(self.degrees, 1 - 2 * level)
        return float(nctdtrinc(self.degrees, 0.05, reach)) * sd * math.sqrt(share)


def scatter(
    values: NDArray[np.float64], sides: Sequence[int] | None = None
) -> list[Scatter | None]:
    """Return the scatter of each point's starts, in order, shrunk towards that of all points.

    A point that is much noisier than the other points keeps its own scatter. None for a point
    without two starts on any side.

    Args:
        values: [points, starts], logarithms of times or rates; NaN where a start lacks a point.
        sides: the side of each start by number; None: all starts are of one side. Starts of one
            side differ by chance alone, the levels of two sides may differ.
    """
    of_start = np.zeros(values.shape[1], int) if sides is None else np.asarray(sides)
    rest = np.full(values.shape, np.nan)
    degrees = np.zeros(len(values))
    for side in np.unique(of_start):
        chosen = values[:, of_start == side]
        counts = (~np.isnan(chosen)).sum(axis=1)
        means = np.nansum(chosen, axis=1) / np.maximum(counts, 1)
        rest[:, of_start == side] = chosen - means[:, np.newaxis]
        degrees += np.maximum(counts - 1, 0)
    known = degrees > 0
    found: list[Scatter | None] = [None] * len(values)
    if not known.any():
        return found
    rest, degrees = rest[known], degrees[known]
    variances = np.nansum(rest**2, axis=1) / degrees
    level, weight = _fit_prior(variances, degrees)
    others = _independent_points(rest, variances, degrees) - 1
    more = np.minimum(min(weight, others * float(degrees.mean())), _MOST_OTHERS * degrees)
    more[variances > _NOISY * level] = 0.0
    deviations = np.sqrt((degrees * variances + more * level) / (degrees + more))
    for place, sd, both in zip(np.flatnonzero(known), deviations, degrees + more, strict=True):
        found[place] = Scatter(sd=float(sd), degrees=float(both))
    return found


def _independent_points(
    rest: NDArray[np.float64], variances: NDArray[np.float64], degrees: NDArray[np.float64]
) -> float:
    """Return how many independent points would say as much as these do together; 1 or more.

    rest: [points, starts], the values less the mean of their side, NaN where a start lacks a point.
    degrees: of freedom, by point, above 0.

    The mean of n independent points has the n-th part of their variance. Where a start moves all
    points alike, the mean scatters as one point does. With d degrees of freedom the count is
    reduced by d / (d + 1): the mean of few starts often scatters less than it should.
    """
    means = np.nansum(rest, axis=0) / np.maximum((~np.isnan(rest)).sum(axis=0), 1)
    most = float(degrees.max())
    of_mean = float(np.nansum(means**2)) / most
    count = len(rest)
    if of_mean <= 0:
        return float(count)
    return float(np.clip(variances.mean() / of_mean * most / (most + 1), 1, count))


def _fit_prior(variances: NDArray[np.float64], degrees: NDArray[np.float64]) -> tuple[float, float]:
    """Return the common level of the points' variances, and its weight in degrees of freedom.

    By the mean and the variance of their logarithms: Smyth 2004, section 6.2. Infinite degrees
    where the variances differ by no more than chance explains; 0 for fewer than two points.
    """
    from scipy.special import digamma, polygamma

    positive = variances > 0
    if positive.sum() < 2:
        return float(variances.mean()), 0.0
    half = degrees[positive] / 2
    logs = np.log(variances[positive]) - digamma(half) + np.log(half)
    beyond = float(logs.var(ddof=1) - polygamma(1, half).mean())
    if beyond <= 0:
        return float(variances.mean()), math.inf
    # Twice the x with trigamma(x) = beyond, by Newton's method: Smyth's appendix.
    found = 0.5 + 1 / beyond
    for _ in range(50):
        at = float(polygamma(1, found))
        step = at * (1 - at / beyond) / float(polygamma(2, found))
        found += step
        if abs(step) < 1e-8 * found:
            break
    more = 2 * found
    return float(np.exp(logs.mean() + digamma(more / 2) - math.log(more / 2))), more
