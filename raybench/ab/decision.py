"""Whether points are slower, faster or the same, by pairs of fresh starts of two versions.

A pair is one start of each version, one after the other. Its ratio is the rate of the new version
divided by the rate of the old version. Each point is looked at after 3, 4, 5, 6, 8, 10 and 12
pairs, until it is decided. At each look its interval is Student's t of the logarithms of its
ratios:

* The error is spent over the looks (K. K. G. Lan, D. L. DeMets, Biometrika 70(3), 1983, with a
  function of the type of Pocock) and divided by the number of points.
* The variance is moderated by the other points (G. K. Smyth, Stat. Appl. Genet. Mol. Biol. 3(1),
  2004), which add at most 4 degrees of freedom.
* A slower point must be slower again in 3 fresh pairs.

`benchmarks.simulations.ab` measures how often such verdicts are wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, polygamma, stdtrit

# Numbers of pairs after which a point is looked at.
LOOKS = (3, 4, 5, 6, 8, 10, 12)
# Fresh pairs in which a slower point must be slower again.
CONFIRMING_PAIRS = 3
# Share of jobs in which any interval of any point, at any look, misses the true change.
ERROR = 0.1
# Lower bound of the standard deviation, for pairs that agree to the last digit.
_LEAST_SD = 1e-6
# Degrees of freedom that the other points may add to the variance of a point.
_PRIOR_DEGREES = np.linspace(4.0, 0.2, 100)
# Variance of the logarithm of a sample variance, indexed by its degrees of freedom.
_TRIGAMMA = polygamma(1, np.maximum(np.arange(LOOKS[-1] + CONFIRMING_PAIRS), 1) / 2)
# Power: the share of slowdowns of size `detectable` that each of the two tests finds.
_POWER = 0.95

Floats = NDArray[np.float64]


class Decision(IntEnum):
    """What is decided about a point."""

    GO_ON = 0
    SLOWER = 1
    FASTER = 2
    SAME = 3
    # Still open after the last look.
    UNDECIDED = 4
    # Slower at a look, but not in the fresh pairs after it.
    UNCONFIRMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What is decided about all points; arrays of the shape [..., points]."""

    # Values of `Decision`.
    decision: NDArray[np.int64]
    # Number of pairs until the decision.
    pairs: NDArray[np.int64]
    # Relative change of the rate and its interval; NaN where there are too few pairs.
    change: Floats
    low: Floats
    high: Floats
    # The slowdown, above 0, that is found in about 95 % of cases within 12 pairs.
    detectable: Floats


