"""How sure a ratio of two points' step times is. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd


def ratio_range(base: Mapping[str, Any], point: Mapping[str, Any]) -> tuple[float, float] | None:
    """Compute the 95 % interval of a speed-up, as shares of it, such as (0.99, 1.01); None if
    unknown.

    base, point: rows of `points`: the baseline point and the other. Of each, the distance of the
    median's logarithm from those of its bootstrap interval is taken; the two points are measured
    apart from each other, so the distances add up as squares: the method of variance estimates
    recovery, G. Y. Zou, A. Donner, Statistics in Medicine 27(10), 2008.
    It speaks of the samples of this run: another start of the same processes can be farther away.
    """
    names = ("step_ms_ci_low", "step_ms_p50", "step_ms_ci_high")
    if any(pd.isna(row[name]) or row[name] <= 0 for row in (base, point) for name in names):
        return None
    (base_down, base_up), (point_down, point_up) = (
        (math.log(middle / low), math.log(high / middle))
        for low, middle, high in ([row[name] for name in names] for row in (base, point))
    )
    # A longer step of the baseline point, or a shorter one of the other, is a higher speed-up.
    return math.exp(-math.hypot(base_down, point_up)), math.exp(math.hypot(base_up, point_down))
