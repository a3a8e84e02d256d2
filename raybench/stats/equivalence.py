"""Whether two ways of timing the same step agree: an interval of their ratio, and a margin. Pure.

Each start of a way gives one step time. Step times scatter by factors, so logarithms are
compared: the ratio is that of geometric means over the starts, its 95 % interval is Welch's
t interval of the difference of the log means, turned back into a ratio (B. L. Welch, "The
generalization of Student's problem when several different population variances are involved",
Biometrika 34, 1947). With a handful of starts a bootstrap would be too sure of itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from raybench.stats.summary import Interval

MIN_STARTS = 2


class Agreement(StrEnum):
    """equal: the interval lies inside the margin. differs: outside. undecided: across its edge."""

    EQUAL = "equal"
    DIFFERS = "differs"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One way's step time over the other's, with its 95 % interval."""

    value: float
    interval: Interval


def ratio(new: Sequence[float], base: Sequence[float]) -> Ratio:
    """Estimate `new` over `base`: step times of MIN_STARTS starts or more each, above zero."""
    from scipy.stats import ttest_ind

    if min(len(new), len(base)) < MIN_STARTS:
        raise ValueError(f"{MIN_STARTS} starts needed, got {len(new)} and {len(base)}")
    logs = [[math.log(value) for value in values] for values in (new, base)]
    difference = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    low, high = difference, difference
    if any(statistics.pvariance(one) > 0 for one in logs):
        low, high = ttest_ind(*logs, equal_var=False).confidence_interval()
    return Ratio(
        value=math.exp(difference),
        interval=Interval(low=math.exp(low), high=math.exp(high)),
    )


def agreement(found: Ratio, margin: float) -> Agreement:
    """Against [1 - margin, 1 + margin]."""
    low, high = found.interval.low, found.interval.high
    if 1 - margin <= low and high <= 1 + margin:
        return Agreement.EQUAL
    if high < 1 - margin or low > 1 + margin:
        return Agreement.DIFFERS
    return Agreement.UNDECIDED
