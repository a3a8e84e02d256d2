"""Which subjects of a health test are slower than their peers. Pure.

A subject is a device, a link or a node; its peers are those of the same kind. Its time is compared
with the median of its peers in the same pass, never with one of them: device 0 may itself be the
slow one. docs/explanation/health.md has the rule and what simulation says of it;
`benchmarks/simulated_fleets.py` made the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Fewer peers have no spread that could be estimated.
LEAST_ALIKE = 4
# A subject is slow that takes longer by more than both of these.
SLOW_SHARE = 0.05
SLOW_SIGMAS = 3.5
# A subject is bad that takes more than so many times as long as its peers.
BAD_RATIO = 1.5
# The share of healthy fleets in which a subject is called slow by chance.
FALSE_ALARMS = 0.005
# Among few peers, a subject is slow that takes longer than the fastest by more than both of these:
# a share, and so many floors of the test.
_FEW_SHARE, _FEW_FLOORS = 0.1, 7
# The smallest faster group with which the rest is compared: a share, and a number of subjects.
_LEAST_SHARE, _LEAST_OF_A_GROUP = 0.1, 2
# Standard deviation of normal values over their median absolute deviation, and the statistical
# efficiency of the latter (P. J. Rousseeuw, C. Croux, J. Am. Stat. Assoc.
# 88(424), 1993).
_MAD_FACTOR, _MAD_EFFICIENCY = 1.4826, 0.37
# The documented floor of a test weighs as much as a spread with so many degrees of freedom: with
# eight subjects the estimate alone is off by half.
_FLOOR_DEGREES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The subjects of one test compared with their peers; arrays have an entry for each subject.

    ratios: its time over that of its peers, median over passes; above 1 is slower, NaN where no
    pass has a value. sigma: the spread of the subjects' values, as a share of the median.
    limit: how much worse than the median is too much, as a share of it. is_beyond: whether it is
    worse by more, in the median of the passes and in each of them. p_values: one-sided, NaN as
    above.
    is_reference: the subjects with which the others are compared: all, or the faster group of a
    fleet that falls into two.
    """

    ratios: Floats
    sigma: float
    limit: float
    is_beyond: Bools
    p_values: Floats
    is_reference: Bools

    @property
    def is_divided(self) -> bool:
        """Whether the subjects fall into two groups, so that their median says little."""
        return not bool(self.is_reference.all())


def compare_peers(values: Floats, *, is_time: bool, floor: float) -> Peers:
    """Compare each subject with the median of its peers, pass by pass.

    values: [passes, subjects], NaN where a pass has none. is_time: whether less is better.
    floor: the noise of a healthy device, as a share; a smaller spread counts as this.

    Where at least a tenth of the subjects, and two, are faster than all the rest by more than the
    limit, the rest is compared with them, however few they are: many things make a device slower
    than it can be, and nothing makes it faster.
    """
    shares = values / _median(values, axis=1)[:, None]
    ratios = _as_times(_median(shares, axis=0), is_time)
    is_reference = _fast_group(ratios, floor)
    if not is_reference.all():
        shares = values / _median(values[:, is_reference], axis=1)[:, None]
    middle = _median(shares, axis=0)
    sigma = _spread(middle[is_reference], floor)
    limit = max(SLOW_SHARE, SLOW_SIGMAS * sigma)
    excess = (shares - 1) if is_time else (1 - shares)
    least = np.where(np.isnan(excess), np.inf, excess).min(axis=0)
    typical = _median(excess, axis=0)
    return Peers(
        ratios=_as_times(middle, is_time),
        sigma=sigma,
        limit=limit,
        is_beyond=(typical > limit) & (least > limit),
        p_values=_upper_tail(typical / sigma),
        is_reference=is_reference,
    )


