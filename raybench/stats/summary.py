"""Statistics of step times: how sure a median is when neighbouring samples are alike. Pure.

Step times drift with clocks and temperature, so neighbours resemble each other and n samples tell
less than n independent ones. The interval of the median is therefore taken from the medians of
batches of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

# Below this an interval would say more about the method than about the samples.
MIN_SAMPLES = 5
# n samples are cut into n^0.4 batches, and into 20 at most.
_BATCHES_GROW, _MOST_BATCHES = 0.4, 20
# In place of 95 %: neighbouring batches still resemble each other a little.
_CONFIDENCE = 0.965
# Ranks in lockstep take equally long for a step; their medians differ by noise alone.
_LOCKSTEP = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A range that holds the true value with 95 % confidence, in the unit of the samples."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Location and spread of samples, in their unit; std has n - 1 below, 0 for one sample."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    std: float


def summarize(samples: ArrayLike) -> Summary:
    """Summary of at least one sample; percentiles are interpolated. Raises ValueError if empty."""
    import numpy as np

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
    """95 % interval of the median of all samples, in their unit.

    None below MIN_SAMPLES samples, and where a step took no time.
    repeats: the samples of each repeat, in the order in which they were taken.
    Student's t over the logarithms of the medians of batches: the method of batch means (A. M.
    Law, "Simulation modeling and analysis", 2015, section 9.5.3). Neighbours within a batch may
    resemble each other. Of several repeats each is a batch.
    """
    import numpy as np

    series = [np.asarray(samples, dtype=np.float64) for samples in repeats]
    values = np.concatenate(series)
    if values.size < MIN_SAMPLES or values.min() <= 0:
        return None
    count = min(_MOST_BATCHES, max(2, round(values.size**_BATCHES_GROW)))
    medians = [np.median(s) for s in series] if len(series) > 1 else batch_medians(values, count)
    logs = np.log(medians)
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    reach = math.exp(student_t(len(logs) - 1, _CONFIDENCE) * error)
    median = float(np.median(values))
    return Interval(low=median / reach, high=median * reach)


def batch_medians(samples: ArrayLike, count: int) -> NDArray[np.float64]:
    """Medians of `count` equally long batches; the first samples are left out where some remain."""
    import numpy as np

    series = np.asarray(samples, dtype=np.float64)
    length = len(series) // count
    medians: NDArray[np.float64] = np.median(
        series[len(series) - count * length :].reshape(count, length), axis=1
    )
    return medians


def autocorrelation(repeats: Sequence[ArrayLike]) -> float | None:
    """Lag-1 autocorrelation of the ranks of the samples within each repeat, pooled over repeats.

    Ranks (Spearman) instead of values: one outlier would hide what the others have in common.
    None below MIN_SAMPLES samples and where all samples are equal.
    """
    import numpy as np

    ranks = [center_ranks(np.asarray(samples, dtype=np.float64)) for samples in repeats]
    variance = sum(float(r @ r) for r in ranks)
    if sum(len(r) for r in ranks) < MIN_SAMPLES or variance == 0:
        return None
    return sum(float(r[1:] @ r[:-1]) for r in ranks) / variance


def center_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks less their mean; equal values share the mean of their ranks."""
    import numpy as np

    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks - (len(values) + 1) / 2


def student_t(degrees: float, confidence: float = 0.95) -> float:
    """How far Student's t reaches to either side with this confidence."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + confidence) / 2))


def repeat_std(repeats: Sequence[Sequence[float]]) -> float | None:
    """Compute the standard deviation of the repeats' medians; None for fewer than two."""
    import numpy as np

    if len(repeats) < 2:
        return None
    return float(np.std([np.median(samples) for samples in repeats], ddof=1))


def median_of_smallest(ranks: Sequence[Sequence[float]]) -> float | None:
    """Median over steps of the minimum over ranks; None where a rank has none."""
    import numpy as np

    return float(np.median(_by_rank(ranks).min(axis=0))) if all(ranks) else None


def median_above_smallest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """For each rank the median over steps of its value less the minimum over ranks."""
    import numpy as np

    values = _by_rank(ranks)
    return [float(median) for median in np.median(values - values.min(axis=0), axis=1)]


def step_time(ranks: Sequence[ArrayLike]) -> float:
    """Compute a point's step time, in the unit of the samples: the median of `step_series`."""
    import numpy as np

    return float(np.median(step_series(ranks)))


def step_series(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Compute the point's time of each iteration, from ranks x iterations; a sequence per rank.

    In lockstep, where the ranks' medians agree within 1 %, the median over the ranks: each rank
    sees the same steps, and where it sees their ends jitters. Else those of the rank with the
    largest median. The maximum over ranks of each iteration would add the jitter of the ranks.
    """
    import numpy as np

    values = _by_rank(ranks)
    medians = np.median(values, axis=1)
    in_lockstep = bool(np.ptp(medians) <= _LOCKSTEP * medians.max())
    series: NDArray[np.float64] = (
        np.median(values, axis=0) if in_lockstep else values[medians.argmax()]
    )
    return series


def per_iteration_max(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Step time of each iteration: the maximum over ranks. One sequence per rank, equally long."""
    maxima: NDArray[np.float64] = _by_rank(ranks).max(axis=0)
    return maxima


def median_skew(ranks: Sequence[ArrayLike]) -> float:
    """Median over iterations of the slowest rank's time less the fastest one's."""
    import numpy as np

    return float(np.median(np.ptp(_by_rank(ranks), axis=0)))


def _by_rank(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Ranks x iterations. Raises ValueError when the counts differ, which is our bug."""
    import numpy as np

    counts = sorted({np.size(samples) for samples in ranks})
    if len(counts) != 1:
        raise ValueError(f"ranks must have equally many samples, got {counts}")
    return np.asarray(ranks, dtype=np.float64)
