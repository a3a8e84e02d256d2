"""What changed between two runs, point by point, and whether that is more than chance. Pure.

`compare` pairs points by `point_id`. The change of a point is the ratio of its step times; where
several runs of a side are known (`raybench.analysis.repeats`), or a run has several rounds, of
their geometric means: both are starts of the same. A step
time is the median over iterations of the slowest rank. How sure the change is follows from what two
starts of the same thing differ by (`raybench.analysis.start_noise`), from what other devices of the
same model differ by where the sides ran on others, and from the samples.

p_value is the chance to see such a change where there is none. Among many points some p-values are
small by chance; q_value puts that right (`raybench.analysis.compare`): of the points
called faster or slower, no more than FALSE_DISCOVERIES are so by chance on average. Where nothing
changed at all, that is also the chance of one false verdict among all points.

The difference of the means of two sides is under two random effects, nodes and starts, beside what
the samples of each run leave open. A node that both sides used in equal shares cancels out. The
noise of nodes and starts is known by few degrees of freedom, so it is taken as Student's t, to
which the normal error of the samples is added: as one normal variance with more degrees of freedom,
its tails were lost, and one comparison in six of unchanged runs with heavy-tailed starts had a
false verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raybench.analysis.history import THRESHOLD
from raybench.analysis.measured_runs import (
    BATCH,
    SETTINGS,
    Measured,
    Others,
    Row,
    other_world,
    starts_beside,
    step_times,
    summarize_side,
)
from raybench.analysis.repeats import Sides, Start, sides
from raybench.analysis.resampling import Series, log_median_errors
from raybench.analysis.rounds import mean_of_rounds, records
from raybench.analysis.start_noise import (
    REPEATS,
    RUNS,
    StartNoise,
    node_noise,
    prior_noise,
    raise_priors,
    update_noise,
    widen,
)
from raybench.stats.summary import MIN_SAMPLES

FALSE_DISCOVERIES = 0.02
FASTER, SLOWER, SAME, UNCLEAR = "faster", "slower", "same", "unclear"

_BASE_SEED, _NEW_SEED = 1, 2
_COLUMNS = {
    **dict.fromkeys(("base_ms", "new_ms", "base_runs", "new_runs"), "float64"),
    **dict.fromkeys(("ratio", "ratio_low", "ratio_high", "least_seen"), "float64"),
    **dict.fromkeys(("noise_floor", "p_value", "q_value"), "float64"),
    **dict.fromkeys(("noise_from", "verdict", "why"), "object"),
}


@dataclass(slots=True, kw_only=True)
class _Change:
    """A point that is tested.

    row: what is said of it. errors: of the logarithm of the ratio of the two named runs, as
    resampled. starts: as documented, or wider by repeats, until all points are tested together.
    """

    row: Row
    sides: Sides
    errors: Series
    starts: StartNoise

    @property
    def within(self) -> float:
        """Variance of the logarithm of one run's median, as resampled."""
        return float(self.errors.var()) / 2

    @property
    def groups(self) -> list[dict[str, list[float]]]:
        """Step times by node, in groups that differ by starts and nodes only."""
        return [_by_node(runs) for runs in (self.sides.base, self.sides.new, *self.sides.others)]

    @property
    def runs(self) -> list[list[float]]:
        """Groups of step times that differ by starts only."""
        return [times for group in self.groups for times in group.values()]

    @property
    def has_runs(self) -> bool:
        return any(sum(map(len, group.values())) > 1 for group in self.groups)

    @property
    def tested(self) -> MeanChange:
        """The change, by the noise as it is known so far."""
        nodes = node_noise(self.groups, self.starts, self.within)
        return mean_change(self.sides, self.starts, nodes, self.within)


def compare(
    base: Measured, new: Measured, *, is_one_world: bool = False, threshold: float = THRESHOLD
) -> pd.DataFrame:
    """One row for each point of either run, in the order of `new`, then of `base`.

    is_one_world: whether the tables tell no difference between the two either.

    Columns: point_id; the settings; status_base and status_new (null where a run has no row);
    base_ms and new_ms, the step times, and of how many runs they are the means, base_runs and
    new_runs; ratio = new / base; ratio_low and ratio_high, its 90 % interval, starts included;
    least_seen, the least relative change of this point alone that would have been called;
    noise_floor, the relative change that 19 of 20 pairs of runs of the same thing stay below, and
    noise_from, where that was got; p_value and q_value; verdict and why.

    verdict: `slower` (or `faster`) where the change is more than `threshold`, and q_value is at
    most FALSE_DISCOVERIES. `same` where the interval lies within the threshold, and the history
    shows no step between the two runs. `unclear` where neither holds; `why` says what is missing.
    Null where a run has no step time of the point.
    """
    rows = list(_pairs(mean_of_rounds(base.points), mean_of_rounds(new.points)))
    steps = [step_times(measured) for measured in (base, new)]
    others = [starts_beside(measured) for measured in (base, new)]
    measured = [
        _measure_change(
            row,
            [of_run.get(row["point_id"], []) for of_run in steps],
            [
                (one, of_run.get(row["point_id"]))
                for one, of_run in zip((base, new), others, strict=True)
            ],
            is_one_world=is_one_world,
            threshold=threshold,
        )
        for row in rows
    ]
    tested = [change for change in measured if change is not None]
    _test(tested, threshold)
    names = ["point_id", *SETTINGS, *BATCH, "status_base", "status_new", *_COLUMNS]
    return pd.DataFrame(rows, columns=names).astype(_COLUMNS)


