"""Which ranks of a point, and which devices, links or nodes of a fleet, are slow. Pure.

Ranks are compared by their steps without communication, else by the timed ones
(`find_straggler`): docs/explanation/numbers.md has the rule, docs/results.md its trials. The
subjects of a health test (devices, links or nodes) are compared with the median of their peers in
the same pass (`compare_peers`), few with the fastest (`compare_few`): device 0 may itself be the
slow one. docs/explanation/health.md has that rule.
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

# A rank's steps in blocks that lie apart in time, in ms.
Blocks = Sequence[Sequence[float]]

# A rank is called slow where its excess is larger than both of these.
MARK_SHARE = 0.02
MARK_ERRORS = 3.0
# From this share on, a sentence may call a part of an excess all of it.
NEARLY_ALL = 0.75
# The chance that noise alone puts one of two ranks beyond three standard errors: 0.27 %.
_CHANCE = 2 * NormalDist().cdf(-MARK_ERRORS)
# The same for hosts whose pace wanders, where three errors would hide too much.
_CHANCE_OF_HOSTS = 0.01
# Standard error of a median of normal samples over that of their mean: sqrt(pi / 2).
_MEDIAN_FACTOR = math.sqrt(math.pi / 2)
# Standard deviation of normal samples over their median absolute deviation, and the statistical
# efficiency of the latter (P. J. Rousseeuw, C. Croux, J. Am. Stat. Assoc. 88(424), 1993).
_MAD_FACTOR, _MAD_EFFICIENCY = 1.4826, 0.37
_FEW_STEPS = 6
# Three steps, of which one may be a stall.
_MOST_PARTS, _LEAST_OF_A_PART = 6, 3
# The windows must fit into 30 timed steps. Without this error, a rank is named in 8 % of the clean
# points of two hosts that wander by 3 % (benchmarks/simulations/stragglers.py).
_WINDOWS, _LEAST_OF_A_WINDOW = 8, 3
# A few seconds of steps show only a part of a wander with a memory of one second, and a step that
# waits for the latest host wanders less than each host. By simulation, docs/results.md.
_UNSEEN = 1.3
# Fewer ranks do not show how far ranks differ.
_ENOUGH_RANKS = 6
# One in so many ranks may be slow together with the slowest one, as ranks of one host are. The
# standard deviation of normal values without their largest eighth is smaller by the factor.
_MAY_BE_SLOW, _TRUNCATED = 8, 1.22


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The slowest rank compared with another one, whether it stands out or not.

    rank: the one with the largest median step. other: the one with the lower median of all other
    medians. Both are places in the list given, which are not ranks if it leaves ranks out.
    excess_ms: median of `rank` less that of `other`. error_ms: its standard error.
    """

    rank: int
    other: int
    excess_ms: float
    error_ms: float


