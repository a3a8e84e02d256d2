"""Whether step times have settled, and whether they stay where they are. Pure.

Both look at medians of five neighbours, so that a single slow step decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raybench.stats.summary import autocorrelation_time, center_ranks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

BATCH = 5
# With fewer batches neither question has an answer.
MIN_WARMUP_BATCHES = 5
MIN_TREND_BATCHES = 6
FLAT, DRIFTING, STEPPED, WANDERING = "flat", "drifting", "stepped", "wandering"
_STILL = 0.001
# A step in the level has so many batches, and this share of them, on either side.
_EDGE_BATCHES, _EDGE_SHARE = 2, 0.05
_MAX_PHI = 0.9
# A drift is looked for several times; so many standard errors are chance in 1 of 36 looks.
_LIKELY = 2.2
# Beyond this it is hardly chance in any of the four windows.
_PLAIN = 3.0
# Of the warm-up the last half, quarter and eighth are looked at.
_PARTS = (2, 4, 8)
_MEMORY, _LIKELY_MEMORY, _MIN_FREQUENCIES = 0.25, 1.65, 4
# A level that stays within so much of itself, from quarter to quarter, stands still for anyone.
_WANDERS = 0.002


def is_steady(step_ns: Sequence[float]) -> bool:
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


def trend(samples: ArrayLike, matters: float) -> str:
    """Whether a series of step times is flat, drifting (a slope) or stepped (a shift of level).

    The better of a straight line and one step is fitted to the batch medians. It counts where it
    changes the step time by the share `matters` or more, and where what it explains is far beyond
    what the rest of the series does by chance; that rest's lag-1 autocorrelation is allowed for.
    Fewer than 30 samples are called flat: nothing else could be shown.
    """
    import numpy as np

    batches = _batch_medians(samples)
    middle = float(np.median(batches)) if len(batches) else 0.0
    if len(batches) < MIN_TREND_BATCHES or middle <= 0:
        return FLAT
    fits = [_line(batches), *_steps(batches)]
    best = min(fits, key=lambda fit: float(((batches - fit.values) ** 2).sum()))
    change = abs(float(best.values[-1] - best.values[0])) / middle
    return best.kind if change >= matters and _stands_out(batches, best) else FLAT


def worst_trend(repeats: Sequence[ArrayLike], matters: float) -> str:
    """Find the most doubtful trend of the repeats; matters: as for `trend`."""
    found = [_doubtful_trend(samples, matters) for samples in repeats]
    return next((kind for kind in (STEPPED, DRIFTING, WANDERING) if kind in found), FLAT)


def _doubtful_trend(samples: ArrayLike, matters: float) -> str:
    """Find the trend; of one below what matters, whether the level stays at all."""
    found = trend(samples, matters)
    if found != FLAT or not may_wander(samples):
        return found
    return DRIFTING if change(samples).is_likely else WANDERING


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a straight line through a series changes from end to end, relative to its median.

    error: the standard error of the change, the autocorrelation of the noise allowed for.
    """

    size: float
    error: float

    @property
    def is_likely(self) -> bool:
        """Whether the series may drift: by more than a thousandth and than noise often does."""
        return abs(self.size) > max(_STILL, _LIKELY * self.error)

    def is_plain(self, matters: float) -> bool:
        """Whether the series drifts by what matters, and by more than noise seldom does."""
        return abs(self.size) > max(matters, _PLAIN * self.error)


def change(samples: ArrayLike) -> Change:
    """Fit a line to the batch medians; none of too few batches."""
    batches = _batch_medians(samples)
    if len(batches) < MIN_TREND_BATCHES or (middle := float(_median(batches))) <= 0:
        return Change(size=0.0, error=0.0)
    line = _line(batches).values
    rest, count = batches - line, len(batches)
    noise = float(rest @ rest) / (count - 2) * autocorrelation_time([rest])
    return Change(
        size=float(line[-1] - line[0]) / middle, error=math.sqrt(12 * noise / count) / middle
    )


def may_drift(samples: Sequence[float], before: Sequence[float] = ()) -> bool:
    """Whether the samples, alone or with the end of what came before them, show a drift.

    before: the warm-up, of steps that were measured as the samples were. A slow drift is seen
    over its last half, an end of a fast one over its last eighth.
    """
    return any(change(window).is_likely for window in _windows(samples, before))


def drifts(samples: Sequence[float], before: Sequence[float] = (), *, matters: float) -> bool:
    """Whether a drift is plain and as large as matters, over the same windows as in `may_drift`."""
    return any(change(window).is_plain(matters) for window in _windows(samples, before))


def heading(samples: Sequence[float], before: Sequence[float] = ()) -> float:
    """How far the level may go on from the samples' median, relative to it: half the change seen.

    Of the change that stands out most over the windows of `may_drift`; 0 where none is larger than
    its standard error. A transient that dies out has less to go than it went in such a window.
    """
    changes = [change(window) for window in _windows(samples, before)]
    largest = max(changes, key=lambda seen: abs(seen.size) / seen.error if seen.error else 0.0)
    return largest.size / 2 if abs(largest.size) > largest.error else 0.0


def _windows(samples: Sequence[float], before: Sequence[float]) -> list[Sequence[float]]:
    parts = [before[-(len(before) // part) :] for part in _PARTS if len(before) >= part]
    return [samples, *([*part, *samples] for part in parts)]


def may_wander(samples: ArrayLike) -> bool:
    """Whether the level wanders at all time scales, as 1/f noise and a random walk do.

    By the memory d of the samples' ranks: the spectrum goes as frequency^(-2 d) towards 0, where
    noise that forgets has d = 0, 1/f noise 0.5, a random walk 1. Estimated from the lowest
    sqrt(n) frequencies: J. Geweke, S. Porter-Hudak, J. Time Series Anal. 4(4), 1983. What it could
    be by chance in 1 of 20 series is no memory.
    """
    import numpy as np

    series = np.asarray(samples, dtype=np.float64)
    if len(series) < _MIN_FREQUENCIES**2 or _spread_of_quarters(series) < _WANDERS:
        return False
    ranks = center_ranks(series)
    lowest = math.isqrt(len(ranks))
    power = np.abs(np.fft.rfft(ranks)[1 : lowest + 1]) ** 2
    if not power.all():
        return False
    places = np.log(2 * np.sin(np.pi * np.arange(1, lowest + 1) / len(ranks)))
    places -= places.mean()
    memory = -float(places @ np.log(power)) / float(places @ places) / 2
    error = math.pi / math.sqrt(24 * float(places @ places))
    return memory > max(_MEMORY, _LIKELY_MEMORY * error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """A course of the batch medians. parameters: how many numbers were fitted."""

    kind: str
    values: NDArray[np.float64]
    parameters: int


def _spread_of_quarters(series: NDArray[np.float64]) -> float:
    """Compute the largest less the smallest median of the quarters, relative to the whole's."""
    import numpy as np

    medians = [float(np.median(quarter)) for quarter in np.array_split(series, 4)]
    middle = float(np.median(series))
    return (max(medians) - min(medians)) / middle if middle > 0 else 0.0


def _median(values: NDArray[np.float64]) -> float:
    import numpy as np

    return float(np.median(values))


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
