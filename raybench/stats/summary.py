"""Statistics of step times: medians over ranks, their intervals, and changes of level. Pure.

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
MIN_SAMPLES = 5
# n samples are cut into n^0.4 batches, and into 20 at most.
_BATCHES_GROW, _MOST_BATCHES = 0.4, 20
# In place of 95 %: neighbouring batches still resemble each other a little.
_CONFIDENCE = 0.965
# Ranks in lockstep take equally long for a step; their medians differ by noise alone.
_LOCKSTEP = 0.01
# With fewer steps a change of level cannot be told from noise.
MIN_LEVEL_STEPS = 25
# Batches of a third of the steps. Shorter ones than 4 steps would resemble their neighbours.
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

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    std: float


def summarize(samples: ArrayLike) -> Summary:
    """Return the summary; percentiles are interpolated. Raises ValueError without samples."""
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a summary needs at least one sample")
    p50, p90, p95, p99 = np.percentile(values, [50, 90, 95, 99])
    return Summary(
        mean=float(values.mean()),
        p50=float(p50),
        p90=float(p90),
        p95=float(p95),
        p99=float(p99),
        min=float(values.min()),
        max=float(values.max()),
        std=float(values.std(ddof=1)) if values.size > 1 else 0.0,
    )


def median_interval(repeats: Sequence[ArrayLike]) -> Interval | None:
    """Return the 95 % interval of the median of all samples, in their unit.

    None below MIN_SAMPLES samples, and where a sample is 0 or negative.
    repeats: the samples of each repeat, in the order in which they were taken.
    Student's t over the logarithms of the medians of batches: the method of batch means (A. M.
    Law, "Simulation modeling and analysis", 2015, section 9.5.3). Neighbours within a batch may
    resemble each other. With several repeats each is a batch.
    """
    series = [np.asarray(samples, dtype=np.float64) for samples in repeats]
    values = np.concatenate(series)
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
    length = len(series) // count
    medians: NDArray[np.float64] = np.median(
        series[len(series) - count * length :].reshape(count, length), axis=1
    )
    return medians


def student_t(degrees: float, confidence: float = 0.95) -> float:
    """Return the two-sided quantile of Student's t: the half width of its central interval."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + confidence) / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelChange:
    """How much the level of a series changes, relative to its median.

    size: three times the difference of the last two thirds, which is what a straight drift changes
    from the first step to the last. error: the standard error of `size`, with `degrees` degrees of
    freedom, from the scatter of batch medians within the two thirds.
    """

    size: float
    error: float
    degrees: int

    def exceeds(self, least: float, errors: float) -> bool:
        """Return whether the change is larger than `least` and than so many standard errors.

        `errors` counts errors that are known well; for Student's t the equally likely multiple is
        taken. 3: noise does it in 1 of 370 series.
        """
        from scipy.special import ndtr, stdtrit

        multiple = float(stdtrit(self.degrees, ndtr(errors)))
        return abs(self.size) > max(least, multiple * self.error)


def level_change(step_ns: Sequence[float]) -> LevelChange | None:
    """Compare the last third of a series of step times with the third before it.

    None below MIN_LEVEL_STEPS steps. This one question ends a warm-up, makes timing begin anew, and
    marks a point as unsteady.
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


# In all functions below `ranks` has a sequence of samples for each rank, equally long; they raise
# ValueError where the lengths differ, which is a bug of ours.


def step_time(ranks: Sequence[ArrayLike]) -> float:
    """Return the step time of a point, in the unit of the samples: the median of `step_series`."""
    return float(np.median(step_series(ranks)))


def step_series(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Return the point's time of each iteration.

    In lockstep, where the ranks' medians agree within 1 %, that is the median over the ranks: each
    rank sees the same steps, and where it sees their ends jitters. Else the times of the rank with
    the largest median. The maximum over ranks of each iteration would add the jitter of the ranks.
    """
    values = _by_rank(ranks)
    medians = np.median(values, axis=1)
    in_lockstep = bool(np.ptp(medians) <= _LOCKSTEP * medians.max())
    series: NDArray[np.float64] = (
        np.median(values, axis=0) if in_lockstep else values[medians.argmax()]
    )
    return series


def per_iteration_max(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Return the maximum over ranks of each iteration."""
    maxima: NDArray[np.float64] = _by_rank(ranks).max(axis=0)
    return maxima


def median_skew(ranks: Sequence[ArrayLike]) -> float:
    """Return the median over iterations of the slowest rank's time less the fastest one's."""
    return float(np.median(np.ptp(_by_rank(ranks), axis=0)))


def median_of_smallest(ranks: Sequence[Sequence[float]]) -> float | None:
    """Return the median over steps of the minimum over ranks; None where a rank has no steps."""
    return float(np.median(_by_rank(ranks).min(axis=0))) if all(ranks) else None


def median_above_smallest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return for each rank the median over steps of its value less the minimum over ranks."""
    values = _by_rank(ranks)
    return [float(median) for median in np.median(values - values.min(axis=0), axis=1)]


def _by_rank(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Return an array of [ranks, iterations]."""
    counts = sorted({np.size(samples) for samples in ranks})
    if len(counts) != 1:
        raise ValueError(f"ranks must have equally many samples, got {counts}")
    return np.asarray(ranks, dtype=np.float64)
