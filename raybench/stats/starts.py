"""How far starts of the same thing lie apart, for each of several points. Pure.

A start is one set of fresh processes: a round of a run for `raybench report`, a run for
`raybench compare`. Both use the one model here. The logarithm of a point's time in a start is the
level of its side, plus an effect of the start. The effect has its own variance at each point.

Two or three starts of one point tell its variance badly. So it is drawn towards what all points
show, by as much as the points are alike (G. K. Smyth, "Linear models and empirical Bayes methods
for assessing differential expression in microarray experiments", Stat. Appl. Genet. Mol. Biol.
3(1), 2004). Points of one start may all be moved by the same cause. Then they tell together hardly
more than one of them, so the degrees of freedom that the other points add are limited to those of
the points that are independent, and to those of the point itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raybench.stats.summary import student_t

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


# All other points together count at most as much as the point's own starts: else the interval of
# one that is much noisier than the rest would be far too narrow.
_MOST_OTHERS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """The standard deviation `sd` of one start of a point, with its degrees of freedom."""

    sd: float
    degrees: float

    def half_width(self, share: float, confidence: float = 0.95) -> float:
        """Return half of the interval of a mean or a difference of means.

        share: its variance over that of one start: 1 / n for the mean of n starts.
        """
        return student_t(self.degrees, confidence) * self.sd * math.sqrt(share)

    def p_value(self, size: float, share: float) -> float:
        """Return the one-sided chance of a difference of `size` or more where there is none."""
        from scipy.special import stdtr

        error = self.sd * math.sqrt(share)
        if error == 0:
            return 0.5 if size == 0 else float(size < 0)
        return float(stdtr(self.degrees, -size / error))


def scatter(
    values: NDArray[np.float64], sides: Sequence[int] | None = None
) -> list[Scatter | None]:
    """Estimate the scatter of starts of each point; None where no side has two starts of it.

    values: points x starts, logarithms of times or rates; NaN where a start lacks a point.
    sides: the side that each start belongs to, all the same one by default. Starts of one side
    are starts of the same thing; the level of a side may differ.
    """
    import numpy as np

    of_start = np.zeros(values.shape[1], int) if sides is None else np.asarray(sides)
    rest = np.full(values.shape, np.nan)
    degrees = np.zeros(len(values))
    for side in np.unique(of_start):
        chosen = values[:, of_start == side]
        counts = (~np.isnan(chosen)).sum(axis=1)
        means = np.nansum(chosen, axis=1) / np.maximum(counts, 1)
        rest[:, of_start == side] = chosen - means[:, np.newaxis]
        degrees += np.maximum(counts - 1, 0)
    known = degrees > 0
    found: list[Scatter | None] = [None] * len(values)
    if known.any():
        moderated = _moderate(rest[known], degrees[known])
        for place, one in zip(np.flatnonzero(known), moderated, strict=True):
            found[place] = one
    return found


def _moderate(rest: NDArray[np.float64], degrees: NDArray[np.float64]) -> list[Scatter]:
    """Draw the variance of each point towards that of all. rest: less the mean of each side."""
    import numpy as np

    variances = np.nansum(rest**2, axis=1) / degrees
    level, more = _fit_prior(variances, degrees)
    others = _independent_points(rest, variances, degrees) - 1
    more = min(more, min(others, _MOST_OTHERS) * float(degrees.mean()))
    whole = degrees + more
    return [
        Scatter(sd=math.sqrt(variance), degrees=float(of_point))
        for variance, of_point in zip(
            (degrees * variances + more * level) / whole, whole, strict=True
        )
    ]


def _independent_points(
    rest: NDArray[np.float64], variances: NDArray[np.float64], degrees: NDArray[np.float64]
) -> float:
    """Count the independent points that would tell as much as these do together.

    The mean of n independent points has the n-th part of their variance. Where a start moves all
    points alike, the mean scatters as one point does. With d degrees of freedom the count is
    reduced by d / (d + 1): the mean of few starts often scatters less than it should.
    """
    import numpy as np

    means = np.nansum(rest, axis=0) / np.maximum((~np.isnan(rest)).sum(axis=0), 1)
    most = float(degrees.max())
    of_mean = float(np.nansum(means**2)) / most
    count = len(rest)
    if of_mean <= 0:
        return float(count)
    return float(np.clip(variances.mean() / of_mean * most / (most + 1), 1, count))


def _fit_prior(variances: NDArray[np.float64], degrees: NDArray[np.float64]) -> tuple[float, float]:
    """Fit the level of the points' variances, and how alike they are, in degrees of freedom.

    By the mean and the variance of their logarithms: Smyth 2004, section 6.2. Infinite degrees
    where the variances differ by no more than chance lets them.
    """
    import numpy as np
    from scipy.special import digamma, polygamma

    positive = variances > 0
    if positive.sum() < 2:
        return float(variances.mean()), 0.0
    half = degrees[positive] / 2
    logs = np.log(variances[positive]) - digamma(half) + np.log(half)
    beyond = float(logs.var(ddof=1) - polygamma(1, half).mean())
    if beyond <= 0:
        return float(variances.mean()), math.inf
    more = 2 * _inverse_trigamma(beyond)
    return float(np.exp(logs.mean() + digamma(more / 2) - math.log(more / 2))), more


def _inverse_trigamma(value: float) -> float:
    """Solve trigamma(x) = value, by Newton's method as in Smyth's appendix."""
    from scipy.special import polygamma

    found = 0.5 + 1 / value
    for _ in range(50):
        at = float(polygamma(1, found))
        step = at * (1 - at / value) / float(polygamma(2, found))
        found += step
        if abs(step) < 1e-8 * found:
            break
    return found
