"""Find slow ranks of a point, and slow devices, links or nodes of a fleet.

Ranks are compared by their steps without communication, or else by the timed steps
(docs/explanation/numbers.md). The subjects of a health test are compared with the median of their
peers, or a few subjects with the fastest (docs/explanation/health.md).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import NormalDist, fmean, median, stdev, variance

import numpy as np
from numpy.typing import NDArray

from raybench.stats.summary import student_t

# The steps of a rank in ms. Each block has consecutive steps; other work lies between blocks.
Blocks = Sequence[Sequence[float]]

# A rank is slow if its excess is above both 2 % of the step and three standard errors.
MARK_SHARE = 0.02
MARK_ERRORS = 3.0
# A part of an excess that has at least this share is reported as the whole excess.
NEARLY_ALL = 0.75
# Two-sided probability of more than three standard errors: 0.27 %.
_FALSE_ALARMS_OF_RANKS = 2 * NormalDist().cdf(-MARK_ERRORS)
# Hosts are noisy, so their standard error is large. More false alarms keep slow hosts visible.
_FALSE_ALARMS_OF_HOSTS = 0.01
# Standard error of the median / standard error of the mean, for normal samples.
_MEDIAN_FACTOR = math.sqrt(math.pi / 2)
# Standard deviation of normal samples / their median absolute deviation (MAD), and the statistical
# efficiency of the MAD (P. J. Rousseeuw, C. Croux, J. Am. Stat. Assoc. 88(424), 1993).
_MAD_FACTOR, _MAD_EFFICIENCY = 1.4826, 0.37
# With fewer steps, the MAD may be far too small.
_MIN_STEPS_OF_MAD = 6
# A part has three steps or more, so that its median ignores one stall.
_MAX_PARTS, _MIN_STEPS_OF_PART = 6, 3
# Eight windows of three steps fit into the 30 steps that most points have.
_WINDOWS, _MIN_STEPS_OF_WINDOW = 8, 3
# A few seconds of steps underestimate slow fluctuations. The factor comes from a simulation,
# docs/results.md.
_SLOW_FLUCTUATIONS = 1.3
# Fewer ranks do not show how much ranks differ.
_MIN_RANKS_OF_GRUBBS = 6
# One rank in eight may be slow together with the slowest, for example on the same host, so the
# largest eighth is left out. This reduces the standard deviation of normal values by 1.22.
_RANKS_PER_SLOW_RANK, _TRUNCATION_FACTOR = 8, 1.22


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The slowest rank compared with a typical rank, whether it stands out or not.

    Ranks are indices of the compared list.
    """

    # The rank with the largest median step.
    rank: int
    # The typical rank: the lower median of the ranks without the slowest.
    other: int
    # Median of `rank` minus median of `other`.
    excess_ms: float
    # Standard error of `excess_ms`.
    error_ms: float


