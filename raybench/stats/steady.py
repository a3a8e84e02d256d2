"""Whether step times stay at one level: the last third of a series against the third before it.

The one question that ends a warm-up, that makes timing begin anew, and that marks a point as
unsteady. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raybench.stats.summary import batch_medians

# With fewer steps a change cannot be told from noise.
MIN_STEPS = 25
# Batches of a third. Shorter ones than 4 steps would resemble their neighbours.
_MOST_BATCHES, _SHORTEST_BATCH = 10, 3


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
        """Whether the change is larger than `least` and than so many standard errors.

        `errors` counts errors that are known well; of Student's t the equally likely multiple is
        taken. 3: noise does it in 1 of 370 series.
        """
        from scipy.special import ndtr, stdtrit

        multiple = float(stdtrit(self.degrees, ndtr(errors)))
        return abs(self.size) > max(least, multiple * self.error)


def level_change(step_ns: Sequence[float]) -> LevelChange | None:
    """Estimate the change of level in a series of step times; None below MIN_STEPS steps."""
    import numpy as np

    if len(step_ns) < MIN_STEPS:
        return None
    third = len(step_ns) // 3
    count = min(_MOST_BATCHES, third // _SHORTEST_BATCH)
    earlier, later = (
        batch_medians(part, count) for part in (step_ns[-2 * third : -third], step_ns[-third:])
    )
    level = float(np.median(step_ns[-2 * third :])) or 1.0
    variance = float(earlier.var(ddof=1) + later.var(ddof=1)) / count
    return LevelChange(
        size=3 * float(later.mean() - earlier.mean()) / level,
        error=3 * math.sqrt(variance) / level,
        degrees=2 * (count - 1),
    )
