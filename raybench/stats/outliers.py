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

# A slow rank has an excess larger than both thresholds.
MARK_SHARE = 0.02
MARK_ERRORS = 3.0
# A part of an excess that has at least this share is reported as the whole excess.
NEARLY_ALL = 0.75
# Probability that noise alone puts one of two ranks beyond three standard errors: 0.27 %.
_CHANCE = 2 * NormalDist().cdf(-MARK_ERRORS)
# The pace of hosts wanders, so their error is large. A larger probability keeps slow hosts visible.
_CHANCE_OF_HOSTS = 0.01
# Standard error of the median over the standard error of the mean, for normal samples: sqrt(pi /
# 2).
_MEDIAN_FACTOR = math.sqrt(math.pi / 2)
# Standard deviation of normal samples over their median absolute deviation, and the statistical
# efficiency of the latter (P. J. Rousseeuw, C. Croux, J. Am. Stat. Assoc. 88(424), 1993).
_MAD_FACTOR, _MAD_EFFICIENCY = 1.4826, 0.37
_FEW_STEPS = 6
# Steps are cut into parts of three steps or more, so that the median of a part ignores one stall.
_MOST_PARTS, _LEAST_OF_A_PART = 6, 3
# The timed steps of a point are cut into windows, which must fit into 30 steps. Without
# `_pace_scatter`, 8 % of the clean points of two hosts that wander by 3 % would report a rank
# (benchmarks/simulations/stragglers.py).
_WINDOWS, _LEAST_OF_A_WINDOW = 8, 3
# A few seconds of steps underestimate how a host wanders. The factor comes from a simulation,
# docs/results.md.
_UNSEEN = 1.3
# Fewer ranks do not show how much ranks differ.
_ENOUGH_RANKS = 6
# One in eight ranks may be slow together with the slowest rank, such as ranks of one host, so the
# largest eighth is left out. The standard deviation of the other normal values is smaller by the
# factor 1.22.
_MAY_BE_SLOW, _TRUNCATED = 8, 1.22


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The slowest rank compared with another rank, whether it stands out or not.

    Ranks are indices of the list that was compared, which may leave ranks out.
    """

    # The rank with the largest median step.
    rank: int
    # The rank with the lower median of all other medians.
    other: int
    # Median of `rank` minus median of `other`.
    excess_ms: float
    # Standard error of `excess_ms`.
    error_ms: float


def find_straggler(ranks: Sequence[Blocks]) -> Straggler | None:
    """Compare the slowest rank with a typical rank; None for fewer than two ranks or steps.

    The standard error is the largest of three estimates: for independent steps, for steps that
    wander (from nine steps on), and two thirds of the difference between the excess and the
    smallest excess in any part of the steps. The third estimate lets a rank stand out only if each
    part shows at least half of the excess.

    Args:
        ranks: the steps of each rank in ms, in blocks.
    """
    series = [list(chain(*blocks)) for blocks in ranks]
    if len(series) < 2 or min(map(len, series)) < 2:
        return None
    rank, other = slowest_and_other([median(steps) for steps in series])
    slow, peer = series[rank], series[other]
    excess_ms = median(slow) - median(peer)
    parts = max(1, min(_MOST_PARTS, min(map(len, series)) // _LEAST_OF_A_PART))
    by_part = [list(map(median, _separate(steps, parts))) for steps in series]
    wandering_ms = 0.0
    if parts > 2:
        # The pace of a host changes within tenths of a second, so neighbouring steps are
        # correlated. Use numpy, because statistics.variance takes 0.1 ms a rank. Use the median
        # over ranks, because one stall must not hide a slow rank.
        typical = float(np.median(np.var(by_part, axis=1, ddof=1)))
        critical_t = student_t(len(by_part) * (parts - 1), 1 - _CHANCE)
        wandering_ms = critical_t / MARK_ERRORS * math.sqrt(2 * typical / parts)
    least_ms = min(a - b for a, b in zip(by_part[rank], by_part[other], strict=True))
    errors_ms = (
        math.hypot(median_error(slow), median_error(peer)),
        wandering_ms,
        (excess_ms - least_ms) * 2 / MARK_ERRORS,
    )
    return Straggler(rank=rank, other=other, excess_ms=excess_ms, error_ms=max(errors_ms))


def slowest_and_other(medians: Sequence[float]) -> tuple[int, int]:
    """Return the index of the largest value and of the lower median of all other values.

    Raises:
        ValueError: fewer than two values.
    """
    if len(medians) < 2:
        raise ValueError("one rank has no others")
    slowest = max(range(len(medians)), key=lambda rank: medians[rank])
    others = sorted((ms, rank) for rank, ms in enumerate(medians) if rank != slowest)
    return slowest, others[(len(others) - 1) // 2][1]


def stands_out(excess_ms: float, error_ms: float, step_ms: float) -> bool:
    """Return whether an excess is above both 2 % of the step and three standard errors."""
    return excess_ms > max(MARK_SHARE * step_ms, MARK_ERRORS * error_ms)


def borne_out_ms(excess_ms: float, rest_ms: float | None) -> float:
    """Return the part of an excess that the timed steps confirm; it may be negative.

    Args:
        rest_ms: the timed step minus its parts; None if unknown.
    """
    return excess_ms + min(0.0, rest_ms or 0.0)


def median_error(steps: Sequence[float]) -> float:
    """Return the standard error of the median, by the median absolute deviation.

    For two to five steps the standard deviation is used if it is larger. The error of one step is
    unknown, and returned as 0.
    """
    middle = median(steps)
    # Correct for few steps: C. Croux, P. J. Rousseeuw, "Time-efficient algorithms for two highly
    # robust estimators of scale", Computational Statistics 1, 1992.
    few = len(steps) / (len(steps) - 0.8)
    deviation = few * _MAD_FACTOR * median(abs(ms - middle) for ms in steps)
    if 1 < len(steps) < _FEW_STEPS:
        deviation = max(deviation, stdev(steps))
    return _MEDIAN_FACTOR * deviation / math.sqrt(len(steps))


def late_in_turn_ms(ranks: Sequence[Blocks]) -> float | None:
    """Return how much longer a step takes because different ranks are late at different times.

    This is the median over steps of the maximum over ranks, minus the largest median of a rank.
    None for fewer than two ranks, and for unequal numbers of steps.

    Args:
        ranks: as for `find_straggler`; the n-th steps of all ranks are one step of the point.
    """
    series = [list(chain(*blocks)) for blocks in ranks]
    counts = {len(steps) for steps in series}
    if len(series) < 2 or len(counts) > 1 or not all(series):
        return None
    in_turn_ms, alone_ms = np.median(np.max(series, axis=0)), np.median(series, axis=1).max()
    return max(0.0, float(in_turn_ms - alone_ms))


def host_error_ms(ranks: Sequence[Blocks], step_series_ms: Sequence[Sequence[float]]) -> float:
    """Return a standard error in ms that includes how the pace of a host wanders.

    For six or more ranks, the error comes from the differences between their local steps, without
    the slowest eighth: Grubbs' test (F. E. Grubbs, "Procedures for detecting outlying observations
    in samples", Technometrics 11(1), 1969). For fewer ranks, it comes from the scatter of the timed
    steps, and is 0 for fewer than 24 steps.

    Args:
        ranks: as for `find_straggler`.
        step_series_ms: the step times of the point, a series per repeat.
    """
    if len(ranks) < _ENOUGH_RANKS:
        confidence = 1 - 2 * _CHANCE / len(ranks)
        return max((_pace_scatter(steps, confidence) for steps in step_series_ms), default=0.0)
    medians = sorted(median(chain(*blocks)) for blocks in ranks)
    others = medians[: len(medians) - 1 - len(medians) // _MAY_BE_SLOW]
    factor = 1.0 if len(others) == len(medians) - 1 else _TRUNCATED
    # `stands_out` multiplies the error by MARK_ERRORS.
    critical_t = student_t(len(others) - 1, 1 - 2 * _CHANCE_OF_HOSTS / len(ranks))
    error_ms = factor * stdev(others) * math.sqrt(1 + 1 / (len(medians) - 1))
    return critical_t / MARK_ERRORS * error_ms


def _pace_scatter(steps: Sequence[float], confidence: float) -> float:
    """Return one third of the difference that chance explains between two equally noisy hosts."""
    if len(steps) < _WINDOWS * _LEAST_OF_A_WINDOW:
        return 0.0
    windows = _separate(steps, _WINDOWS)
    # The medians of windows scatter by more than independent steps explain: the host wanders.
    independent = fmean(median_error(window) ** 2 for window in windows)
    wandering = max(0.0, variance(map(median, windows)) - independent)
    critical_t = _UNSEEN * student_t(_WINDOWS - 1, confidence)
    return critical_t / MARK_ERRORS * math.sqrt(2 * wandering)


def _separate(steps: Sequence[float], parts: int) -> list[Sequence[float]]:
    """Cut steps into consecutive parts of about equal length."""
    ends = [len(steps) * part // parts for part in range(parts + 1)]
    return [steps[start:end] for start, end in pairwise(ends)]


Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# The spread of fewer peers cannot be estimated.
LEAST_ALIKE = 4
# A slow subject exceeds its peers by more than both thresholds.
SLOW_SHARE = 0.05
SLOW_SIGMAS = 3.5
# A bad subject takes more than 1.5 times as long as its peers.
BAD_RATIO = 1.5
# Share of healthy fleets in which a subject is called slow by chance.
FALSE_ALARMS = 0.005
# Among few peers, a slow subject takes longer than the fastest by more than both: 10 %, and seven
# times the floor of the test.
_FEW_SHARE, _FEW_FLOORS = 0.1, 7
# Smallest faster group that can be the reference: a share, and a number of subjects.
_LEAST_SHARE, _LEAST_OF_A_GROUP = 0.1, 2
# The floor of a test weighs as much as a spread with ten degrees of freedom: the estimate from
# eight subjects alone is off by half.
_FLOOR_DEGREES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The subjects of one test compared with their peers; arrays have an entry for each subject."""

    # Time over the time of the peers, median over passes; NaN without a value.
    ratios: Floats
    # Spread of the values, relative to the median.
    sigma: float
    # A subject that exceeds the median by more than this is slow; relative to the median.
    limit: float
    # Whether the excess is above `limit` in the median over passes and in each pass.
    is_beyond: Bools
    # One-sided p-values of the excess; NaN without a value.
    p_values: Floats
    # Subjects whose median is the reference: all, or the faster group of a divided fleet.
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
        floor: relative noise of a healthy device, above 0; a smaller spread is replaced by it.
    """
    shares = values / _median(values, axis=1)[:, None]
    ratios = _as_times(_median(shares, axis=0), is_time)
    is_reference = _fast_group(ratios, floor)
    # In a divided fleet, replace the median of all subjects by the median of the faster group.
    if not is_reference.all():
        shares = values / _median(values[:, is_reference], axis=1)[:, None]
    from scipy.special import ndtr

    middle = _median(shares, axis=0)
    sigma = _spread(middle[is_reference], floor)
    limit = max(SLOW_SHARE, SLOW_SIGMAS * sigma)
    excess = (shares - 1) if is_time else (1 - shares)
    least = np.where(np.isnan(excess), np.inf, excess).min(axis=0)
    typical = _median(excess, axis=0)
    return Peers(
        ratios=_as_times(middle, is_time),
        sigma=sigma,
        limit=limit,
        is_beyond=(typical > limit) & (least > limit),
        p_values=np.asarray(ndtr(-typical / sigma)),
        is_reference=is_reference,
    )


def find_slow(tests: Sequence[Peers]) -> list[Bools]:
    """Return for each test a mask of the slow subjects.

    Controls the false discovery rate over all tests and subjects (Benjamini and Hochberg 1995):
    about `FALSE_ALARMS` of healthy fleets have a subject called slow.
    """
    from scipy.stats import false_discovery_control

    if not tests:
        return []
    p_values = np.concatenate([peers.p_values for peers in tests])
    has_value = ~np.isnan(p_values)
    rates = np.ones_like(p_values)
    if has_value.any():
        rates[has_value] = false_discovery_control(p_values[has_value])
    ends = np.cumsum([len(peers.p_values) for peers in tests])[:-1]
    by_test = zip(tests, np.split(rates, ends), strict=True)
    return [peers.is_beyond & (test_rates <= FALSE_ALARMS) for peers, test_rates in by_test]


def compare_few(
    values: Floats, *, is_time: bool, floor: float, bad_ratio: float = BAD_RATIO
) -> tuple[Floats, Bools]:
    """Return each subject's time relative to the fastest, and a mask of the slow subjects.

    For fewer than `LEAST_ALIKE` subjects, whose median says little. A subject is slow if its ratio
    exceeds the limit in the median over passes, and exceeds the limit less `floor` in each pass.

    Args:
        values: [passes, subjects], NaN for a missing value.
        is_time: whether values are times; else they are rates.
        floor: relative noise of a healthy device.
        bad_ratio: a value above `BAD_RATIO` is the limit itself. Other values are an upper bound of
            the usual limit.
    """
    times = _as_times(values, is_time)
    typical = _median(times, axis=0)
    if not np.isfinite(typical).any():
        return typical, np.zeros(len(typical), dtype=np.bool_)
    fastest = int(np.nanargmin(typical))
    ratios = np.asarray(typical / typical[fastest])
    by_pass = times / times[:, [fastest]]
    least = np.where(np.isnan(by_pass), np.inf, by_pass).min(axis=0)
    usual = min(bad_ratio, 1 + max(_FEW_SHARE, _FEW_FLOORS * floor))
    limit = bad_ratio if bad_ratio > BAD_RATIO else usual
    return ratios, (ratios > limit) & (least > limit * (1 - floor))


def _as_times(values: Floats, is_time: bool) -> Floats:
    """Return times as they are, and rates as times per unit."""
    with np.errstate(divide="ignore"):
        return values if is_time else np.asarray(1.0 / values)


def _median(values: Floats, axis: int) -> Floats:
    """Return the median without NaN; NaN if there is no value."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.asarray(np.nanmedian(values, axis=axis))


