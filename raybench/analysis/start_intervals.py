"""95 % intervals of step times and speed-ups that hold over starts of the processes. Pure.

Of several rounds the mean of their logarithms is known to ± t s / sqrt(R), where the standard
deviation s of a start is pooled over the points of a kind (`raybench.analysis.start_noise.kind_of`)
and t is Student's with their degrees of freedom together; but never better than the samples allow.
Of one round nobody knows how far starts lie apart: what other runs show, or else what is
documented, is added to what the samples leave open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from raybench.analysis import start_noise
from raybench.analysis.ratios import ratio_range
from raybench.analysis.rounds import Trials
from raybench.analysis.start_noise import StartNoise, kind_of

Row = Mapping[str, Any]
Range = tuple[float, float]
_ENDS = ("step_ms_ci_low", "step_ms_p50", "step_ms_ci_high")


class StartIntervals:
    """The intervals of the points of some runs.

    elsewhere: kind of points -> the noise of starts that other runs show.
    """

    def __init__(self, trials: Trials, elsewhere: Mapping[str, StartNoise]) -> None:
        self._trials = trials
        self._elsewhere = elsewhere
        self._of_times: Mapping[str, StartNoise] = {}
        self._of_ratios: Mapping[str, StartNoise] = {}

    def learn_times(self, rows: Iterable[Row]) -> None:
        """Take in how the step times of these points scatter over their rounds."""
        self._of_times = _pool(
            (kind_of([row]), [math.log(one["step_ms_p50"]) for one in self._times(row)])
            for row in rows
        )

    def learn_ratios(self, pairs: Iterable[tuple[Row, Row]]) -> None:
        """Take in how the speed-ups of these points, (baseline point, point), scatter."""
        self._of_ratios = _pool(
            (kind_of(pair), [*self._trials.log_ratios(*pair).values()]) for pair in pairs
        )

    def time_noise(self, row: Row) -> StartNoise:
        """How far starts of a point lie apart, as far as that is known."""
        kind = kind_of([row])
        return self._of_times.get(kind) or self._has_value(kind)

    def ratio_noise(self, base: Row, row: Row) -> StartNoise:
        """How far starts of the ratio of two points lie apart."""
        found = self._of_ratios.get(kind_of([base, row]))
        return found or start_noise.of_ratio(
            *(self._has_value(kind_of([one])) for one in (base, row))
        )

    def step_time(self, row: Row) -> Range | None:
        """Compute the interval of a step time in milliseconds; None where it has none."""
        ranges = [_time_range(one) for one in self._times(row)]
        around = _around(ranges, self.time_noise(row))
        step_ms = row["step_ms_p50"]
        return None if around is None else (step_ms * around[0], step_ms * around[1])

    def speed_up(self, base: Row, row: Row) -> Range | None:
        """Compute the interval of a speed-up, as shares of it; None where samples tell of none."""
        of_base, of_row = self._trials.rounds(base), self._trials.rounds(row)
        both = self._trials.log_ratios(base, row)
        ranges = [ratio_range(of_base[number], of_row[number]) for number in both]
        return _around(ranges, self.ratio_noise(base, row))

    def _times(self, row: Row) -> list[Row]:
        rounds = self._trials.rounds(row).values()
        return [one for one in rounds if not pd.isna(one["step_ms_p50"])]

    def _has_value(self, kind: str) -> StartNoise:
        return self._elsewhere.get(kind) or start_noise.prior_of(kind)


def _pool(groups: Iterable[tuple[str, Sequence[float]]]) -> dict[str, StartNoise]:
    by_kind: dict[str, list[Sequence[float]]] = {}
    for kind, values in groups:
        by_kind.setdefault(kind, []).append(values)
    found = {kind: start_noise.pool(values) for kind, values in by_kind.items()}
    return {kind: noise for kind, noise in found.items() if noise is not None}


def _time_range(row: Row) -> Range | None:
    """Take the interval of the samples, as shares of the step time."""
    low, middle, high = (row[name] for name in _ENDS)
    # Written as a test that NaN fails.
    return (low / middle, high / middle) if low > 0 and high > 0 else None


def _around(ranges: Sequence[Range | None], noise: StartNoise) -> Range | None:
    """Compute the interval of the mean over rounds, as shares of it.

    ranges: what the samples of each leave open, as shares; None where one does not tell.
    """
    known = [one for one in ranges if one is not None]
    if not known or len(known) < len(ranges):
        return None
    down, up = (math.hypot(*map(math.log, ends)) / len(known) for ends in zip(*known, strict=True))
    return math.exp(-noise.reach(down, len(known))), math.exp(noise.reach(up, len(known)))
