"""How far the median step time of a point could lie from the truth, by resampling. Pure.

Neighbouring samples resemble each other, and the ordinary bootstrap is too sure of itself then. The
moving-block bootstrap resamples runs of neighbours instead: H. R. Künsch, "The jackknife and the
bootstrap for general stationary observations", Annals of Statistics 17(3), 1989.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raybench.stats.summary import autocorrelation, student_t

Series = NDArray[np.float64]

RESAMPLES = 1000
_TWO_SIDED_95_Z = 1.959964
# With fewer blocks the draw repeats itself, and its spread is a matter of luck.
_MIN_BLOCKS = 20
_MAX_PHI = 0.95
# Standard errors added to phi: few samples hide a correlation.
_CAUTION = 2
# Correlations die out: phi^200 is 4e-5 at the largest phi.
_LAGS = 200
# Resampled values held at once: bounds the memory, whatever the sample count.
_CHUNK_VALUES = 2_000_000


def log_median_errors(repeats: Sequence[Series], seed: int, alike: Sequence[Series] = ()) -> Series:
    """RESAMPLES draws of log(resampled median / median), as far apart as the median is unsure.

    repeats: the samples of each repeat, more than 0, in the order in which they were taken.
    alike: more samples of the same point; how much neighbours have in common is learned from all.
    First repeats are drawn, then blocks of neighbours in each (the moving-block bootstrap,
    widened). Few repeats are drawn too alike, by
    sqrt((R - 1) / R); that is put right. Another seed gives independent draws.
    """
    values = np.concatenate(repeats)
    known = [*repeats, *alike]
    phi = cautious_phi(known)
    block = min(block_length(values.size, phi), *(len(samples) for samples in repeats))
    factor = widening(sum(len(samples) for samples in known), block, phi)
    if len(repeats) > 1:
        factor *= np.sqrt(len(repeats) / (len(repeats) - 1))
    medians = _draw_medians(repeats, block, seed)
    errors: Series = factor * np.log(medians / np.median(values))
    return errors


def _draw_medians(repeats: Sequence[Series], block: int, seed: int) -> Series:
    """Medians of RESAMPLES draws. Places among the samples are drawn in their stead: fast."""
    rng = np.random.default_rng(seed)
    ordered, places = in_order(np.concatenate(repeats))
    series = np.split(places, np.cumsum([len(samples) for samples in repeats])[:-1])
    views = [np.lib.stride_tricks.sliding_window_view(samples, block) for samples in series]
    blocks, sizes = np.concatenate(views), np.array([len(view) for view in views])
    firsts = np.cumsum(sizes) - sizes
    count = len(repeats)
    size = sum(len(samples) for samples in repeats) // count
    lower, upper = (size * count - 1) // 2, size * count // 2
    at_once = max(1, _CHUNK_VALUES // (size * count))
    medians = []
    for first in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - first)
        drawn = rng.integers(0, count, size=(rows, count, 1))
        within = rng.random((rows, count, -(-size // block)))
        starts = firsts[drawn] + (within * sizes[drawn]).astype(np.int64)
        resampled = blocks.take(starts, axis=0).reshape(rows, count, -1)[:, :, :size]
        found = np.sort(resampled.reshape(rows, -1), axis=1)
        medians.append((ordered[found[:, lower]] + ordered[found[:, upper]]) / 2)
    return np.concatenate(medians)


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


def cautious_phi(repeats: Sequence[ArrayLike]) -> float:
    """Lag-1 autocorrelation without its bias, plus two standard errors: few samples hide it.

    Bias -(1 + 4 phi) / n: F. H. C. Marriott and J. A. Pope, Biometrika 41, 1954. Standard error
    sqrt((1 - phi^2) / n): M. S. Bartlett, J. R. Stat. Soc. Suppl. 8, 1946.
    """
    count = sum(np.size(samples) for samples in repeats)
    phi = autocorrelation(repeats) or 0.0
    error = math.sqrt((1 - phi**2) / count)
    return min(max(phi + (1 + 4 * phi) / count + _CAUTION * error, 0.0), _MAX_PHI)


def widening(count: int, block: int, phi: float) -> float:
    """Compute what the bootstrap's spread of the median is multiplied by.

    First, blocks of length b see the correlation R(k) at lag k only in the share 1 - k/b, and of
    longer lags nothing. The variance of a median is that of the mean of the samples' signs about
    it, and for an AR(1) Gaussian series R(k) = 2/pi arcsin(phi^k) there. Second, few independent
    samples: Student's t in place of the normal distribution.
    """
    lags = np.arange(1, _LAGS)
    correlation = 2 / math.pi * np.arcsin(phi**lags)
    unseen = (1 + 2 * correlation.sum()) / (
        1 + 2 * (np.clip(1 - lags / block, 0, None) * correlation).sum()
    )
    independent = count / max(block, (1 + phi) / (1 - phi))
    return math.sqrt(unseen) * student_t(max(1.0, independent - 1)) / _TWO_SIDED_95_Z


def in_order(
    values: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.unsignedinteger]]:
    """Give the values from the smallest on, and the place of each among them."""
    order = np.argsort(values)
    dtype: type[np.unsignedinteger] = np.uint16 if len(values) <= 2**16 else np.uint32
    places: NDArray[np.unsignedinteger] = np.empty(len(values), dtype)
    places[order] = np.arange(len(values))
    return values[order], places
