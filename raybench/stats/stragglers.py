"""Which rank is slower than the others by itself, from steps without communication. Pure.

The rule, its trials on GPUs and its simulation are in docs/method.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import NormalDist, fmean, median, stdev, variance

import numpy as np

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
# Standard deviation of normal samples over their median absolute deviation.
_MAD_FACTOR = 1.4826
_FEW_STEPS = 6
# Three steps, of which one may be a stall.
_MOST_PARTS, _LEAST_OF_A_PART = 6, 3
_WINDOWS, _LEAST_OF_A_WINDOW = 8, 4
# Two seconds of steps show only a part of a wander with a memory of one second, and a step that
# waits for the latest host wanders less than each host. By simulation, docs/method.md.
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
    medians. excess_ms: median of `rank` less that of `other`. error_ms: its standard error.
    """

    rank: int
    other: int
    excess_ms: float
    error_ms: float


def find_straggler(ranks: Sequence[Blocks]) -> Straggler | None:
    """Compare the slowest rank with a typical one; None below two ranks, or where one has no steps.

    ranks: the blocks of each rank, in rank order. The error is the largest of three: that of two
    medians of independent steps, three of which are also enough for many ranks, as the other one is
    in their middle and its error small; that of two ranks whose pace wanders, by the scatter of up
    to six parts of the steps; two thirds of the amount by which the excess is smaller in the part
    where it is smallest, so that a rank stands out only if half of its excess is there in every
    part.
    """
    series = [list(chain(*blocks)) for blocks in ranks]
    if len(series) < 2 or not all(series):
        return None
    rank, other = slowest_and_other([median(steps) for steps in series])
    slow, peer = series[rank], series[other]
    excess_ms = median(slow) - median(peer)
    parts = max(1, min(_MOST_PARTS, min(map(len, series)) // _LEAST_OF_A_PART))
    by_part = [[median(part) for part in _separate(steps, parts)] for steps in series]
    least_ms = min(a - b for a, b in zip(by_part[rank], by_part[other], strict=True))
    return Straggler(
        rank=rank,
        other=other,
        excess_ms=excess_ms,
        error_ms=max(
            math.hypot(median_error(slow), median_error(peer)),
            _wandering_ms(by_part),
            max(0.0, excess_ms - least_ms) * 2 / MARK_ERRORS,
        ),
    )


def slowest_and_other(medians: Sequence[float]) -> tuple[int, int]:
    """Return the rank of the largest value, and the rank of the lower median of all other values.

    Raises ValueError for fewer than two values.
    """
    if len(medians) < 2:
        raise ValueError("one rank has no others")
    slowest = max(range(len(medians)), key=lambda rank: medians[rank])
    others = sorted((ms, rank) for rank, ms in enumerate(medians) if rank != slowest)
    return slowest, others[(len(others) - 1) // 2][1]


def stands_out(excess_ms: float, error_ms: float, step_ms: float) -> bool:
    """Return whether the excess of a rank is more than 2 % of the step and three errors.

    excess_ms: reduced by `borne_out_ms`.
    """
    return excess_ms > max(MARK_SHARE * step_ms, MARK_ERRORS * error_ms)


def borne_out_ms(excess_ms: float, exposed_ms: float | None) -> float:
    """Return the part of an excess that the timed steps confirm.

    Where the slowest rank's own step is longer than a whole timed step, the difference is taken
    off.
    exposed_ms: the timed step less the slowest rank's own; None, where it is unknown, takes off
    nothing.
    """
    return excess_ms + min(0.0, exposed_ms or 0.0)


def median_error(steps: Sequence[float]) -> float:
    """Return the standard error of the median of steps, by their median absolute deviation.

    For fewer than six steps by their standard deviation where it is larger: most may be alike by
    chance.
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

    Median over steps of the maximum over ranks, less the largest of the ranks' medians. None below
    two ranks, where one has no steps, and where the ranks have not run equally many.
    """
    series = [[ms for block in blocks for ms in block] for blocks in ranks]
    counts = {len(steps) for steps in series}
    if len(series) < 2 or len(counts) > 1 or not all(series):
        return None
    in_turn_ms = median(max(steps) for steps in zip(*series, strict=True))
    alone_ms = max(median(steps) for steps in series)
    return float(max(0.0, in_turn_ms - alone_ms))


def host_error_ms(ranks: Sequence[Blocks], step_series_ms: Sequence[Sequence[float]]) -> float:
    """Return a third of the ms by which chance alone may make the slowest host late.

    Three of these errors mark a host. Its pace wanders within a second, by more than its few local
    steps show. Six ranks or more show by their own steps how far they differ: the slowest has to
    stand out of the others, without their slowest eighth, by Student's t for their number (F. E.
    Grubbs, "Procedures for detecting outlying observations in samples", Technometrics 11(1), 1969).
    Fewer ranks do not, so the medians of up to eight parts of the timed steps are taken, which last
    longer, with a larger t for more ranks.
    step_series_ms: the point's step time in each iteration, a sequence for each repeat.
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
    """Return the standard error of the difference of two paces that wander as this one does.

    0 below 32 steps. From the variance of the medians of parts, less that of independent steps.
    """
    if len(steps) < _WINDOWS * _LEAST_OF_A_WINDOW:
        return 0.0
    windows = _separate(steps, _WINDOWS)
    independent = fmean(median_error(window) ** 2 for window in windows)
    wandering = max(0.0, variance(map(median, windows)) - independent)
    reach = _UNSEEN * student_t(_WINDOWS - 1, confidence)
    return reach / MARK_ERRORS * math.sqrt(2 * wandering)


def _wandering_ms(by_part: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the difference of two ranks whose pace wanders, in ms.

    by_part: [ranks, parts], medians. A host is slower for tenths of a second and faster again, each
    on
    its own: neighbouring steps are more alike than independent ones. Larger for few parts by
    Student's t; 0 below three.
    """
    parts = len(by_part[0])
    if parts < 3:
        return 0.0
    # numpy: statistics.variance takes 0.1 ms a rank. The median over ranks, so that one stall among
    # many ranks does not hide a slow one.
    typical = float(np.median(np.var(by_part, axis=1, ddof=1)))
    reach = student_t(len(by_part) * (parts - 1), 1 - _CHANCE)
    return reach / MARK_ERRORS * math.sqrt(2 * typical / parts)


def _separate(steps: Sequence[float], parts: int) -> list[Sequence[float]]:
    """Cut the steps into consecutive parts of nearly equal length."""
    ends = [len(steps) * part // parts for part in range(parts + 1)]
    return [steps[start:end] for start, end in pairwise(ends)]