def _pairs(base: pd.DataFrame, new: pd.DataFrame) -> Iterator[Row]:
    """Make a row for each point, with the rows of both runs in it; an absent one is empty."""
    of_base, of_new = ({row["point_id"]: row for row in records(points)} for points in (base, new))
    for point_id in [*of_new, *(one for one in of_base if one not in of_new)]:
        pair = [of_run.get(point_id, {}) for of_run in (of_base, of_new)]
        row = pair[1] or pair[0]
        yield {
            "point_id": point_id,
            **{name: row[name] for name in (*SETTINGS, *BATCH)},
            "status_base": pair[0].get("status"),
            "status_new": pair[1].get("status"),
            **{name: math.nan if kind == "float64" else None for name, kind in _COLUMNS.items()},
            "pair": pair,
        }


def _measure_change(
    row: Row,
    steps: Sequence[list[list[Series]]],
    known: Sequence[tuple[Measured, Others | None]],
    *,
    is_one_world: bool,
    threshold: float,
) -> _Change | None:
    """Fill in what is known before all points are looked at together; None: nothing to test."""
    if not all(steps):
        return None
    times_ms = [[float(np.median(np.concatenate(one))) for one in rounds] for rounds in steps]
    means_ms = [float(np.exp(np.mean(np.log(rounds)))) for rounds in times_ms]
    row |= {"base_ms": means_ms[0], "new_ms": means_ms[1], "ratio": means_ms[1] / means_ms[0]}
    row |= {"base_runs": 1, "new_runs": 1, "verdict": UNCLEAR}
    if other := other_world(row["pair"]):
        row["why"] = other
        return None
    last = [rounds[-1] for rounds in steps]
    if min(sum(map(len, repeats)) for repeats in last) < MIN_SAMPLES:
        row["why"] = f"fewer than {MIN_SAMPLES} samples"
        return None
    of_base = log_median_errors(last[0], _BASE_SEED, last[1])
    errors = log_median_errors(last[1], _NEW_SEED, last[0]) - of_base
    base, new = (
        summarize_side(own, measured, rounds_ms, others)
        for own, (measured, others), rounds_ms in zip(row["pair"], known, times_ms, strict=True)
    )
    return _Change(
        row=row,
        sides=sides(base, new, is_one_world=is_one_world, threshold=threshold),
        errors=errors,
        starts=_noise(row["pair"], steps),
    )


def _noise(pair: Sequence[Row], steps: Sequence[list[list[Series]]]) -> StartNoise:
    """Without other runs: as documented, or wider by repeats.

    Repeats share their processes: that they agree tells nothing of other starts.
    """
    prior = prior_noise(pair)
    rounds = [of_round for of_run in steps for of_round in of_run]
    repeats = [[float(np.median(samples)) for samples in of_round] for of_round in rounds]
    return max(prior, update_noise(prior, repeats, 0.0, REPEATS), key=lambda noise: noise.floor)


