"""By how much the mean of some runs differs from that of others, and how sure that is. Pure.

The difference of two means under two random effects, nodes and starts, beside what the samples of
each run leave open. A node that both sides used in equal shares cancels out. The noise of nodes and
starts is known by few degrees of freedom, so it is taken as Student's t, to which the normal error
of the samples is added: as one normal variance with more degrees of freedom, its tails were lost,
and one comparison in six of unchanged runs with heavy-tailed starts had a false verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raybench.analysis.repeats import Sides, Start
from raybench.analysis.start_noise import StartNoise

# The error of the samples, at places of equal distance, and the weight of each.
_Z = np.linspace(-6, 6, 201)
_WEIGHTS = np.exp(-(_Z**2) / 2) / np.exp(-(_Z**2) / 2).sum()
_HALVINGS = 40


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps its interval
class MeanChange:
    """size: the logarithm of the ratio of the geometric means. looks: among how many splits of the
    runs this one was found. noise_sd, degrees: of nodes and starts. sample_sd: of the samples."""

    size: float
    noise_sd: float
    degrees: float
    sample_sd: float
    looks: int = 1

    @property
    def p_value(self) -> float:
        """The chance to see such a change, either way, where there is none."""
        return min(1.0, self.looks * self._chance(abs(self.size)))

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 90 % interval of the ratio: the true one is below it in 5 %, and above in 5 %."""
        half = self._quantile(0.1)
        return math.exp(self.size - half), math.exp(self.size + half)

    def least_seen(self, level: float) -> float:
        """Find the relative change whose p_value is `level`: a smaller one cannot be called."""
        return math.expm1(self._quantile(level / self.looks))

    def _chance(self, size: float) -> float:
        """Compute the chance that error and noise together are as large as `size`, either way."""
        from scipy.special import stdtr

        tails: NDArray[np.float64] = stdtr(
            self.degrees, (self.sample_sd * _Z - size) / self.noise_sd
        )
        return 2 * float(tails @ _WEIGHTS)

    def _quantile(self, chance: float) -> float:
        """Find the size that error and noise exceed with this chance."""
        from scipy.special import stdtrit

        low = 0.0
        high = self.noise_sd * float(stdtrit(self.degrees, 1 - chance / 4)) + 6 * self.sample_sd
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._chance(middle) > chance else (low, middle)
        return high


def mean_change(sides: Sides, starts: StartNoise, nodes: StartNoise, within: float) -> MeanChange:
    """Compute the mean change of two sides and how sure it is. starts, nodes: the noise of either.
    within: variance of the logarithm of one run's time.

    The degrees of freedom of the two together are their weighted harmonic mean: more would promise
    thinner tails than the two have.
    """
    base, new = (np.log([start.time_ms for start in side]) for side in (sides.base, sides.new))
    share = 1 / len(base) + 1 / len(new)
    of_nodes = _node_share(sides.base, sides.new) * nodes.sd**2
    of_starts = share * starts.sd**2
    variance = of_nodes + of_starts
    return MeanChange(
        size=float(new.mean() - base.mean()),
        noise_sd=math.sqrt(variance),
        degrees=variance / (of_nodes / nodes.degrees + of_starts / starts.degrees),
        sample_sd=math.sqrt(share * within),
        looks=sides.looks,
    )


def _node_share(base: Sequence[Start], new: Sequence[Start]) -> float:
    """By which the variance of nodes is in the difference: 2 for a run each on two nodes."""
    weights: Counter[str] = Counter()
    for side, sign in ((base, -1), (new, 1)):
        for start in side:
            weights[start.node] += sign / len(side)  # type: ignore[assignment]
    return float(sum(weight**2 for weight in weights.values()))