def decide(log_ratios: Floats, threshold: float = 0.015) -> Decisions:
    """Decide about the points of a job, or of several jobs.

    Args:
        log_ratios: logarithms of the ratios in the order of time, [..., points, pairs]; NaN for a
            pair in which the point was not measured. Pairs after its decision are ignored.
        threshold: smallest change that counts, 0.015 for 1.5 %. A point is the same if its interval
            lies within twice the threshold.
    """
    used = np.full_like(log_ratios, math.nan)
    decision = np.full(log_ratios.shape[:-1], Decision.GO_ON.value)
    # Number of pairs at the last look; 0 before the first look.
    looked = np.zeros_like(decision)
    # Number of pairs, and sum of the log ratios, when a look found the point slower; 0 if none did.
    suspected = np.zeros_like(decision)
    suspected_sum = np.zeros(decision.shape)
    for pair in range(log_ratios.shape[-1]):
        is_open = decision == Decision.GO_ON
        used[..., pair] = np.where(is_open, log_ratios[..., pair], math.nan)
        is_measured = ~np.isnan(used[..., pair])
        estimate = _estimate(used[..., : pair + 1])

        fresh_mean = (estimate.sum - suspected_sum) / CONFIRMING_PAIRS
        is_confirmed = np.expm1(fresh_mean) <= -threshold
        is_due = is_measured & (suspected > 0) & (estimate.pairs == suspected + CONFIRMING_PAIRS)
        decision[is_due & is_confirmed] = Decision.SLOWER
        decision[is_due & ~is_confirmed] = Decision.UNCONFIRMED

        is_look = is_measured & (suspected == 0) & np.isin(estimate.pairs, LOOKS)
        looked[is_look] = estimate.pairs[is_look]
        low, change, high = estimate.interval(looked)
        decision[is_look & (looked == LOOKS[-1])] = Decision.UNDECIDED
        decision[is_look & (low >= -2 * threshold) & (high <= 2 * threshold)] = Decision.SAME
        decision[is_look & (change >= threshold) & (low > 0)] = Decision.FASTER
        is_slower = is_look & (change <= -threshold) & (high < 0)
        decision[is_slower] = Decision.GO_ON
        suspected[is_slower] = looked[is_slower]
        suspected_sum[is_slower] = estimate.sum[is_slower]
    estimate = _estimate(used)
    low, change, high = estimate.interval(looked)
    return Decisions(
        decision=decision,
        pairs=estimate.pairs,
        change=change,
        low=low,
        high=high,
        detectable=estimate.detectable(threshold),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """Mean and moderated variance of the log ratios of each point, [..., points]."""

    pairs: NDArray[np.int64]
    sum: Floats
    # Variance of one pair, and its degrees of freedom; NaN and 0 if unknown.
    variance: Floats
    degrees: Floats

    def interval(self, looked: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """Return low, middle and high of the relative change.

        Args:
            looked: number of pairs at the last look of each point; sets the confidence level.
        """
        pairs = np.maximum(self.pairs, 1)
        mean = np.where(self.pairs > 0, self.sum / pairs, math.nan)
        half = self._quantile(looked) * np.sqrt(self.variance / pairs)
        return np.expm1(mean - half), np.expm1(mean), np.expm1(mean + half)

    def detectable(self, threshold: float) -> Floats:
        """Return the slowdown that the last look and the fresh pairs find in 95 % of cases."""
        last = np.full_like(self.pairs, LOOKS[-1])
        margin = stdtrit(self.degrees, _POWER)
        at_last_look = (self._quantile(last) + margin) * np.sqrt(self.variance / LOOKS[-1])
        in_fresh_pairs = -math.log1p(-threshold) + margin * np.sqrt(
            self.variance / CONFIRMING_PAIRS
        )
        share = -np.expm1(-np.maximum(at_last_look, in_fresh_pairs))
        return np.where(self.pairs > 1, share, math.nan)

    def _quantile(self, looked: NDArray[np.int64]) -> Floats:
        """Return the quantile of Student's t for the error that a point spends at this look."""
        points = max(self.pairs.shape[-1], 1)
        spent = np.zeros(LOOKS[-1] + 1)
        share_before = 0.0
        for look in LOOKS:
            share = math.log1p((math.e - 1) * look / LOOKS[-1])
            spent[look] = ERROR / points * (share - share_before)
            share_before = share
        return np.asarray(stdtrit(self.degrees, 1 - spent[looked] / 2))


def _estimate(log_ratios: Floats) -> _Estimate:
    """Estimate mean and variance of each point from its log ratios, [..., points, pairs]."""
    is_measured = ~np.isnan(log_ratios)
    pairs = is_measured.sum(axis=-1)
    values = np.where(is_measured, log_ratios, 0.0)
    total = values.sum(axis=-1)
    mean = total / np.maximum(pairs, 1)
    deviations = np.where(is_measured, values - mean[..., None], 0.0)
    squares = (deviations**2).sum(axis=-1)
    degrees = np.maximum(pairs - 1, 0)
    prior_variance, prior_degrees = _prior(squares, degrees)
    all_degrees = degrees + prior_degrees
    with np.errstate(invalid="ignore"):
        variance = (squares + prior_degrees * prior_variance) / all_degrees
    return _Estimate(pairs=pairs, sum=total, variance=variance, degrees=all_degrees)


def _prior(squares: Floats, degrees: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the prior variance of each point, from all other points, and its degrees of freedom.

    Section 6.2 of Smyth. Logarithms are averaged, so that a single noisy point does not dominate.
    """
    is_known = degrees > 0
    degrees = np.maximum(degrees, 1)
    logs = np.log(np.maximum(squares / degrees, _LEAST_SD**2))
    logs = np.where(is_known, logs - digamma(degrees / 2) + np.log(degrees / 2), 0.0)
    known = is_known.sum(axis=-1, keepdims=True)
    total = logs.sum(axis=-1, keepdims=True)
    prior_variance = np.exp((total - logs) / np.maximum(known - is_known, 1))
    # If the variances of the points differ by more than chance, the prior gets fewer degrees.
    mean = total / np.maximum(known, 1)
    spread = np.where(is_known, (logs - mean) ** 2, 0.0).sum(axis=-1, keepdims=True)
    by_chance = np.where(is_known, _TRIGAMMA[degrees], 0.0).sum(axis=-1, keepdims=True)
    excess = spread / np.maximum(known - 1, 1) - by_chance / np.maximum(known, 1)
    prior_degrees = np.interp(excess, polygamma(1, _PRIOR_DEGREES / 2), _PRIOR_DEGREES)
    has_others = known - is_known > 0
    return prior_variance, np.where(has_others, prior_degrees, 0.0)