def find_straggler(ranks: Sequence[Blocks]) -> Straggler | None:
    """Compare the slowest rank with a typical rank; None for fewer than two ranks or steps.

    The standard error is the largest of three estimates, so that a rank with a few slow steps does
    not stand out.

    Args:
        ranks: the steps of each rank in ms, in blocks.
    """
    series = [list(chain(*blocks)) for blocks in ranks]
    least_steps = min(map(len, series), default=0)
    if len(series) < 2 or least_steps < 2:
        return None
    rank, other = slowest_and_other([median(steps) for steps in series])
    excess_ms = median(series[rank]) - median(series[other])
    # The standard error if all steps were independent.
    independent_ms = math.hypot(median_error(series[rank]), median_error(series[other]))
    # The pace of a host changes within tenths of a second, so neighbouring steps are correlated.
    # Compare the medians of parts, which are nearly independent.
    parts = max(1, min(_MAX_PARTS, least_steps // _MIN_STEPS_OF_PART))
    medians_of_parts = [list(map(median, _cut(steps, parts))) for steps in series]
    correlated_ms = 0.0
    if parts > 2:
        # Use numpy, because statistics.variance takes 0.1 ms a rank. Use the median over ranks,
        # because one stall must not hide a slow rank.
        typical_variance = float(np.median(np.var(medians_of_parts, axis=1, ddof=1)))
        error_of_difference_ms = math.sqrt(2 * typical_variance / parts)
        # `stands_out` multiplies the result by MARK_ERRORS, which is three.
        critical_t = student_t(len(series) * (parts - 1), 1 - _FALSE_ALARMS_OF_RANKS)
        correlated_ms = critical_t / MARK_ERRORS * error_of_difference_ms
    pairs = zip(medians_of_parts[rank], medians_of_parts[other], strict=True)
    smallest_excess_ms = min(slow_ms - other_ms for slow_ms, other_ms in pairs)
    # The factor makes the excess exceed three errors only if each part shows half of the excess.
    uneven_ms = (excess_ms - smallest_excess_ms) * 2 / MARK_ERRORS
    error_ms = max(independent_ms, correlated_ms, uneven_ms)
    return Straggler(rank=rank, other=other, excess_ms=excess_ms, error_ms=error_ms)


def slowest_and_other(medians: Sequence[float]) -> tuple[int, int]:
    """Return the index of the largest value, and of the lower median of all other values.

    Raises:
        ValueError: fewer than two values.
    """
    if len(medians) < 2:
        raise ValueError("one rank has no others")
    slowest = max(range(len(medians)), key=lambda rank: medians[rank])
    others = sorted((ms, rank) for rank, ms in enumerate(medians) if rank != slowest)
    _, middle_rank = others[(len(others) - 1) // 2]
    return slowest, middle_rank


def stands_out(excess_ms: float, error_ms: float, step_ms: float) -> bool:
    """Return whether an excess is above both 2 % of the step and three standard errors."""
    return excess_ms > max(MARK_SHARE * step_ms, MARK_ERRORS * error_ms)


def confirmed_excess_ms(excess_ms: float, unexplained_ms: float | None) -> float:
    """Return the part of an excess that the timed steps confirm; it may be negative.

    If the parts of a step add up to more than the timed step, the excess is reduced by as much.

    Args:
        unexplained_ms: the timed step minus its parts; None if unknown.
    """
    return excess_ms + min(0.0, unexplained_ms or 0.0)


def median_error(steps: Sequence[float]) -> float:
    """Return the standard error of the median, by the median absolute deviation (MAD).

    For two to five steps the standard deviation is used if it is larger. The error of a single
    step is 0.
    """
    middle = median(steps)
    # The MAD of few steps is too small: C. Croux, P. J. Rousseeuw, "Time-efficient algorithms for
    # two highly robust estimators of scale", Computational Statistics 1, 1992.
    correction = len(steps) / (len(steps) - 0.8)
    deviation = correction * _MAD_FACTOR * median(abs(ms - middle) for ms in steps)
    if 1 < len(steps) < _MIN_STEPS_OF_MAD:
        deviation = max(deviation, stdev(steps))
    return _MEDIAN_FACTOR * deviation / math.sqrt(len(steps))


def late_in_turn_ms(ranks: Sequence[Blocks]) -> float | None:
    """Return how much longer a step takes because different ranks are late at different times.

    This is the median over steps of the maximum over ranks, minus the largest median of a rank.

    Args:
        ranks: the steps of each rank in ms, in blocks. The n-th steps of all ranks are one step.

    Returns:
        None for fewer than two ranks, for unequal numbers of steps, or without steps.
    """
    series = [list(chain(*blocks)) for blocks in ranks]
    counts = {len(steps) for steps in series}
    if len(series) < 2 or len(counts) > 1 or not all(series):
        return None
    median_of_latest_ms = np.median(np.max(series, axis=0))
    latest_median_ms = np.median(series, axis=1).max()
    return max(0.0, float(median_of_latest_ms - latest_median_ms))


def host_error_ms(ranks: Sequence[Blocks], step_series_ms: Sequence[Sequence[float]]) -> float:
    """Return a third of the largest difference between two hosts that chance explains, in ms.

    For six or more ranks, the result comes from the differences between ranks: Grubbs' test (F. E.
    Grubbs, "Procedures for detecting outlying observations in samples", Technometrics 11(1), 1969).
    For fewer ranks, it comes from the fluctuations of the timed steps.

    Args:
        ranks: the steps of each rank without communication in ms, in blocks.
        step_series_ms: the timed steps of the point, a series per repeat.
    """
    if len(ranks) < _MIN_RANKS_OF_GRUBBS:
        confidence = 1 - 2 * _FALSE_ALARMS_OF_RANKS / len(ranks)
        errors_ms = [_fluctuation_error_ms(steps_ms, confidence) for steps_ms in step_series_ms]
        return max(errors_ms, default=0.0)
    medians = sorted(median(chain(*blocks)) for blocks in ranks)
    # Leave out the slowest rank, and ranks that may be slow together with the slowest rank.
    slow_peers = len(medians) // _RANKS_PER_SLOW_RANK
    peers = medians[: len(medians) - 1 - slow_peers]
    # Without slow peers the standard deviation is too small; the factor corrects this.
    sd_ms = stdev(peers) * (_TRUNCATION_FACTOR if slow_peers else 1.0)
    error_ms = sd_ms * math.sqrt(1 + 1 / (len(medians) - 1))
    # `stands_out` multiplies the result by MARK_ERRORS, which is three.
    critical_t = student_t(len(peers) - 1, 1 - 2 * _FALSE_ALARMS_OF_HOSTS / len(ranks))
    return critical_t / MARK_ERRORS * error_ms


def _fluctuation_error_ms(steps_ms: Sequence[float], confidence: float) -> float:
    """Return a third of the difference that chance explains between two hosts with such steps."""
    if len(steps_ms) < _WINDOWS * _MIN_STEPS_OF_WINDOW:
        return 0.0
    windows = _cut(steps_ms, _WINDOWS)
    # Slow fluctuations are what independent steps do not explain.
    independent_variance = fmean(median_error(window) ** 2 for window in windows)
    slow_variance = max(0.0, variance(map(median, windows)) - independent_variance)
    # A few seconds of steps underestimate slow fluctuations; the factor corrects this.
    critical_t = _SLOW_FLUCTUATIONS * student_t(_WINDOWS - 1, confidence)
    sd_of_difference_ms = math.sqrt(2 * slow_variance)
    # `stands_out` multiplies the result by MARK_ERRORS, which is three.
    return critical_t / MARK_ERRORS * sd_of_difference_ms


def _cut(steps: Sequence[float], parts: int) -> list[Sequence[float]]:
    """Cut steps into consecutive parts of about equal length."""
    ends = [len(steps) * part // parts for part in range(parts + 1)]
    return [steps[start:end] for start, end in pairwise(ends)]


Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# The spread of fewer peers cannot be estimated.
LEAST_ALIKE = 4
# A slow subject exceeds the median of its peers by more than both 5 % and 3.5 sigma.
SLOW_SHARE = 0.05
SLOW_SIGMAS = 3.5
# A bad subject takes more than 1.5 times as long as its peers.
BAD_RATIO = 1.5
# Share of healthy fleets in which a subject is called slow by chance.
FALSE_ALARMS = 0.005
# Among fewer than `LEAST_ALIKE` peers, a slow subject exceeds the fastest by more than both 10 %
# and seven times the noise floor of the test.
FEW_SHARE, FEW_FLOORS = 0.1, 7
# Each group of a divided fleet has at least 10 % of the subjects, and at least two.
_MIN_GROUP_SHARE, _MIN_GROUP_SIZE = 0.1, 2
# The noise floor weighs as much as an estimate with ten degrees of freedom, because the estimate
# from eight subjects alone is off by half.
_FLOOR_DEGREES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The subjects of one test compared with their peers; arrays have an entry for each subject."""

    # Time of the subject / median time of the peers, median over passes; NaN without a value.
    ratios: Floats
    # Spread of the values, relative to the median.
    sigma: float
    # Largest relative excess over the median that is not slow.
    limit: float
    # Whether the excess is above `limit` in the median over passes and in each pass.
    is_beyond: Bools
    # One-sided p-values of the excess; NaN without a value.
    p_values: Floats
    # Whether the median of the peers counts the subject: all, or the faster group of two.
    is_reference: Bools

    @property
    def is_divided(self) -> bool:
        """Whether the subjects fall into two groups, so that their median is not typical."""
        return not bool(self.is_reference.all())


def compare_peers(values: Floats, *, is_time: bool, floor: float) -> Peers:
    """Compare each subject with the median of its peers, pass by pass.

    If the subjects fall into two groups, all subjects are compared with the faster group, because
    many causes make a device slower, and none makes it faster.

    Args:
        values: [passes, subjects], NaN for a missing value; at least `LEAST_ALIKE` subjects.
        is_time: whether values are times; else they are rates.
        floor: relative noise of a healthy device, above 0; lower bound of `sigma`.
    """
    from scipy.special import ndtr

    relative = values / _median(values, axis=1)[:, None]
    ratios = _as_times(_median(relative, axis=0), is_time)
    is_reference = _fast_group(ratios, floor)
    # In a divided fleet, replace the median of all subjects by the median of the faster group.
    if not is_reference.all():
        relative = values / _median(values[:, is_reference], axis=1)[:, None]
    typical = _median(relative, axis=0)
    sigma = _relative_sd(typical[is_reference], floor)
    limit = max(SLOW_SHARE, SLOW_SIGMAS * sigma)
    excess = (relative - 1) if is_time else (1 - relative)
    smallest_excess = np.where(np.isnan(excess), np.inf, excess).min(axis=0)
    typical_excess = _median(excess, axis=0)
    return Peers(
        ratios=_as_times(typical, is_time),
        sigma=sigma,
        limit=limit,
        is_beyond=(typical_excess > limit) & (smallest_excess > limit),
        p_values=np.asarray(ndtr(-typical_excess / sigma)),
        is_reference=is_reference,
    )


def find_slow(tests: Sequence[Peers]) -> list[Bools]:
    """Return for each test a mask of the slow subjects.

    The false discovery rate over all tests and subjects is at most `FALSE_ALARMS` (Benjamini and
    Hochberg 1995).
    """
    from scipy.stats import false_discovery_control

    if not tests:
        return []
    p_values = np.concatenate([peers.p_values for peers in tests])
    has_value = ~np.isnan(p_values)
    q_values = np.ones_like(p_values)
    if has_value.any():
        q_values[has_value] = false_discovery_control(p_values[has_value])
    test_ends = np.cumsum([len(peers.p_values) for peers in tests])[:-1]
    q_values_by_test = np.split(q_values, test_ends)
    return [
        peers.is_beyond & (test_q_values <= FALSE_ALARMS)
        for peers, test_q_values in zip(tests, q_values_by_test, strict=True)
    ]


def compare_few(
    values: Floats, *, is_time: bool, floor: float, bad_ratio: float = BAD_RATIO
) -> tuple[Floats, Bools]:
    """Return each subject's time / the fastest subject's time, and a mask of the slow subjects.

    For fewer than `LEAST_ALIKE` subjects, whose median says little. A slow subject exceeds the
    limit in the median over passes, and in each pass but for noise.

    Args:
        values: [passes, subjects], NaN for a missing value.
        is_time: whether values are times; else they are rates.
        floor: relative noise of a healthy device.
        bad_ratio: ratio above which the test calls a subject bad. A noisy test has a larger ratio
            than `BAD_RATIO`, which is then the limit of slow subjects too.
    """
    times = _as_times(values, is_time)
    typical_times = _median(times, axis=0)
    if not np.isfinite(typical_times).any():
        return typical_times, np.zeros(len(typical_times), dtype=np.bool_)
    fastest = int(np.nanargmin(typical_times))
    ratios = np.asarray(typical_times / typical_times[fastest])
    ratios_by_pass = times / times[:, [fastest]]
    smallest_ratios = np.where(np.isnan(ratios_by_pass), np.inf, ratios_by_pass).min(axis=0)
    is_noisy_test = bad_ratio > BAD_RATIO
    usual_limit = 1 + max(FEW_SHARE, FEW_FLOORS * floor)
    limit = bad_ratio if is_noisy_test else min(bad_ratio, usual_limit)
    is_slow = (ratios > limit) & (smallest_ratios > limit * (1 - floor))
    return ratios, is_slow


def _as_times(values: Floats, is_time: bool) -> Floats:
    """Return times unchanged, and the reciprocals of rates."""
    with np.errstate(divide="ignore"):
        return values if is_time else np.asarray(1.0 / values)


def _median(values: Floats, axis: int) -> Floats:
    """Return the median of the values that are not NaN; NaN if all are NaN."""
    # nanmedian takes ten times as long on small arrays.
    if not np.isnan(values).any():
        return np.asarray(np.median(values, axis=axis))
    # Do not warn where all values are NaN.
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.asarray(np.nanmedian(values, axis=axis))


def _relative_sd(values: Floats, noise_floor: float) -> float:
    """Return the standard deviation / the median, by the MAD and shrunk towards the noise floor."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return noise_floor
    middle = np.median(finite)
    deviation = _MAD_FACTOR * float(np.median(np.abs(finite - middle)) / middle)
    degrees = _MAD_EFFICIENCY * (len(finite) - 1)
    # Weighted mean of the two variances.
    weighted_sum = _FLOOR_DEGREES * noise_floor**2 + degrees * deviation**2
    return max(noise_floor, float(np.sqrt(weighted_sum / (_FLOOR_DEGREES + degrees))))


def _fast_group(
    ratios: Floats,  # time of each subject / median time of all subjects
    noise_floor: float,
) -> Bools:
    """Return a mask of the faster group of a divided fleet; all True if it is not divided."""
    ascending = np.sort(ratios[np.isfinite(ratios)])
    min_size = max(_MIN_GROUP_SIZE, int(np.ceil(_MIN_GROUP_SHARE * len(ascending))))
    # Excess of each subject over the next faster subject.
    gaps = ascending[1:] / ascending[:-1] - 1
    # A fleet is divided where the next slower subject would be slow among the subjects before it.
    for last_of_group in np.flatnonzero(gaps > SLOW_SHARE):
        size = int(last_of_group) + 1
        limit = max(SLOW_SHARE, SLOW_SIGMAS * _relative_sd(ascending[:size], noise_floor))
        both_large_enough = min_size <= size <= len(ascending) - min_size
        if both_large_enough and gaps[last_of_group] > limit:
            return np.asarray(ratios <= ascending[last_of_group])
    return np.ones(len(ratios), dtype=np.bool_)