def find_straggler(ranks: Sequence[Blocks]) -> Straggler | None:
    """Return the slowest rank beside a typical one; None below two ranks, or two steps of a rank.

    ranks: for each rank, in rank order, its steps in ms, in blocks. The error is the largest of
    three: that of two medians of independent steps; from nine steps of each rank on that of two
    whose pace wanders, by the scatter of up to six parts of the steps; two thirds of the amount by
    which the excess is smaller in the part where it is smallest, so that a rank stands out only if
    half of its excess is there in every part.
    """
    series = [list(chain(*blocks)) for blocks in ranks]
    if len(series) < 2 or min(map(len, series)) < 2:
        return None
    rank, other = slowest_and_other([median(steps) for steps in series])
    slow, peer = series[rank], series[other]
    excess_ms = median(slow) - median(peer)
    parts = max(1, min(_MOST_PARTS, min(map(len, series)) // _LEAST_OF_A_PART))
    by_part = [[median(part) for part in _separate(steps, parts)] for steps in series]
    wandering_ms = 0.0
    if parts > 2:
        # A host is slower for tenths of a second and faster again, each on its own: neighbouring
        # steps are more alike than independent ones. numpy: statistics.variance takes 0.1 ms a
        # rank. The median over ranks, so that one stall among many does not hide a slow rank.
        typical = float(np.median(np.var(by_part, axis=1, ddof=1)))
        reach = student_t(len(by_part) * (parts - 1), 1 - _CHANCE)
        wandering_ms = reach / MARK_ERRORS * math.sqrt(2 * typical / parts)
    least_ms = min(a - b for a, b in zip(by_part[rank], by_part[other], strict=True))
    errors_ms = (
        math.hypot(median_error(slow), median_error(peer)),
        wandering_ms,
        (excess_ms - least_ms) * 2 / MARK_ERRORS,
    )
    return Straggler(rank=rank, other=other, excess_ms=excess_ms, error_ms=max(errors_ms))


def slowest_and_other(medians: Sequence[float]) -> tuple[int, int]:
    """Return (rank of the largest value, rank of the lower median of all other values).

    A rank is an index of `medians`. Raises ValueError for fewer than two values.
    """
    if len(medians) < 2:
        raise ValueError("one rank has no others")
    slowest = max(range(len(medians)), key=lambda rank: medians[rank])
    others = sorted((ms, rank) for rank, ms in enumerate(medians) if rank != slowest)
    return slowest, others[(len(others) - 1) // 2][1]


def stands_out(excess_ms: float, error_ms: float, step_ms: float) -> bool:
    """Return whether a rank's excess is above both 2 % of the step and three standard errors.

    excess_ms: of own steps by `borne_out_ms`, of timed ones as it is. step_ms: the point's median.
    """
    return excess_ms > max(MARK_SHARE * step_ms, MARK_ERRORS * error_ms)


def borne_out_ms(excess_ms: float, rest_ms: float | None) -> float:
    """Return the part of an excess that the timed steps confirm, in ms; it can be below 0.

    If the slowest rank's own step is longer than a whole timed step, the difference is subtracted.
    rest_ms: the timed step less its parts; None (unknown) subtracts nothing.
    """
    return excess_ms + min(0.0, rest_ms or 0.0)


def median_error(steps: Sequence[float]) -> float:
    """Return the standard error of the median of steps, by their median absolute deviation.

    For two to five steps by their standard deviation if that is larger. 0 if more than half of six
    or more are equal, and for one step, whose error is unknown. StatisticsError for no steps.
    """
    middle = median(steps)
    # Larger for few steps: C. Croux, P. J. Rousseeuw, "Time-efficient algorithms for two highly
    # robust estimators of scale", Computational Statistics 1, 1992.
    few = len(steps) / (len(steps) - 0.8)
    deviation = few * _MAD_FACTOR * median(abs(ms - middle) for ms in steps)
    if 1 < len(steps) < _FEW_STEPS:
        deviation = max(deviation, stdev(steps))
    return _MEDIAN_FACTOR * deviation / math.sqrt(len(steps))


def late_in_turn_ms(ranks: Sequence[Blocks]) -> float | None:
    """Return the ms that a step takes longer because now one and now another rank is late.

    Median over steps of the maximum over ranks, less the largest of the ranks' medians; at least 0.
    None for fewer than two ranks, and if a rank has no steps or another number of them. ranks: as
    for `find_straggler`, the n-th steps of all ranks being one step of the point.
    """
    series = [list(chain(*blocks)) for blocks in ranks]
    counts = {len(steps) for steps in series}
    if len(series) < 2 or len(counts) > 1 or not all(series):
        return None
    in_turn_ms, alone_ms = np.median(np.max(series, axis=0)), np.median(series, axis=1).max()
    return max(0.0, float(in_turn_ms - alone_ms))


def host_error_ms(ranks: Sequence[Blocks], step_series_ms: Sequence[Sequence[float]]) -> float:
    """Return an error in ms: by chance alone the slowest host is late by up to three times it.

    A host's pace wanders within a second, by more than its few local steps show. Six ranks or more
    show by their own steps how far they differ: the slowest has to stand out of the others, without
    their slowest eighth, by Student's t for their number (F. E. Grubbs, "Procedures for detecting
    outlying observations in samples", Technometrics 11(1), 1969). For fewer ranks it is the
    largest of the series' errors, each by the medians of eight parts, with a larger t for more
    ranks, and 0 for a series below 24 steps. ranks: as for `find_straggler`, one or more, each with
    steps. step_series_ms: the point's step times, a series per repeat.
    """
    if len(ranks) < _ENOUGH_RANKS:
        confidence = 1 - 2 * _CHANCE / len(ranks)
        return max((_pace_scatter(steps, confidence) for steps in step_series_ms), default=0.0)
    medians = sorted(median(chain(*blocks)) for blocks in ranks)
    others = medians[: len(medians) - 1 - len(medians) // _MAY_BE_SLOW]
    factor = 1.0 if len(others) == len(medians) - 1 else _TRUNCATED
    reach = student_t(len(others) - 1, 1 - 2 * _CHANCE_OF_HOSTS / len(ranks))
    return reach / MARK_ERRORS * factor * stdev(others) * math.sqrt(1 + 1 / (len(medians) - 1))


def _pace_scatter(steps: Sequence[float], confidence: float) -> float:
    """Return a third of what chance may make of the difference of two paces that wander like this.

    By Student's t at `confidence`, two-sided, times 1.3. In the unit of the steps; 0 below 24
    steps. From the variance of the medians of parts, less that of independent steps.
    """
    if len(steps) < _WINDOWS * _LEAST_OF_A_WINDOW:
        return 0.0
    windows = _separate(steps, _WINDOWS)
    independent = fmean(median_error(window) ** 2 for window in windows)
    wandering = max(0.0, variance(map(median, windows)) - independent)
    reach = _UNSEEN * student_t(_WINDOWS - 1, confidence)
    return reach / MARK_ERRORS * math.sqrt(2 * wandering)


def _separate(steps: Sequence[float], parts: int) -> list[Sequence[float]]:
    """Return the steps cut into `parts` consecutive parts of nearly equal length, in order."""
    ends = [len(steps) * part // parts for part in range(parts + 1)]
    return [steps[start:end] for start, end in pairwise(ends)]


Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Fewer peers have no spread that could be estimated.
LEAST_ALIKE = 4
# A subject is slow that takes longer by more than both of these.
SLOW_SHARE = 0.05
SLOW_SIGMAS = 3.5
# A subject is bad that takes more than so many times as long as its peers.
BAD_RATIO = 1.5
# The share of healthy fleets in which a subject is called slow by chance.
FALSE_ALARMS = 0.005
# Among few peers, a subject is slow that takes longer than the fastest by more than both of these:
# a share, and so many floors of the test.
_FEW_SHARE, _FEW_FLOORS = 0.1, 7
# The smallest faster group with which the rest is compared: a share, and a number of subjects.
_LEAST_SHARE, _LEAST_OF_A_GROUP = 0.1, 2
# The documented floor of a test weighs as much as a spread with so many degrees of freedom: with
# eight subjects the estimate alone is off by half.
_FLOOR_DEGREES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The subjects of one test compared with their peers; arrays have an entry for each subject.

    is_reference: the subjects whose median all are compared with: all, or the faster group of a
    fleet that falls into two. sigma: the spread of their values, as a share of the median. limit:
    how much worse than the median is too much, as a share of it. ratios: its time over its peers',
    median over passes; above 1 is slower, NaN where no pass has a value. is_beyond: whether it is
    worse by more, in the median and in each pass with a value. p_values: one-sided, NaN as above.
    """

    ratios: Floats
    sigma: float
    limit: float
    is_beyond: Bools
    p_values: Floats
    is_reference: Bools

    @property
    def is_divided(self) -> bool:
        """Whether the subjects fall into two groups, so that their median says little."""
        return not bool(self.is_reference.all())


def compare_peers(values: Floats, *, is_time: bool, floor: float) -> Peers:
    """Return how each subject compares with the median of its peers, pass by pass.

    values: [passes, subjects], NaN where a pass has none; at least LEAST_ALIKE subjects must have
    one (fewer: `compare_few`). is_time: they are times, else rates. floor: the noise of a healthy
    device, as a share above 0; a smaller spread counts as this, that of few is drawn to it.

    If the subjects fall into two groups that lie apart by more than the limit, each of at least two
    and a tenth of them, all are compared with the faster one: many things make a device slower than
    it can be, and nothing makes it faster.
    """
    shares = values / _median(values, axis=1)[:, None]
    ratios = _as_times(_median(shares, axis=0), is_time)
    is_reference = _fast_group(ratios, floor)
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
    """Return for each test a mask of its subjects: those that are slow, and not by chance.

    Controls the false discovery rate over all tests and subjects (Benjamini and Hochberg 1995): at
    most about FALSE_ALARMS of healthy fleets as noisy as the floor have one called slow.
    """
    from scipy.stats import false_discovery_control

    if not tests:
        return []
    p_values = np.concatenate([one.p_values for one in tests])
    is_known = ~np.isnan(p_values)
    rates = np.ones_like(p_values)
    if is_known.any():
        rates[is_known] = false_discovery_control(p_values[is_known])
    ends = np.cumsum([len(one.p_values) for one in tests])[:-1]
    return [
        one.is_beyond & (own <= FALSE_ALARMS)
        for one, own in zip(tests, np.split(rates, ends), strict=True)
    ]


def compare_few(
    values: Floats, *, is_time: bool, floor: float, bad_ratio: float = BAD_RATIO
) -> tuple[Floats, Bools]:
    """Return each subject's time over that of the fastest, and a mask of the slow subjects.

    For fewer than `LEAST_ALIKE` subjects, whose median and spread say nothing. values: [passes,
    subjects], NaN without a value. is_time: they are times, else rates. floor: the noise of a
    healthy device, as a share. A subject without a value has the ratio NaN and is not slow.
    A subject is slow if its ratio is above a limit in the median of the passes, and above the limit
    times 1 - floor in each pass where it and the fastest have values. The limit is `bad_ratio` if
    that is above BAD_RATIO, else the larger of 1.1 and 1 + 7 * floor, but at most `bad_ratio`.
    """
    times = _as_times(values, is_time)
    typical = _median(times, axis=0)
    if not np.isfinite(typical).any():
        return typical, np.zeros(len(typical), dtype=np.bool_)
    fastest = int(np.nanargmin(typical))
    ratios = np.asarray(typical / typical[fastest])
    each = times / times[:, [fastest]]
    least = np.where(np.isnan(each), np.inf, each).min(axis=0)
    usual = min(bad_ratio, 1 + max(_FEW_SHARE, _FEW_FLOORS * floor))
    limit = bad_ratio if bad_ratio > BAD_RATIO else usual
    return ratios, (ratios > limit) & (least > limit * (1 - floor))


def _as_times(values: Floats, is_time: bool) -> Floats:
    """Return times for values that are times or rates; a rate of 0 gives infinity."""
    with np.errstate(divide="ignore"):
        return values if is_time else np.asarray(1.0 / values)


def _median(values: Floats, axis: int) -> Floats:
    """Return the median without NaN; NaN where there is no value, without a warning of numpy."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.asarray(np.nanmedian(values, axis=axis))


def _spread(values: Floats, floor: float) -> float:
    """Return the standard deviation as a share of the median; `floor` at least.

    By the median absolute deviation, shrunk towards the floor where there are few values.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return floor
    middle = np.median(known)
    deviation = _MAD_FACTOR * float(np.median(np.abs(known - middle)) / middle)
    degrees = _MAD_EFFICIENCY * (len(known) - 1)
    total = _FLOOR_DEGREES * floor**2 + degrees * deviation**2
    return max(floor, float(np.sqrt(total / (_FLOOR_DEGREES + degrees))))


def _fast_group(ratios: Floats, floor: float) -> Bools:
    """Return a mask of the faster group of a fleet that falls into two; all True where it does not.

    They are divided at the first gap, from the fast end, that is wider than the limit of the group
    before it. ratios: times over those of peers; an unknown one, NaN, is not in the faster group.
    """
    order = np.argsort(ratios)  # NaN last
    known = ratios[order][: int(np.isfinite(ratios).sum())]
    least = max(_LEAST_OF_A_GROUP, int(np.ceil(_LEAST_SHARE * len(known))))
    gaps = known[1:] / known[:-1] - 1
    for last in np.flatnonzero(gaps > SLOW_SHARE):
        size = int(last) + 1
        limit = max(SLOW_SHARE, SLOW_SIGMAS * _spread(known[:size], floor))
        if least <= size <= len(known) - least and gaps[last] > limit:
            return np.asarray(ratios <= known[last])
    return np.ones(len(ratios), dtype=np.bool_)
