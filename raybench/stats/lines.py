"""A straight line through measured times, with what it is known to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Points with fewer leave nothing to judge the line by.
_LEAST_FOR_ERRORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """intercept + slope * x, each with its standard error; 0 where it cannot be told."""

    intercept: float
    slope: float
    intercept_error: float
    slope_error: float


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Fit a line by least squares of relative differences; it does not begin below 0.

    points: (x, y), both above 0. Raises ValueError without any.
    """
    import numpy as np

    if not points:
        raise ValueError("a line needs a point")
    x, y = np.asarray(points, dtype=np.float64).T
    for columns in (np.stack([np.ones_like(x), x]), x[None]):
        weighed = (columns / y).T
        if len(x) < weighed.shape[1]:
            continue
        found, *_ = np.linalg.lstsq(weighed, np.ones_like(y), rcond=None)
        if found[0] >= 0 and found[-1] > 0:
            break
    errors = _errors(weighed, found)
    is_full = len(found) == 2
    return Line(
        intercept=float(found[0]) if is_full else 0.0,
        slope=float(found[-1]),
        intercept_error=errors[0] if is_full else 0.0,
        slope_error=errors[-1],
    )


def _errors(weighed: NDArray[np.float64], found: NDArray[np.float64]) -> list[float]:
    import numpy as np

    count, unknowns = weighed.shape
    if count < _LEAST_FOR_ERRORS:
        return [0.0] * unknowns
    left = 1 - weighed @ found
    variance = float(left @ left) / (count - unknowns)
    covariance = variance * np.linalg.inv(weighed.T @ weighed)
    return [float(each) for each in np.sqrt(np.diag(covariance))]
