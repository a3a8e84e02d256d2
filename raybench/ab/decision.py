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
    used_ratios = np.full_like(log_ratios, math.nan)
    decision = np.full(log_ratios.shape[:-1], Decision.GO_ON.value)
    # Number of pairs at the last look; 0 before the first look.
    pairs_at_look = np.zeros_like(decision)
    # Number of pairs, and sum of the log ratios, when a look found the point slower; else 0.
    pairs_when_slower = np.zeros_like(decision)
    sum_when_slower = np.zeros(decision.shape)
    for pair in range(log_ratios.shape[-1]):
        is_open = decision == Decision.GO_ON
        used_ratios[..., pair] = np.where(is_open, log_ratios[..., pair], math.nan)
        is_measured = ~np.isnan(used_ratios[..., pair])
        estimate = _estimate(used_ratios[..., : pair + 1])

        # Points that a look has found slower, and that now have all fresh pairs.
        was_slower = pairs_when_slower > 0
        has_fresh_pairs = estimate.pairs == pairs_when_slower + CONFIRMING_PAIRS
        is_due = is_measured & was_slower & has_fresh_pairs
        fresh_mean = (estimate.sum - sum_when_slower) / CONFIRMING_PAIRS
        is_confirmed = np.expm1(fresh_mean) <= -threshold
        decision[is_due & is_confirmed] = Decision.SLOWER
        decision[is_due & ~is_confirmed] = Decision.UNCONFIRMED

        # All other points. Later assignments replace earlier decisions.
        is_look = is_measured & ~was_slower & np.isin(estimate.pairs, LOOKS)
        pairs_at_look[is_look] = estimate.pairs[is_look]
        low, change, high = estimate.interval(pairs_at_look)
        decision[is_look & (pairs_at_look == LOOKS[-1])] = Decision.UNDECIDED
        decision[is_look & (low >= -2 * threshold) & (high <= 2 * threshold)] = Decision.SAME
        decision[is_look & (change >= threshold) & (low > 0)] = Decision.FASTER
        is_slower = is_look & (change <= -threshold) & (high < 0)
        # A slower point needs fresh pairs, also after the last look.
        decision[is_slower] = Decision.GO_ON
        pairs_when_slower[is_slower] = pairs_at_look[is_slower]
        sum_when_slower[is_slower] = estimate.sum[is_slower]
    estimate = _estimate(used_ratios)
    low, change, high = estimate.interval(pairs_at_look)
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

    def interval(self, pairs_at_look: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """Return low, middle and high of the relative change.

        Args:
            pairs_at_look: number of pairs at the last look of each point; sets the confidence
                level.
        """
        pairs = np.maximum(self.pairs, 1)
        mean = np.where(self.pairs > 0, self.sum / pairs, math.nan)
        half_width = self._quantile(pairs_at_look) * np.sqrt(self.variance / pairs)
        # From log ratios to relative changes.
        return np.expm1(mean - half_width), np.expm1(mean), np.expm1(mean + half_width)

    def detectable(self, threshold: float) -> Floats:
        """Return the slowdown that the last look and the fresh pairs find in 95 % of cases."""
        power_quantile = stdtrit(self.degrees, _POWER)
        # Standard errors of the mean log ratio.
        error_at_last_look = np.sqrt(self.variance / LOOKS[-1])
        error_in_fresh_pairs = np.sqrt(self.variance / CONFIRMING_PAIRS)
        # Slowdowns in logarithms: the interval at the last look must exclude 0, and the mean of the
        # fresh pairs must reach the threshold.
        last_look_quantile = self._quantile(np.full_like(self.pairs, LOOKS[-1]))
        at_last_look = (last_look_quantile + power_quantile) * error_at_last_look
        in_fresh_pairs = -math.log1p(-threshold) + power_quantile * error_in_fresh_pairs
        slowdown = -np.expm1(-np.maximum(at_last_look, in_fresh_pairs))
        return np.where(self.pairs > 1, slowdown, math.nan)

    def _quantile(self, pairs_at_look: NDArray[np.int64]) -> Floats:
        """Return the quantile of Student's t for the error that a point spends at this look."""
        points = max(self.pairs.shape[-1], 1)
        # Number of pairs at a look -> error that the look spends.
        spent_error = np.zeros(LOOKS[-1] + 1)
        spent_share_before = 0.0
        for look in LOOKS:
            # The spending function of the type of Pocock: the share of the error spent so far.
            spent_share = math.log1p((math.e - 1) * look / LOOKS[-1])
            spent_error[look] = ERROR / points * (spent_share - spent_share_before)
            spent_share_before = spent_share
        # Half of the error for each end of the interval.
        return np.asarray(stdtrit(self.degrees, 1 - spent_error[pairs_at_look] / 2))


def _estimate(log_ratios: Floats) -> _Estimate:
    """Estimate mean and variance of each point from its log ratios, [..., points, pairs]."""
    is_measured = ~np.isnan(log_ratios)
    pairs = is_measured.sum(axis=-1)
    measured_ratios = np.where(is_measured, log_ratios, 0.0)
    total = measured_ratios.sum(axis=-1)
    mean = total / np.maximum(pairs, 1)
    deviations = np.where(is_measured, measured_ratios - mean[..., None], 0.0)
    square_sum = (deviations**2).sum(axis=-1)
    degrees = np.maximum(pairs - 1, 0)
    prior_variance, prior_degrees = _prior(square_sum, degrees)
    all_degrees = degrees + prior_degrees
    # 0 / 0 gives NaN, an unknown variance.
    with np.errstate(invalid="ignore"):
        variance = (square_sum + prior_degrees * prior_variance) / all_degrees
    return _Estimate(pairs=pairs, sum=total, variance=variance, degrees=all_degrees)


def _prior(
    square_sum: Floats,  # sum of the squared deviations of each point
    degrees: NDArray[np.int64],  # degrees of freedom of each point; 0: its variance is unknown
) -> tuple[Floats, Floats]:
    """Return the prior variance of each point, from all other points, and its degrees of freedom.

    Section 6.2 of Smyth. Logarithms are averaged, so that a single noisy point does not dominate.
    """
    is_known = degrees > 0
    known_points = is_known.sum(axis=-1, keepdims=True)
    degrees = np.maximum(degrees, 1)
    log_variance = np.log(np.maximum(square_sum / degrees, _LEAST_SD**2))
    # The mean logarithm of a sample variance is too small; the digamma terms correct the bias.
    log_variance = log_variance - digamma(degrees / 2) + np.log(degrees / 2)
    log_variance = np.where(is_known, log_variance, 0.0)
    total = log_variance.sum(axis=-1, keepdims=True)
    other_points = known_points - is_known
    prior_variance = np.exp((total - log_variance) / np.maximum(other_points, 1))
    # If the variances of the points differ by more than chance, the prior gets fewer degrees.
    mean = total / np.maximum(known_points, 1)
    squares = np.where(is_known, (log_variance - mean) ** 2, 0.0)
    spread = squares.sum(axis=-1, keepdims=True) / np.maximum(known_points - 1, 1)
    chance = np.where(is_known, _TRIGAMMA[degrees], 0.0)
    mean_chance = chance.sum(axis=-1, keepdims=True) / np.maximum(known_points, 1)
    prior_degrees = np.interp(
        spread - mean_chance, polygamma(1, _PRIOR_DEGREES / 2), _PRIOR_DEGREES
    )
    return prior_variance, np.where(other_points > 0, prior_degrees, 0.0)
