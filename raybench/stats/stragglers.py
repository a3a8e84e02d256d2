"""Which rank is slower than the others by itself, from steps that wait for nobody. Pure.

The rule and its eight trials on GPUs are in docs/method.md and benchmarks/injected_delays.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, median, stdev

from raybench.stats.summary import student_t

# A rank's steps in blocks that lie apart in time, in ms.
Blocks = Sequence[Sequence[float]]

# A rank is called slow where its excess is larger than both of these.
MARK_SHARE = 0.02
MARK_ERRORS = 3.0
# A part of an excess that is all of it, as far as a sentence goes.
NEARLY_ALL = 0.75
# How seldom chance alone is three standard errors from nothing: 0.27 %.
_CONFIDENCE = 2 * NormalDist().cdf(MARK_ERRORS) - 1
# Standard error of a median of normal samples over that of their mean: sqrt(pi / 2).
_MEDIAN_FACTOR = math.sqrt(math.pi / 2)
# Standard deviation of normal samples over their median absolute deviation.
_MAD_FACTOR = 1.4826
_MOST_PARTS, _LEAST_OF_A_PART = 6, 2
_MOST_WINDOWS, _LEAST_OF_A_WINDOW = 8, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The slowest rank against the others, whether it stands out or not.

    rank: the one with the largest median. other: the one that has the lower median of the others'
    medians. excess_ms: how much longer the slowest one's step is. error_ms: one standard error.
    """

    rank: int
    other: int
    excess_ms: float
    error_ms: float


def find_straggler(ranks: Sequence[Blocks]) -> Straggler | None:
    """Find the slowest rank by its own steps; None below two ranks, or where one has no steps.

    ranks: the blocks of each rank, in rank order. Its error is the largest of three: of two
    medians of independent steps, of ranks whose pace wanders, and as much as the excess is smaller
    in the part of the steps where it is smallest.
    """
    series = [[ms for block in blocks for ms in block] for blocks in ranks]
    if len(series) < 2 or not all(series):
        return None
    rank, other = slowest_and_other([median(steps) for steps in series])
    excess_ms = median(series[rank]) - median(series[other])
    by_part = _by_part(series)
    return Straggler(
        rank=rank,
        other=other,
        excess_ms=excess_ms,
        error_ms=max(
            math.hypot(median_error(series[rank]), median_error(series[other])),
            _wandering(by_part),
            _least_favourable(by_part[rank], by_part[other], excess_ms),
        ),
    )


def slowest_and_other(medians: Sequence[float]) -> tuple[int, int]:
    """Find the rank of the largest value, and the one of the lower median of the others.

    Raises ValueError for fewer than two values.
    """
    if len(medians) < 2:
        raise ValueError("one rank has no others")
    slowest = max(range(len(medians)), key=lambda rank: medians[rank])
    others = sorted((ms, rank) for rank, ms in enumerate(medians) if rank != slowest)
    return slowest, others[(len(others) - 1) // 2][1]


def stands_out(excess_ms: float, error_ms: float, step_ms: float) -> bool:
    """Whether a rank with this excess is slow: by more than 2 % of the step and three errors.

    excess_ms: as far as the timed steps bear it out, see `borne_out_ms`.
    """
    return excess_ms > max(MARK_SHARE * step_ms, MARK_ERRORS * error_ms)


def borne_out_ms(excess_ms: float, exposed_ms: float | None) -> float:
    """Reduce an excess by what the slowest rank's own step is longer than the whole timed one.

    exposed_ms: the timed step less the slowest rank's own; None where it is not known.
    """
    return excess_ms + min(0.0, exposed_ms or 0.0)


def median_error(steps: Sequence[float]) -> float:
    """Estimate the standard error of the median of steps, by their median absolute deviation."""
    middle = median(steps)
    deviation = _MAD_FACTOR * median(abs(ms - middle) for ms in steps)
    return _MEDIAN_FACTOR * deviation / math.sqrt(len(steps))


def late_in_turn_ms(ranks: Sequence[Blocks]) -> float | None:
    """Estimate what a step costs more because now one and now another rank is late.

    Median over steps of the maximum over ranks, less the largest of the ranks' medians, in ms.
    None as for `find_straggler`, and where the ranks have not run equally many steps.
    """
    series = [[ms for block in blocks for ms in block] for blocks in ranks]
    counts = {len(steps) for steps in series}
    if len(series) < 2 or len(counts) > 1 or not all(series):
        return None
    in_turn_ms = median(max(steps) for steps in zip(*series, strict=True))
    alone_ms = max(median(steps) for steps in series)
    return float(max(0.0, in_turn_ms - alone_ms))


def pace_scatter(steps: Sequence[float]) -> float:
    """How far two paces that wander as this one does differ by chance, in ms.

    From the medians of up to eight consecutive parts of at least ten steps; 0 where there are not
    two of them. The steps may be those of all ranks together: of the slowest in each.
    """
    parts = min(_MOST_WINDOWS, len(steps) // _LEAST_OF_A_WINDOW)
    return math.sqrt(2) * stdev(map(median, _separate(steps, parts))) if parts > 1 else 0.0


def _by_part(series: Sequence[Sequence[float]]) -> list[list[float]]:
    """Compute the medians of consecutive parts of each rank's steps; one part of few steps."""
    parts = max(1, min(_MOST_PARTS, min(map(len, series)) // _LEAST_OF_A_PART))
    return [[median(part) for part in _separate(steps, parts)] for steps in series]


def _wandering(by_part: Sequence[Sequence[float]]) -> float:
    """Estimate the standard error of the difference of two ranks whose pace wanders, in ms.

    A host is slower for tenths of a second and faster again, each on its own: neighbouring steps
    agree better than they ought to. From the scatter of the parts, pooled over all ranks, and
    larger for their number by Student's t: three such errors are exceeded by chance as seldom as
    three of a normal distribution.
    """
    import numpy as np  # statistics.variance takes 0.1 ms a rank, and `import raybench` no numpy

    parts = len(by_part[0])
    if parts < 2:
        return 0.0
    few = student_t(len(by_part) * (parts - 1), _CONFIDENCE) / MARK_ERRORS
    pooled = float(np.var(by_part, axis=1, ddof=1).mean())
    return few * math.sqrt(2 * pooled / parts)


def _least_favourable(slow: Sequence[float], other: Sequence[float], excess_ms: float) -> float:
    """Compute an error by which a rank stands out only if it does by half in every part."""
    least_ms = min(one - two for one, two in zip(slow, other, strict=True))
    return max(0.0, excess_ms - least_ms) * 2 / MARK_ERRORS


def _separate(steps: Sequence[float], parts: int) -> list[Sequence[float]]:
    """Consecutive parts of nearly equal length."""
    ends = [len(steps) * part // parts for part in range(parts + 1)]
    return [steps[start:end] for start, end in pairwise(ends)]