def _by_node(runs: Sequence[Start]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for start in runs:
        found.setdefault(start.node, []).append(start.time_ms)
    return found


def _test(changes: Sequence[_Change], threshold: float) -> None:
    """Fill in what is known from all points together."""
    _learn_noise(changes)
    tested = [change.tested for change in changes]
    rates = false_discovery_rates([one.p_value for one in tested], FALSE_DISCOVERIES)
    alone = FALSE_DISCOVERIES / max(1, len(changes))
    for change, one, q_value in zip(changes, tested, rates, strict=True):
        change.row |= _means(change.sides)
        change.row |= dict(zip(("ratio_low", "ratio_high"), one.interval, strict=True))
        change.row |= {"p_value": one.p_value, "q_value": q_value}
        change.row |= {"least_seen": max(threshold, one.least_seen(alone))}
        change.row |= {"noise_floor": change.starts.floor, "noise_from": change.starts.source}
        verdict, why = _verdict(change, threshold, len(changes))
        change.row |= {"verdict": verdict, "why": why}


def _means(sides: Sides) -> Row:
    base, new = (
        float(np.exp(np.mean(np.log([start.time_ms for start in side]))))
        for side in (sides.base, sides.new)
    )
    runs = (len({start.run_id for start in side}) for side in (sides.base, sides.new))
    counts = dict(zip(("base_runs", "new_runs"), runs, strict=True))
    return {"base_ms": base, "new_ms": new, "ratio": new / base, **counts}


def _learn_noise(changes: Sequence[_Change]) -> None:
    """Draw what is documented towards what the runs, or else the points, show."""
    again = [change for change in changes if change.has_runs]
    priors = raise_priors(
        [prior_noise(change.row["pair"]) for change in again],
        [change.runs for change in again],
        [change.within for change in again],
    )
    for change, prior in zip(again, priors, strict=True):
        known = update_noise(prior, change.runs, change.within, RUNS)
        change.starts = replace(known, source=RUNS)
    once = [change for change in changes if not change.has_runs]
    wide = widen(
        [change.starts for change in once],
        [math.log(change.row["ratio"]) for change in once],
        [float(change.errors.std()) for change in once],
    )
    for change, noise in zip(once, wide, strict=True):
        change.starts = noise


def _verdict(tested: _Change, threshold: float, count: int) -> tuple[str, str | None]:
    """Give the verdict, and what an unclear one lacks."""
    row = tested.row
    change, low, high = (row[name] - 1 for name in ("ratio", "ratio_low", "ratio_high"))
    if abs(change) > threshold and row["q_value"] <= FALSE_DISCOVERIES:
        return (SLOWER if change > 0 else FASTER), None
    if -threshold <= low and high <= threshold and not tested.sides.is_step:
        return SAME, None
    if abs(change) > threshold and row["p_value"] <= FALSE_DISCOVERIES:
        return UNCLEAR, f"one of {count} points may change as much by chance"
    if abs(change) > threshold:
        return UNCLEAR, f"{_what_differs(tested.sides)} may differ as much"
    if tested.sides.is_step:
        return UNCLEAR, "`raybench history` shows a step between the two"
    return UNCLEAR, f"known to {low:+.1%} to {high:+.1%} only, which is not within the threshold"


def _what_differs(sides: Sides) -> str:
    base, new = ({start.node for start in side} for side in (sides.base, sides.new))
    return "starts of the same thing" if base == new else "devices of this model"


def false_discovery_rates(p_values: Sequence[float], level: float) -> list[float]:
    """Compute the q-value of each p-value.

    Calling all with q <= level real is wrong for `level` of them.

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


# The error of the samples, at places of equal distance, and the weight of each.
_Z = np.linspace(-6, 6, 201)
_WEIGHTS = np.exp(-(_Z**2) / 2) / np.exp(-(_Z**2) / 2).sum()
_HALVINGS = 40


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps its interval
class MeanChange:
    """The change of the means of two sides.

    size: the logarithm of the ratio of the geometric means. looks: among how many splits of the
    runs this one was found. noise_sd, degrees: of nodes and starts. sample_sd: of the samples.
    """

    size: float
    noise_sd: float
    degrees: float
    sample_sd: float
    looks: int = 1

    @property
    def p_value(self) -> float:
        """The chance to see such a change, either way, where there is none."""
        return min(1.0, self.looks * self._chance(abs(self.size)))

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 90 % interval of the ratio: the true one is below it in 5 %, and above in 5 %."""
        half = self._quantile(0.1)
        return math.exp(self.size - half), math.exp(self.size + half)

    def least_seen(self, level: float) -> float:
        """Find the relative change whose p_value is `level`: a smaller one cannot be called."""
        return math.expm1(self._quantile(level / self.looks))

    def _chance(self, size: float) -> float:
        """Compute the chance that error and noise together are as large as `size`, either way."""
        from scipy.special import stdtr

        tails: NDArray[np.float64] = stdtr(
            self.degrees, (self.sample_sd * _Z - size) / self.noise_sd
        )
        return 2 * float(tails @ _WEIGHTS)

    def _quantile(self, chance: float) -> float:
        """Find the size that error and noise exceed with this chance."""
        from scipy.special import stdtrit

        low = 0.0
        high = self.noise_sd * float(stdtrit(self.degrees, 1 - chance / 4)) + 6 * self.sample_sd
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._chance(middle) > chance else (low, middle)
        return high


def mean_change(sides: Sides, starts: StartNoise, nodes: StartNoise, within: float) -> MeanChange:
    """Compute the mean change of two sides and how sure it is.

    starts, nodes: the noise of either. within: variance of the logarithm of one run's time.

    The degrees of freedom of the two together are their weighted harmonic mean: more would promise
    thinner tails than the two have.
    """
    base, new = (np.log([start.time_ms for start in side]) for side in (sides.base, sides.new))
    share = 1 / len(base) + 1 / len(new)
    of_nodes = _node_share(sides.base, sides.new) * nodes.sd**2
    of_starts = share * starts.sd**2
    variance = of_nodes + of_starts
    return MeanChange(
        size=float(new.mean() - base.mean()),
        noise_sd=math.sqrt(variance),
        degrees=variance / (of_nodes / nodes.degrees + of_starts / starts.degrees),
        sample_sd=math.sqrt(share * within),
        looks=sides.looks,
    )


def _node_share(base: Sequence[Start], new: Sequence[Start]) -> float:
    """By which the variance of nodes is in the difference: 2 for a run each on two nodes."""
    weights: Counter[str] = Counter()
    for side, sign in ((base, -1), (new, 1)):
        for start in side:
            weights[start.node] += sign / len(side)  # type: ignore[assignment]
    return float(sum(weight**2 for weight in weights.values()))
