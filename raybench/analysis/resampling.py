"""How far the median step time of a point could lie from the truth, by resampling. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raybench.measure.stats import RESAMPLES, block_length, cautious_phi, in_order, widening

Series = NDArray[np.float64]

# Resampled values held at once: bounds the memory, whatever the sample count.
_CHUNK_VALUES = 2_000_000


def log_median_errors(repeats: Sequence[Series], seed: int, alike: Sequence[Series] = ()) -> Series:
    """RESAMPLES draws of log(resampled median / median), as far apart as the median is unsure.

    repeats: the samples of each repeat, more than 0, in the order in which they were taken.
    alike: more samples of the same point; how much neighbours have in common is learned from all.
    First repeats are drawn, then blocks of neighbours in each (the moving-block bootstrap of
    `raybench.measure.stats`, widened as there). Few repeats are drawn too alike, by
    sqrt((R - 1) / R); that is put right. Another seed gives independent draws.
    """
    values = np.concatenate(repeats)
    known = [*repeats, *alike]
    phi = cautious_phi(known)
    block = min(block_length(values.size, phi), *(len(samples) for samples in repeats))
    factor = widening(sum(len(samples) for samples in known), block, phi)
    if len(repeats) > 1:
        factor *= np.sqrt(len(repeats) / (len(repeats) - 1))
    medians = _resampled_medians(repeats, block, seed)
    errors: Series = factor * np.log(medians / np.median(values))
    return errors


def _resampled_medians(repeats: Sequence[Series], block: int, seed: int) -> Series:
    """Medians of RESAMPLES draws. Places among the samples are drawn, as `measure.stats` does."""
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
