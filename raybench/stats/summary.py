"""Statistics of step times over ranks and repeats, and of starts.

Step times drift with clocks and temperature, so neighbours are correlated. The interval of the
median and the change of level therefore use medians of batches of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

# scipy is imported inside functions: `raybench sweep` starts sooner.

# Fewer samples give no meaningful interval.
MIN_SAMPLES = 6
# n samples are cut into n^0.4 batches, and into 20 at most.
_BATCHES_EXPONENT, _MAX_BATCHES = 0.4, 20
# Wider than 95 %, because neighbouring batches are still slightly correlated.
_BATCH_CONFIDENCE = 0.965
# Ranks are in lockstep if their medians differ by at most 1 %.
_LOCKSTEP = 0.01
# Fewer steps cannot tell a change of level from noise.
MIN_LEVEL_STEPS = 25
# Each third of the steps is cut into batches. Batches of fewer than 3 steps would be correlated.
_MAX_LEVEL_BATCHES, _MIN_BATCH_STEPS = 10, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A 95 % confidence interval, in the unit of the samples."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Location and spread of samples, in their unit."""

    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    # Sample standard deviation (n - 1); 0 for one sample.
    std: float


def summarize(samples: ArrayLike) -> Summary:
    """Return percentiles, which are interpolated, and the standard deviation.

    Raises:
        ValueError: there are no samples.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a summary needs at least one sample")
    low, p50, p90, p95, p99, high = np.percentile(values, [0, 50, 90, 95, 99, 100]).tolist()
    std = float(values.std(ddof=1)) if values.size > 1 else 0.0
    return Summary(p50=p50, p90=p90, p95=p95, p99=p99, min=low, max=high, std=std)


def median_interval(repeats: Sequence[ArrayLike]) -> Interval | None:
    """Return the 95 % interval of the median of all samples, in their unit.

    The method of batch means (A. M. Law, "Simulation modeling and analysis", 2015, section 9.5.3):
    Student's t over the logarithms of the medians of batches. A single repeat is cut into 2 to 20
    batches. If there are several repeats, each repeat is a batch.

    Args:
        repeats: samples in the order in which they were taken.

    Returns:
        None for fewer than `MIN_SAMPLES` samples, and if a sample is not positive.
    """
    series = [np.asarray(samples, dtype=np.float64) for samples in repeats if np.size(samples)]
    values = np.concatenate([[], *series])
    if values.size < MIN_SAMPLES or values.min() <= 0:
        return None
    if len(series) > 1:
        medians = np.asarray([np.median(samples) for samples in series])
    else:
        count = min(_MAX_BATCHES, max(2, round(values.size**_BATCHES_EXPONENT)))
        medians = _batch_medians(values, count)
    logs = np.log(medians)
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    ratio = math.exp(student_t(len(logs) - 1, _BATCH_CONFIDENCE) * error)
    median = float(np.median(values))
    # A ratio instead of a difference keeps the lower end positive.
    return Interval(low=median / ratio, high=median * ratio)


def _batch_medians(samples: ArrayLike, count: int) -> NDArray[np.float64]:
    """Return the medians of `count` equally long batches; the remainder at the start is dropped."""
    series = np.asarray(samples, dtype=np.float64)
    batches = series[len(series) % count :].reshape(count, -1)
    return np.asarray(np.median(batches, axis=1))


def student_t(degrees: float, confidence: float = 0.95) -> float:
    """Return the two-sided quantile of Student's t; NaN for 0 degrees of freedom or fewer."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + confidence) / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelChange:
    """How much the last third of a series differs from the third before it."""

    # Change from the first step to the last, if the series drifts in a straight line: three times
    # the difference of the thirds. Relative to the median; positive for a rise.
    size: float
    # Standard error of `size`, from the scatter of batch medians.
    error: float
    # Degrees of freedom of `error`.
    degrees: int

    def exceeds(self, least: float, errors: float) -> bool:
        """Return whether |size| is above both `least` and `errors` standard errors.

        Args:
            least: threshold relative to the median, as `size` is.
            errors: number of standard errors of a normal distribution; converted to the quantile
                of Student's t with the same probability.
        """
        from scipy.special import ndtr, stdtrit

        critical_t = float(stdtrit(self.degrees, ndtr(errors)))
        return abs(self.size) > max(least, critical_t * self.error)


