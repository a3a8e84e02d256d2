"""Whether step times have settled, and whether they stay where they are. Pure.

Both look at medians of five neighbours, so that a single slow step decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

BATCH = 5
# With fewer batches neither question has an answer.
MIN_WARMUP_BATCHES = 5
MIN_TREND_BATCHES = 6
FLAT, DRIFTING, STEPPED = "flat", "drifting", "stepped"
_STILL = 0.001
# A change below 1 % of the median does not matter to anyone.
_MATTERS = 0.01
# A step in the level has so many batches, and this share of them, on either side.
_EDGE_BATCHES, _EDGE_SHARE = 2, 0.05
_MAX_PHI = 0.9


def is_steady(step_ns: Sequence[int]) -> bool:
    """Whether warm-up is over: the transient ended in the first half, or hardly moves any more.

    step_ns: durations of the warm-up's iterations so far, without the cold first one.
    A cut of MSER-5 in the second half means that the end of the transient has not been seen yet.
    That is no matter where the level changes by less than 0.1 % from the third quarter to the
    fourth: of a transient that dies out less than that is still to come.
    """
    import numpy as np

    batches = _batch_medians(step_ns)
    if len(batches) < MIN_WARMUP_BATCHES:
        return False
    _, _, third, fourth = (np.median(quarter) for quarter in np.array_split(step_ns, 4))
    is_still = bool(abs(fourth - third) <= _STILL * fourth)
    return is_still or 2 * mser_cut(batches) <= len(batches)


def mser_cut(values: ArrayLike) -> int:
    """How many of the first values to leave out so that the rest's mean is known best.

    The marginal standard error rule: the cut d that makes sum((x - mean)^2) / (n - d)^2 over the
    values after it smallest, and the first such cut. K. P. White, "An effective truncation
    heuristic for bias reduction in simulation output", Simulation 69(6), 1997; MSER-5 is the rule
    on batches of five, of which we take medians where White takes means. A quarter of the values
    is never cut: a few that happen to be alike would look like the best of all.
    """
    import numpy as np

    series = np.asarray(values, dtype=np.float64)
    kept = max(2, len(series) // 4)
    cuts = range(max(1, len(series) - kept + 1))
    return int(np.argmin([series[cut:].var() / (len(series) - cut) for cut in cuts]))


def trend(samples: ArrayLike) -> str:
    """Whether a series of step times is flat, drifting (a slope) or stepped (a shift of level).

    The better of a straight line and one step is fitted to the batch medians. It counts where it
    changes the step time by 1 % or more, and where what it explains is far beyond what the rest
    of the series does by chance; that rest's lag-1 autocorrelation is allowed for. Fewer than 30
    samples are called flat: nothing else could be shown.
    """
    import numpy as np

    batches = _batch_medians(samples)
    middle = float(np.median(batches)) if len(batches) else 0.0
    if len(batches) < MIN_TREND_BATCHES or middle <= 0:
        return FLAT
    fits = [_line(batches), *_steps(batches)]
    best = min(fits, key=lambda fit: float(((batches - fit.values) ** 2).sum()))
    change = abs(float(best.values[-1] - best.values[0])) / middle
    return best.kind if change >= _MATTERS and _stands_out(batches, best) else FLAT


def worst_trend(repeats: Sequence[ArrayLike]) -> str:
    """The most doubtful trend of the repeats."""
    found = [trend(samples) for samples in repeats]
    return next((kind for kind in (STEPPED, DRIFTING) if kind in found), FLAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """A course of the batch medians. parameters: how many numbers were fitted."""

    kind: str
    values: NDArray[np.float64]
    parameters: int


def _batch_medians(samples: ArrayLike) -> NDArray[np.float64]:
    """Medians of each five neighbours; the first few samples are left out where some remain."""
    import numpy as np

    series = np.asarray(samples, dtype=np.float64)
    whole = series[len(series) % BATCH :]
    medians: NDArray[np.float64] = np.median(whole.reshape(-1, BATCH), axis=1)
    return medians


def _line(batches: NDArray[np.float64]) -> _Fit:
    import numpy as np

    places = np.arange(len(batches)) - (len(batches) - 1) / 2
    slope = (places @ batches) / (places @ places)
    return _Fit(kind=DRIFTING, values=batches.mean() + slope * places, parameters=2)


def _steps(batches: NDArray[np.float64]) -> Iterator[_Fit]:
    import numpy as np

    edge = max(_EDGE_BATCHES, round(_EDGE_SHARE * len(batches)))
    for first in range(edge, len(batches) - edge + 1):
        before, after = batches[:first].mean(), batches[first:].mean()
        values = np.where(np.arange(len(batches)) < first, before, after)
        yield _Fit(kind=STEPPED, values=values, parameters=3)


def _stands_out(batches: NDArray[np.float64], fit: _Fit) -> bool:
    """Whether a fit explains more than autocorrelated noise would let it, 2 times in 100."""
    count, rest = len(batches), batches - fit.values
    explained = float(((fit.values - batches.mean()) ** 2).sum())
    left = float(rest @ rest)
    if left <= 1e-12 * explained:
        return True
    phi = float(rest[1:] @ rest[:-1]) / left
    phi = min(max(phi + (1 + 4 * phi) / count, 0.0), _MAX_PHI)
    noise = left / (count - fit.parameters) * (1 + phi) / (1 - phi)
    # From simulation: the 98 % point over AR(1) noise up to phi = 0.5, the best of all fits taken.
    return math.sqrt(explained / noise) > 4 + 12 / count