def find_slow(tests: Sequence[Peers]) -> list[Bools]:
    """Return for each test which subjects are slow: beyond its limit, and not by chance.

    The false discovery rate is controlled over all tests and subjects together (Benjamini and
    Hochberg 1995): where none is slow, one is called so in at most FALSE_ALARMS of the fleets.
    """
    from scipy.stats import false_discovery_control

    if not tests:
        return []
    p_values = np.concatenate([one.p_values for one in tests])
    is_known = ~np.isnan(p_values)
    rates = np.ones_like(p_values)
    if is_known.any():
        rates[is_known] = false_discovery_control(p_values[is_known])
    ends = np.cumsum([len(one.p_values) for one in tests])[:-1]
    return [
        one.is_beyond & (own <= FALSE_ALARMS)
        for one, own in zip(tests, np.split(rates, ends), strict=True)
    ]


def compare_few(
    values: Floats, *, is_time: bool, floor: float, bad_ratio: float = BAD_RATIO
) -> tuple[Floats, Bools]:
    """Return each subject's time over that of the fastest, and which subjects are slow.

    For fewer than `LEAST_ALIKE` subjects: the median of two is the value of neither, and there is
    no spread but the floor. A subject is slow if it takes longer than the fastest by more
    than a limit: in the median of the passes by the limit, and in each pass by the limit less one
    floor. The limit is 10 % or seven floors, whichever is more, and `bad_ratio` at most; it is
    `bad_ratio` itself if that is above BAD_RATIO.
    values, is_time, floor: as for `compare_peers`.
    """
    times = _as_times(values, is_time)
    typical = _median(times, axis=0)
    if not np.isfinite(typical).any():
        return typical, np.zeros(len(typical), dtype=np.bool_)
    fastest = int(np.nanargmin(typical))
    ratios = np.asarray(typical / typical[fastest])
    each = times / times[:, [fastest]]
    least = np.where(np.isnan(each), np.inf, each).min(axis=0)
    limit = min(bad_ratio, 1 + max(_FEW_SHARE, _FEW_FLOORS * floor))
    if bad_ratio > BAD_RATIO:
        limit = bad_ratio
    return ratios, (ratios > limit) & (least > limit * (1 - floor))


def _as_times(values: Floats, is_time: bool) -> Floats:
    """Return times for values that are times or rates; a rate of 0 gives infinity."""
    with np.errstate(divide="ignore"):
        return values if is_time else np.asarray(1.0 / values)


def _median(values: Floats, axis: int) -> Floats:
    """Return the median without NaN; NaN where there is no value, without a warning of numpy."""
    is_unknown = np.isnan(values)
    if not is_unknown.any():
        return np.asarray(np.median(values, axis=axis))
    nowhere = is_unknown.all(axis=axis)
    filled = np.where(np.expand_dims(nowhere, axis), 0.0, values)
    return np.where(nowhere, np.nan, np.nanmedian(filled, axis=axis))


def _spread(values: Floats, floor: float) -> float:
    """Return the standard deviation as a share of the median; `floor` at least.

    By the median absolute deviation, shrunk towards the floor where there are few values.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return floor
    middle = np.median(known)
    deviation = _MAD_FACTOR * float(np.median(np.abs(known - middle)) / middle)
    degrees = _MAD_EFFICIENCY * (len(known) - 1)
    total = _FLOOR_DEGREES * floor**2 + degrees * deviation**2
    return max(floor, float(np.sqrt(total / (_FLOOR_DEGREES + degrees))))


def _fast_group(ratios: Floats, floor: float) -> Bools:
    """Return the faster group of a fleet that falls into two; all where it does not.

    They are divided at the first gap, from the fast end, that is wider than the limit of the group
    before it.
    """
    order = np.argsort(ratios)  # NaN last
    known = ratios[order][: int(np.isfinite(ratios).sum())]
    least = max(_LEAST_OF_A_GROUP, int(np.ceil(_LEAST_SHARE * len(known))))
    gaps = known[1:] / known[:-1] - 1
    for last in np.flatnonzero(gaps > SLOW_SHARE):
        size = int(last) + 1
        limit = max(SLOW_SHARE, SLOW_SIGMAS * _spread(known[:size], floor))
        if least <= size <= len(known) - least and gaps[last] > limit:
            return np.asarray(ratios <= known[last])
    return np.ones(len(ratios), dtype=np.bool_)


def _upper_tail(deviations: Floats) -> Floats:
    """Return the one-sided p-values of deviations, given in standard deviations."""
    from scipy.special import ndtr

    return np.asarray(ndtr(-deviations))
