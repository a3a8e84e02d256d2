"""Statistics of step times: how sure a median is when neighbouring samples are alike. Pure.

Step times drift with clocks and temperature, so neighbours resemble each other and n samples tell
less than n independent ones. The interval of the median is therefore taken from the order
statistics of the samples with their effective number in the place of n.
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
# Sokal's constant: so many autocorrelation times are summed up.
_WINDOW = 5
# Ranks in lockstep take equally long for a step; their medians differ by noise alone.
_LOCKSTEP = 0.01
# Two levels that take turns show their correlation at one of these quantiles at least.
_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A range that holds the true value with 95 % confidence, in the unit of the samples."""

    low: float
    high: float

    def towards(self, share: float) -> Interval:
        """Move the end to which the value may be heading on by this share of the interval."""
        # By a ratio: nothing takes no time.
        low = self.low / (1 - min(share, 0.0))
        return Interval(low=low, high=self.high * (1 + max(share, 0)))


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


def median_interval(repeats: Sequence[ArrayLike], confidence: float = 0.95) -> Interval | None:
    """Interval of the median of all samples; None below MIN_SAMPLES samples.

    repeats: the samples of each repeat, in the order in which they were taken.
    Of n_eff independent samples the number below the median is binomial, so the interval reaches
    from the quantile 1/2 - t / (2 sqrt(n_eff)) to the one as far above 1/2: H. A. David, H. N.
    Nagaraja, "Order Statistics", 2003, section 7.1; t is Student's, as n_eff is an estimate.
    n_eff is the least over the quartiles, and cautious by a standard error.
    """
    import numpy as np

    values = np.sort(np.concatenate([np.asarray(samples, dtype=np.float64) for samples in repeats]))
    if values.size < MIN_SAMPLES:
        return None
    independent = effective_samples(repeats, shares=_SHARES)
    reach = student_t(max(1.0, independent - 1), confidence) / 2 / math.sqrt(independent)
    outer = max(0, math.floor(values.size * (0.5 - reach)))
    return Interval(low=float(values[outer]), high=float(values[values.size - 1 - outer]))


def effective_samples(
    repeats: Sequence[ArrayLike], caution: float = 1.0, shares: Sequence[float] = (0.5,)
) -> float:
    """How many independent samples would tell as much about the median as these do; 1 to all.

    The variance of a median is that of the mean of the samples' signs about it, so the samples
    are divided by the autocorrelation time of these signs.
    caution: standard errors added to the autocorrelation time, which few samples tell badly.
    shares: of several quantiles the longest time counts. A level that was visited once and is
    seldom yet shows at the outer ones alone.
    """
    import numpy as np

    series = [np.asarray(samples, dtype=np.float64) for samples in repeats]
    values = np.concatenate(series)
    times = [
        autocorrelation_time(_sides(series, float(level)), caution)
        for level in np.quantile(values, shares)
    ]
    return max(1.0, values.size / max(times))


def _sides(series: Sequence[NDArray[np.float64]], level: float) -> list[NDArray[np.float64]]:
    """On which side of a level each sample lies (-1, 0, 1), less the mean of all."""
    import numpy as np

    sides = [np.sign(samples - level) for samples in series]
    mean = np.concatenate(sides).mean()
    return [side - mean for side in sides]


def autocorrelation_time(series: Sequence[NDArray[np.float64]], caution: float = 0.0) -> float:
    """1 + 2 x the sum of the autocorrelations of values around 0; at least 1.

    series: stretches of values that belong together but do not follow each other.
    Summed up to the first lag that is as long as _WINDOW half times found so far (A. D. Sokal,
    "Monte Carlo methods in statistical mechanics", 1997, section 3), with the bias taken off that
    comes from subtracting the sample's own centre, and `caution` standard errors added (U. Wolff,
    "Monte Carlo errors with less errors", Comput. Phys. Commun. 156, 2004, equations 42 and 49).
    """
    import numpy as np

    count = sum(len(values) for values in series)
    sums = _products_at_lag(series)
    if sums[0] <= 0:
        return 1.0
    lags = np.arange(len(sums))
    pairs = np.array([np.maximum(len(values) - lags, 0) for values in series]).sum(axis=0)
    times = 2 * np.cumsum(sums / np.maximum(pairs, 1) * count / sums[0]) - 1
    is_enough = lags >= _WINDOW * times / 2
    last = int(is_enough.argmax()) if is_enough.any() else len(lags) - 1
    terms = 2 * last + 1
    unbiased = float(times[last]) * (1 + terms / count)
    return max(1.0, unbiased * (1 + caution * math.sqrt(2 * terms / count)))


def _products_at_lag(series: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Sum products of values a lag apart, for each lag below half the longest series."""
    import numpy as np

    longest = max(len(values) for values in series)
    # Of twice the length, so that the end of a series does not meet its beginning; powers of 2 are
    # fast.
    length = 1 << (2 * longest - 1).bit_length()
    spectra = [np.abs(np.fft.rfft(values, length)) ** 2 for values in series]
    products: NDArray[np.float64] = np.fft.irfft(np.sum(spectra, axis=0), length)
    return products[: max(1, longest // 2)]


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
