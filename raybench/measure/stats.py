"""Statistics of step times: how sure a median is when neighbouring samples are alike. Pure.

Step times drift with clocks and temperature, so neighbours resemble each other and the ordinary
bootstrap is too sure of itself. The moving-block bootstrap resamples runs of neighbours instead:
H. R. Künsch, "The jackknife and the bootstrap for general stationary observations", Annals of
Statistics 17(3), 1989.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from raybench.records import Measurement

RESAMPLES = 1000
# Below this an interval would say more about the method than about the samples.
MIN_SAMPLES = 5
_SEED = 20240229
# Resampled values held at once: bounds the memory at about 16 MB, whatever the sample count.
_CHUNK_VALUES = 2_000_000
_TWO_SIDED_95 = 0.975
# With fewer blocks the draw repeats itself, and its spread is a matter of luck.
_MIN_BLOCKS = 20
_MAX_PHI = 0.95
# Standard errors added to phi; from simulation, see tests/unit/test_stopping.py.
_CAUTION = 2
# Correlations die out: phi^200 is 4e-5 at the largest phi.
_LAGS = 200


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
    """95 % interval of the median of all samples; None below MIN_SAMPLES samples.

    repeats: the samples of each repeat, in the order in which they were taken. Blocks of the
    moving-block bootstrap stay within a repeat. The percentile interval around the median is
    widened for what blocks of this length cannot see, see `widening`, and cut to the range of
    the samples. The draw is seeded: equal samples give equal intervals.
    """
    import numpy as np

    series = [np.asarray(samples, dtype=np.float64) for samples in repeats]
    values = np.concatenate(series)
    if values.size < MIN_SAMPLES:
        return None
    phi = cautious_phi(series)
    block = min(block_length(values.size, phi), *(len(samples) for samples in series))
    median = float(np.median(values))
    low, high = np.quantile(_resampled_medians(series, block), [1 - _TWO_SIDED_95, _TWO_SIDED_95])
    factor = widening(values.size, block, phi)
    return Interval(
        low=max(float(values.min()), median - factor * (median - float(low))),
        high=min(float(values.max()), median + factor * (float(high) - median)),
    )


def block_length(count: int, phi: float) -> int:
    """Neighbours drawn together for `count` samples with lag-1 autocorrelation `phi`.

    The optimal length of D. N. Politis and H. White, "Automatic block-length selection for the
    dependent bootstrap", Econometric Reviews 23(1), 2004, with the autocovariances of an AR(1)
    series: (6 phi^2 n / (1 - phi^2)^2)^(1/3). At least n^(1/3) (P. Hall, J. L. Horowitz, B.-Y.
    Jing, Biometrika 82(3), 1995), as correlation need not show at lag 1; and where it would leave
    fewer than 20 blocks, not more than that.
    """
    best = math.cbrt(6 * phi**2 * count / (1 - phi**2) ** 2)
    return max(1, round(math.cbrt(count)), min(round(best), count // _MIN_BLOCKS))


def autocorrelation(repeats: Sequence[ArrayLike]) -> float | None:
    """Lag-1 autocorrelation of the ranks of the samples within each repeat, pooled over repeats.

    Ranks (Spearman) instead of values: one outlier would hide what the others have in common.
    None below MIN_SAMPLES samples and where all samples are equal.
    """
    import numpy as np

    ranks = [_centred_ranks(np.asarray(samples, dtype=np.float64)) for samples in repeats]
    variance = sum(float(r @ r) for r in ranks)
    if sum(len(r) for r in ranks) < MIN_SAMPLES or variance == 0:
        return None
    return sum(float(r[1:] @ r[:-1]) for r in ranks) / variance


def _centred_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks less their mean; equal values share the mean of their ranks."""
    import numpy as np

    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks - (len(values) + 1) / 2


def cautious_phi(repeats: Sequence[ArrayLike]) -> float:
    """Lag-1 autocorrelation without its bias, plus two standard errors: few samples hide it.

    Bias -(1 + 4 phi) / n: F. H. C. Marriott and J. A. Pope, Biometrika 41, 1954. Standard error
    sqrt((1 - phi^2) / n): M. S. Bartlett, J. R. Stat. Soc. Suppl. 8, 1946.
    """
    import numpy as np

    count = sum(np.size(samples) for samples in repeats)
    phi = autocorrelation(repeats) or 0.0
    error = math.sqrt((1 - phi**2) / count)
    return min(max(phi + (1 + 4 * phi) / count + _CAUTION * error, 0.0), _MAX_PHI)