def level_change(step_ns: Sequence[float]) -> LevelChange | None:
    """Return how the last third of a series of step times differs from the third before it.

    None for fewer than `MIN_LEVEL_STEPS` steps.
    """
    if len(step_ns) < MIN_LEVEL_STEPS:
        return None
    third = len(step_ns) // 3
    batches = min(_MAX_LEVEL_BATCHES, third // _MIN_BATCH_STEPS)
    earlier = _batch_medians(step_ns[-2 * third : -third], batches)
    later = _batch_medians(step_ns[-third:], batches)
    median_ns = float(np.median(step_ns[-2 * third :])) or 1.0
    variance = float(earlier.var(ddof=1) + later.var(ddof=1)) / batches
    # A straight drift over the whole series is three times the difference of neighbouring thirds.
    return LevelChange(
        size=3 * float(later.mean() - earlier.mean()) / median_ns,
        error=3 * math.sqrt(variance) / median_ns,
        degrees=2 * (batches - 1),
    )


def median_step(ranks: Sequence[ArrayLike]) -> float:
    """Return the step time of a point, in the unit of the samples: the median of `step_series`.

    Args:
        ranks: [ranks, iterations].
    """
    return float(np.median(step_series(ranks)))


def step_series(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Return the step time of a point for each iteration, in the unit of the samples.

    If the medians of the ranks agree within 1 % (lockstep), the step time is the median over
    ranks, because the maximum would add jitter. Otherwise the rank with the largest median counts.

    Args:
        ranks: [ranks, iterations].

    Raises:
        ValueError: there are no samples, or ranks have unequal numbers.
    """
    values = _as_array(ranks)
    medians = np.median(values, axis=1)
    is_lockstep = bool(np.ptp(medians) <= _LOCKSTEP * medians.max())
    return np.asarray(np.median(values, axis=0) if is_lockstep else values[medians.argmax()])


def per_iteration_max(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Return the maximum over ranks of each iteration.

    Args:
        ranks: [ranks, iterations].
    """
    return np.asarray(_as_array(ranks).max(axis=0))


def median_skew(ranks: Sequence[ArrayLike]) -> float:
    """Return the median over iterations of the slowest rank minus the fastest rank."""
    return float(np.median(np.ptp(_as_array(ranks), axis=0)))


def median_of_smallest(ranks: Sequence[Sequence[float]]) -> float | None:
    """Return the median over steps of the smallest rank; None if a rank has no steps."""
    return float(np.median(_as_array(ranks).min(axis=0))) if all(ranks) else None


def median_above_smallest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return for each rank the median over steps of its value minus the smallest of any rank."""
    values = _as_array(ranks)
    return [float(median) for median in np.median(values - values.min(axis=0), axis=1)]


def _as_array(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Return an array of [ranks, iterations]; raises ValueError for unequal numbers, or none."""
    counts = sorted({np.size(samples) for samples in ranks})
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"ranks must have samples, and equally many, got {counts}")
    return np.asarray(ranks, dtype=np.float64)


# A start is one set of fresh processes: a round of a run for `raybench report`, a run for `raybench
# compare`. Two or three starts of a point estimate its variance poorly, so this variance is shrunk
# towards the variance of all points (G. K. Smyth, "Linear models and empirical Bayes methods for
# assessing differential expression in microarray experiments", Stat. Appl. Genet. Mol. Biol. 3(1),
# 2004). Points of one start may be correlated, so only independent points add degrees of freedom.

# The other points add at most as many degrees of freedom as the starts of the point itself.
_MAX_ADDED_DEGREES = 1.0
# A point with more than three times the common variance keeps its own variance (B. Phipson et al.,
# "Robust hyperparameter estimation protects against hypervariable genes", Ann. Appl. Stat. 10(2),
# 2016). The factor is by simulation: `python -m benchmarks.simulations.noisy_points`.
_NOISY_FACTOR = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Standard deviation of the logarithms of a point's starts, with its degrees of freedom."""

    sd: float
    degrees: float

    def half_width(self, variance_ratio: float, confidence: float = 0.95) -> float:
        """Return half the width of the confidence interval of a mean or difference, as a logarithm.

        Args:
            variance_ratio: variance of the mean or difference / variance of one start; 1 / n for
                the mean of n starts.
        """
        return student_t(self.degrees, confidence) * self.sd * math.sqrt(variance_ratio)

    def p_value(self, size: float, variance_ratio: float) -> float:
        """Return the one-sided p-value for the claim that a difference is above 0.

        Args:
            size: a difference of logarithms.
            variance_ratio: variance of the difference / variance of one start; 2 for two single
                starts.
        """
        from scipy.special import stdtr

        error = self.sd * math.sqrt(variance_ratio)
        # The limit of the p-value for ever smaller errors.
        if error == 0:
            return 0.5 if size == 0 else float(size < 0)
        return float(stdtr(self.degrees, -size / error))

    def detectable(self, variance_ratio: float, level: float) -> float:
        """Return the difference of logarithms that a one-sided test finds with a power of 95 %.

        Args:
            variance_ratio: variance of the difference / variance of one start; 2 for two single
                starts.
            level: false-positive rate of the test.
        """
        from scipy.special import chdtri, nctdtrinc

        # The sd of few starts is mostly too small: divide by the median of chi-squared instead.
        median_of_chi_squared = chdtri(self.degrees, 0.5)
        median_unbiased_sd = self.sd * math.sqrt(self.degrees / median_of_chi_squared)
        # The one-sided quantile; `student_t` takes a two-sided confidence.
        critical_t = student_t(self.degrees, 1 - 2 * level)
        # The true difference, in standard errors, that the test misses in 5 % of cases.
        noncentrality = float(nctdtrinc(self.degrees, 0.05, critical_t))
        return noncentrality * median_unbiased_sd * math.sqrt(variance_ratio)


def scatter(
    values: NDArray[np.float64], sides: Sequence[int] | None = None
) -> list[Scatter | None]:
    """Return the scatter of the starts of each point, shrunk towards the scatter of all points.

    A point that is much noisier than the other points keeps its own scatter.

    Args:
        values: [points, starts], logarithms of times or rates; NaN if a start lacks a point.
        sides: side of each start in a comparison, whose mean is subtracted; None: a single side.

    Returns:
        None for a point that has fewer than two starts on each side.
    """
    side_of_start = np.zeros(values.shape[1], int) if sides is None else np.asarray(sides)
    residuals = np.full(values.shape, np.nan)
    degrees = np.zeros(len(values))
    for side in np.unique(side_of_start):
        side_values = values[:, side_of_start == side]
        counts = (~np.isnan(side_values)).sum(axis=1)
        means = np.nansum(side_values, axis=1) / np.maximum(counts, 1)
        residuals[:, side_of_start == side] = side_values - means[:, np.newaxis]
        degrees += np.maximum(counts - 1, 0)
    has_degrees = degrees > 0
    scatters: list[Scatter | None] = [None] * len(values)
    if not has_degrees.any():
        return scatters
    residuals, degrees = residuals[has_degrees], degrees[has_degrees]
    variances = np.nansum(residuals**2, axis=1) / degrees
    # Shrink each variance towards the common variance, which adds degrees of freedom.
    common_variance, prior_degrees = _fit_prior(variances, degrees)
    other_points = _independent_points(residuals, variances, degrees) - 1
    prior_degrees = min(prior_degrees, other_points * float(degrees.mean()))
    added_degrees = np.minimum(prior_degrees, _MAX_ADDED_DEGREES * degrees)
    added_degrees[variances > _NOISY_FACTOR * common_variance] = 0.0
    all_degrees = degrees + added_degrees
    shrunk_variances = (degrees * variances + added_degrees * common_variance) / all_degrees
    for index, point in enumerate(np.flatnonzero(has_degrees)):
        sd = math.sqrt(shrunk_variances[index])
        scatters[point] = Scatter(sd=sd, degrees=float(all_degrees[index]))
    return scatters


def _independent_points(
    residuals: NDArray[np.float64], variances: NDArray[np.float64], degrees: NDArray[np.float64]
) -> float:
    """Return the effective number of independent points; `residuals` is [points, starts]."""
    # The mean over n independent points has 1/n of the variance of one point. If a start moves all
    # points alike, their mean has the same variance as one point.
    points_per_start = np.maximum((~np.isnan(residuals)).sum(axis=0), 1)
    means = np.nansum(residuals, axis=0) / points_per_start
    largest_degrees = float(degrees.max())
    variance_of_mean = float(np.nansum(means**2)) / largest_degrees
    if variance_of_mean <= 0:
        return float(len(residuals))
    # Few starts estimate the variance of the mean poorly.
    correction = largest_degrees / (largest_degrees + 1)
    effective = variances.mean() / variance_of_mean * correction
    return float(np.clip(effective, 1, len(residuals)))


def _fit_prior(variances: NDArray[np.float64], degrees: NDArray[np.float64]) -> tuple[float, float]:
    """Return (common variance of all points, its degrees of freedom): Smyth 2004, section 6.2."""
    from scipy.special import digamma, polygamma

    is_positive = variances > 0
    if is_positive.sum() < 2:
        return float(variances.mean()), 0.0
    half_degrees = degrees[is_positive] / 2
    # Logarithms of the variances without their bias: e_g in Smyth 2004.
    logs = np.log(variances[is_positive]) - digamma(half_degrees) + np.log(half_degrees)
    # How much the variances differ beyond what few starts explain.
    excess = float(logs.var(ddof=1) - polygamma(1, half_degrees).mean())
    if excess <= 0:
        return float(variances.mean()), math.inf
    # Solve trigamma(root) = excess by Newton's method: Smyth's appendix.
    root = 0.5 + 1 / excess
    for _ in range(50):
        trigamma = float(polygamma(1, root))
        change = trigamma * (1 - trigamma / excess) / float(polygamma(2, root))
        root += change
        if abs(change) < 1e-8 * root:
            break
    common_variance = float(np.exp(logs.mean() + digamma(root) - math.log(root)))
    return common_variance, 2 * root
