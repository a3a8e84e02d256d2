"""Statistics of step times: how sure a median is when neighbouring samples are alike. Pure.

Step times drift with clocks and temperature, so neighbours resemble each other and the ordinary
bootstrap is too sure of itself. The moving-block bootstrap resamples runs of neighbours instead:
H. R. Künsch, "The jackknife and the bootstrap for general stationary observations", Annals of
Statistics 17(3), 1989. Block length n^(1/3): P. Hall, J. L. Horowitz, B.-Y. Jing, "On blocking
rules for the bootstrap with dependent data", Biometrika 82(3), 1995.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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


def median_interval(samples: ArrayLike, *, block: int | None = None) -> Interval | None:
    """95 % percentile interval of the median; None below MIN_SAMPLES samples.

    samples: in the order in which they were taken.
    block: neighbours that are drawn together; by default n^(1/3). 1 is the ordinary bootstrap.
    The draw is seeded: equal samples give equal intervals.
    """
    import numpy as np

    values = np.asarray(samples, dtype=np.float64)
    if values.size < MIN_SAMPLES:
        return None
    medians = _resampled_medians(values, block or block_length(values.size))
    low, high = np.quantile(medians, [0.025, 0.975])
    return Interval(low=float(low), high=float(high))


def block_length(count: int) -> int:
    """Neighbours drawn together for `count` samples: n^(1/3), at least 1."""
    return max(1, round(math.cbrt(count)))


def _resampled_medians(values: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    import numpy as np

    rng = np.random.default_rng(_SEED)
    blocks = -(-values.size // block)
    at_once = max(1, _CHUNK_VALUES // values.size)
    medians: list[NDArray[np.float64]] = []
    for first in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - first)
        starts = rng.integers(0, values.size - block + 1, size=(rows, blocks, 1))
        drawn = (starts + np.arange(block)).reshape(rows, -1)[:, : values.size]
        medians.append(np.median(values[drawn], axis=1))
    return np.concatenate(medians)


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