def widening(count: int, block: int, phi: float) -> float:
    """What the bootstrap's spread of the median is multiplied by.

    First, blocks of length b see the correlation R(k) at lag k only in the share 1 - k/b, and of
    longer lags nothing. The variance of a median is that of the mean of the samples' signs about
    it, and for an AR(1) Gaussian series R(k) = 2/pi arcsin(phi^k) there. Second, few independent
    samples: Student's t in place of the normal distribution.
    """
    import numpy as np

    lags = np.arange(1, _LAGS)
    correlation = 2 / math.pi * np.arcsin(phi**lags)
    unseen = (1 + 2 * correlation.sum()) / (
        1 + 2 * (np.clip(1 - lags / block, 0, None) * correlation).sum()
    )
    independent = count / max(block, (1 + phi) / (1 - phi))
    z = NormalDist().inv_cdf(_TWO_SIDED_95)
    return math.sqrt(unseen) * student_t(max(1.0, independent - 1)) / z


def student_t(degrees: float) -> float:
    """The 97.5 % point of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, _TWO_SIDED_95))


def _resampled_medians(repeats: Sequence[NDArray[np.float64]], block: int) -> NDArray[np.float64]:
    """Medians of RESAMPLES draws of blocks.

    The samples' places in their order are drawn in their stead: whole numbers of two or four bytes
    are gathered and sorted several times as fast, and the median is the same.
    """
    import numpy as np

    rng = np.random.default_rng(_SEED)
    ordered, places = in_order(np.concatenate(repeats))
    series = np.split(places, np.cumsum([len(samples) for samples in repeats])[:-1])
    blocks = np.concatenate([np.lib.stride_tricks.sliding_window_view(s, block) for s in series])
    count = len(ordered)
    drawn = -(-count // block)
    at_once = max(1, _CHUNK_VALUES // count)
    medians: list[NDArray[np.float64]] = []
    for first in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - first)
        starts = rng.integers(0, len(blocks), size=(rows, drawn))
        resampled = np.sort(blocks.take(starts, axis=0).reshape(rows, -1)[:, :count], axis=1)
        lower, upper = resampled[:, (count - 1) // 2], resampled[:, count // 2]
        medians.append((ordered[lower] + ordered[upper]) / 2)
    return np.concatenate(medians)


def in_order(
    values: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.unsignedinteger]]:
    """The values from the smallest on, and the place of each among them."""
    import numpy as np

    order = np.argsort(values)
    dtype: type[np.unsignedinteger] = np.uint16 if len(values) <= 2**16 else np.uint32
    places: NDArray[np.unsignedinteger] = np.empty(len(values), dtype)
    places[order] = np.arange(len(values))
    return values[order], places


def repeat_std(repeats: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of the medians of the repeats; None for fewer than two."""
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


def timed_step_ns(measurement: Measurement) -> list[int]:
    """The timed samples of one rank, repeat after repeat, in nanoseconds."""
    return [ns for repetition in measurement.repetitions for ns in repetition.timed.step_ns]


def slowest_rank_step_ns(measurements: Sequence[Measurement]) -> float:
    """A point's step time in nanoseconds: median over iterations of the maximum over ranks."""
    import numpy as np

    return float(np.median(per_iteration_max([timed_step_ns(m) for m in measurements])))


def per_iteration_max(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Step time of each iteration: the maximum over ranks. One sequence per rank, equally long."""

    maxima: NDArray[np.float64] = _by_rank(ranks).max(axis=0)
    return maxima


def median_skew(ranks: Sequence[ArrayLike]) -> float:
    """Median over iterations of the slowest rank's time less the fastest one's."""
    import numpy as np

    return float(np.median(np.ptp(_by_rank(ranks), axis=0)))


def slowest_rank(ranks: Sequence[ArrayLike]) -> int | None:
    """The rank with the largest median; None where there is only one to choose from."""
    import numpy as np

    if len(ranks) < 2:
        return None
    return int(np.median(_by_rank(ranks), axis=1).argmax())


def _by_rank(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Ranks x iterations. Raises ValueError when the counts differ, which is our bug."""
    import numpy as np

    counts = sorted({np.size(samples) for samples in ranks})
    if len(counts) != 1:
        raise ValueError(f"ranks must have equally many samples, got {counts}")
    return np.asarray(ranks, dtype=np.float64)
