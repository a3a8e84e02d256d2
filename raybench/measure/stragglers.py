"""Which rank is slower than the others by itself, from steps that wait for nobody. Pure.

The rule and its eight trials on GPUs are in docs/method.md and benchmarks/injected_delays.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, median, variance

from raybench.measure.stats import student_t

# A rank's steps in blocks that lie apart in time, in ms.
Blocks = Sequence[Sequence[float]]

# A rank is called slow where its excess is larger than both of these.
MARK_SHARE = 0.02
MARK_ERRORS = 3.0
# How seldom chance alone is three standard errors from nothing: 0.27 %.
_CONFIDENCE = 2 * NormalDist().cdf(MARK_ERRORS) - 1
# Standard error of a median of normal samples over that of their mean: sqrt(pi / 2).
_MEDIAN_FACTOR = math.sqrt(math.pi / 2)
# Standard deviation of normal samples over their median absolute deviation.
_MAD_FACTOR = 1.4826
_QUARTERS = 4
_LEAST_STEPS = 2


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
    """The slowest rank by its own steps; None for fewer than two ranks, or where one has no steps.

    ranks: the blocks of each rank, in rank order.
    """
    series = [[ms for block in blocks for ms in block] for blocks in ranks]
    if len(series) < 2 or not all(series):
        return None
    rank, other = slowest_and_other([median(steps) for steps in series])
    return Straggler(
        rank=rank,
        other=other,
        excess_ms=median(series[rank]) - median(series[other]),
        error_ms=max(
            math.hypot(median_error(series[rank]), median_error(series[other])),
            _wandering(series),
        ),
    )


def slowest_and_other(medians: Sequence[float]) -> tuple[int, int]:
    """The rank of the largest value, and the one of the lower median of the others.

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
    """An excess without what the slowest rank's own step is longer than the whole timed one.

    exposed_ms: the timed step less the slowest rank's own; None where it is not known.
    """
    return excess_ms + min(0.0, exposed_ms or 0.0)


def median_error(steps: Sequence[float]) -> float:
    """Standard error of the median of at least one step, by their median absolute deviation."""
    middle = median(steps)
    deviation = _MAD_FACTOR * median(abs(ms - middle) for ms in steps)
    return _MEDIAN_FACTOR * deviation / math.sqrt(len(steps))


def late_in_turn_ms(ranks: Sequence[Blocks]) -> float | None:
    """What a step costs more because now one and now another rank is late.

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


def _wandering(series: Sequence[Sequence[float]]) -> float:
    """Standard error of the difference of two ranks whose pace wanders, in ms.

    A host is slower for tenths of a second and faster again, each on its own: neighbouring steps
    agree better than they ought to. From the scatter of the medians of quarters of the steps,
    pooled over all ranks, and larger for the few quarters by Student's t: three such errors are
    exceeded by chance as seldom as three of a normal distribution.
    """
    parts = min(_QUARTERS, min(map(len, series)) // _LEAST_STEPS)
    if parts < 2:
        return 0.0
    spreads = [variance([median(part) for part in _split(steps, parts)]) for steps in series]
    few = student_t(len(series) * (parts - 1), _CONFIDENCE) / MARK_ERRORS
    return few * math.sqrt(2 * fmean(spreads) / parts)


def _split(steps: Sequence[float], parts: int) -> list[Sequence[float]]:
    """Consecutive parts of nearly equal length."""
    ends = [len(steps) * part // parts for part in range(parts + 1)]
    return [steps[start:end] for start, end in pairwise(ends)]
