"""Many tests at once: how many of the small p-values are small by chance. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def false_discovery_rates(p_values: Sequence[float], level: float) -> list[float]:
    """Compute the q-value of each p-value: calling all with q <= level real is wrong for `level` of
    them.

    In two stages, of which the first tells how many tests have nothing to find (Y. Benjamini,
    A. M. Krieger, D. Yekutieli, "Adaptive linear step-up procedures that control the false
    discovery rate", Biometrika 93(3), 2006).
    """
    if not p_values:
        return []
    rates = (1 + level) * step_up(np.array(p_values))
    unchanged = max(1, int((rates > level).sum()))
    return [min(1.0, float(rate)) for rate in rates * unchanged / len(p_values)]


def step_up(p_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the rates of Y. Benjamini, Y. Hochberg, J. R. Stat. Soc. B 57(1), 1995.

    As scipy.stats.false_discovery_control, but importing scipy.stats takes half a second.
    """
    order = np.argsort(p_values)
    scaled = p_values[order] * len(p_values) / np.arange(1, len(p_values) + 1)
    rates = np.empty_like(p_values)
    rates[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return rates
