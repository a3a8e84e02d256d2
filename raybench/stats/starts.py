"""How much the starts of a point differ, for each of several points. Pure.

A start is one set of fresh processes: a round of a run for `raybench report`, a run for
`raybench compare`. Both use the one model here. The logarithm of a point's time in a start is the
level of its side, plus an effect of the start. The effect has its own variance at each point.

Two or three starts of one point estimate its variance poorly. So it is shrunk towards that of all
points, the more so the more the points are alike (G. K. Smyth, "Linear models and empirical Bayes
methods for assessing differential expression in microarray experiments", Stat. Appl. Genet. Mol.
Biol. 3(1), 2004). Points of one start may all be moved by the same cause. Then together they say
hardly more than one of them, so the degrees of freedom that the other points add are limited to
those of the points that are independent, and to those of the point itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raybench.stats.summary import student_t

# All other points together count at most as much as the point's own starts: else the interval of
# a point that is much noisier than the rest would be far too narrow.
_MOST_OTHERS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """The standard deviation of the logarithms of a point's starts, with its degrees of freedom."""

    sd: float
    degrees: float

    def half_width(self, share: float, confidence: float = 0.95) -> float:
        """Return half the width of the confidence interval of a mean, or of a difference of means.

        share: its variance over that of one start: 1 / n for the mean of n starts.
        """
        return student_t(self.degrees, confidence) * self.sd * math.sqrt(share)

    def p_value(self, size: float, share: float) -> float:
        """Return the one-sided p-value of a difference of `size`.

        share: the variance of the difference over that of one start.
        """
        from scipy.special import stdtr

        error = self.sd * math.sqrt(share)
        if error == 0:
            return 0.5 if size == 0 else float(size < 0)
        return float(stdtr(self.degrees, -size / error))


def scatter(
    values: NDArray[np.float64], sides: Sequence[int] | None = None
) -> list[Scatter | None]:
    """Estimate the scatter of starts of each point; None where no side has two starts of it.

    values: [points, starts], logarithms of times or rates; NaN where a start lacks a point.
    sides: for each start the number of its side; None: one side. Starts of a side are starts of the
    same thing; the levels of two sides may differ.
    """
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
    """Shrink the variance of each point towards that of all points.

    rest: [points, starts], the values less the mean of their side. degrees: of freedom, by point.
    """
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
    """Return how many independent points would say as much as these do together; 1 or more.

    The mean of n independent points has the n-th part of their variance. Where a start moves all
    points alike, the mean scatters as one point does. With d degrees of freedom the count is
    reduced by d / (d + 1): the mean of few starts often scatters less than it should.
    """
    means = np.nansum(rest, axis=0) / np.maximum((~np.isnan(rest)).sum(axis=0), 1)
    most = float(degrees.max())
    of_mean = float(np.nansum(means**2)) / most
    count = len(rest)
    if of_mean <= 0:
        return float(count)
    return float(np.clip(variances.mean() / of_mean * most / (most + 1), 1, count))


def _fit_prior(variances: NDArray[np.float64], degrees: NDArray[np.float64]) -> tuple[float, float]:
    """Return the common level of the points' variances, and its weight in degrees of freedom.

    By the mean and the variance of their logarithms: Smyth 2004, section 6.2. Infinite degrees
    where the variances differ by no more than chance explains; 0 for fewer than two points.
    """
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