def _spread(values: Floats, floor: float) -> float:
    """Return the relative standard deviation, estimated by the MAD and shrunk towards the floor."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return floor
    middle = np.median(finite)
    deviation = _MAD_FACTOR * float(np.median(np.abs(finite - middle)) / middle)
    degrees = _MAD_EFFICIENCY * (len(finite) - 1)
    total = _FLOOR_DEGREES * floor**2 + degrees * deviation**2
    return max(floor, float(np.sqrt(total / (_FLOOR_DEGREES + degrees))))


def _fast_group(ratios: Floats, floor: float) -> Bools:
    """Return a mask of the faster group of a divided fleet; all True if it is not divided.

    The division is the first gap, from the fast end, that exceeds the limit of the group before it.
    """
    order = np.argsort(ratios)  # NaN last
    ascending = ratios[order][: int(np.isfinite(ratios).sum())]
    least = max(_LEAST_OF_A_GROUP, int(np.ceil(_LEAST_SHARE * len(ascending))))
    gaps = ascending[1:] / ascending[:-1] - 1
    for last in np.flatnonzero(gaps > SLOW_SHARE):
        size = int(last) + 1
        limit = max(SLOW_SHARE, SLOW_SIGMAS * _spread(ascending[:size], floor))
        if least <= size <= len(ascending) - least and gaps[last] > limit:
            return np.asarray(ratios <= ascending[last])
    return np.ones(len(ratios), dtype=np.bool_)
