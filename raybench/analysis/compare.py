"""What changed between two runs, point by point, and whether that is more than chance. Pure.

`compare` pairs points by `point_id`. The change of a point is the ratio of its step times; where
several runs of a side are known (`raybench.analysis.repeats`), of their geometric means. A step
time is the median over iterations of the slowest rank. How sure the change is follows from what two
starts of the same thing differ by (`raybench.analysis.start_noise`), from what other devices of the
same model differ by where the sides ran on others, and from the samples.

p_value is the chance to see such a change where there is none. Among many points some p-values are
small by chance; q_value puts that right (`raybench.analysis.false_discoveries`): of the points
called faster or slower, no more than FALSE_DISCOVERIES are so by chance on average. Where nothing
changed at all, that is also the chance of one false verdict among all points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.false_discoveries import false_discovery_rates
from raybench.analysis.history import THRESHOLD
from raybench.analysis.mean_change import MeanChange, mean_change
from raybench.analysis.ratios import slowest_rank_steps
from raybench.analysis.repeats import Known, Sides, Start, sides
from raybench.analysis.resampling import Series, log_median_errors
from raybench.analysis.scaling import latest_attempts
from raybench.analysis.start_noise import (
    REPEATS,
    RUNS,
    StartNoise,
    documented,
    node_noise,
    raised,
    updated,
    widened,
)
from raybench.measure.stats import MIN_SAMPLES

FALSE_DISCOVERIES = 0.02
FASTER, SLOWER, SAME, UNCLEAR = "faster", "slower", "same", "unclear"

_SETTINGS = ("workload", "params", "scaling", "precision", "cuda_graph", "world_size")
_BATCH = ("batch_size", "global_batch_size", "grad_accumulation")
# A pair that differs here is another experiment, not a change of the same one.
_WORLD = {"device_type": "device", "device_name": "device", "node_count": "nodes"}
_BASE_SEED, _NEW_SEED = 1, 2
_NS_PER_MS = 1e6
# What `compare` needs of the table `points`.
POINT_COLUMNS = (
    *("run_id", "point_id", "attempt", "status", "started_at", "host_bound"),
    *("step_ms_p50", "step_ms_ci_low", "step_ms_ci_high"),
    *_SETTINGS,
    *_BATCH,
    *_WORLD,
)
_COLUMNS = {
    **dict.fromkeys(("base_ms", "new_ms", "base_runs", "new_runs"), "float64"),
    **dict.fromkeys(("ratio", "ratio_low", "ratio_high", "least_seen"), "float64"),
    **dict.fromkeys(("noise_floor", "p_value", "q_value"), "float64"),
    **dict.fromkeys(("noise_from", "verdict", "why"), "object"),
}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Another run. points: its rows of that table. node: names the devices that it ran on."""

    points: pd.DataFrame
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One of the two runs, as `raybench.load` gives it.

    points, samples: its rows of these tables; of `points` POINT_COLUMNS are enough, of `samples`
    STEP_COLUMNS of `raybench.analysis.ratios`. node: names the devices that it ran on.
    named: the runs that the user says to be repeats of this one; None where nothing was said.
    alike: the runs that differ from it in nothing that the tables tell, but in start and devices
    of the same model.
    """

    points: pd.DataFrame
    samples: pd.DataFrame
    node: str = ""
    named: Sequence[Other] | None = None
    alike: Sequence[Other] = ()


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
    rows = list(_pairs(latest_attempts(base.points), latest_attempts(new.points)))
    steps = [_step_times(measured) for measured in (base, new)]
    others = [_others(measured) for measured in (base, new)]
    measured = [
        _measured(
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
    names = ["point_id", *_SETTINGS, *_BATCH, "status_base", "status_new", *_COLUMNS]
    return pd.DataFrame(rows, columns=names).astype(_COLUMNS)


def _pairs(base: pd.DataFrame, new: pd.DataFrame) -> Iterator[Row]:
    """A row for each point, with the rows of both runs in it; an absent one is empty."""
    of_base, of_new = ({row["point_id"]: row for row in _records(points)} for points in (base, new))
    for point_id in [*of_new, *(one for one in of_base if one not in of_new)]:
        pair = [of_run.get(point_id, {}) for of_run in (of_base, of_new)]
        told = pair[1] or pair[0]
        yield {
            "point_id": point_id,
            **{name: told[name] for name in (*_SETTINGS, *_BATCH)},
            "status_base": pair[0].get("status"),
            "status_new": pair[1].get("status"),
            **{name: math.nan if kind == "float64" else None for name, kind in _COLUMNS.items()},
            "pair": pair,
        }


def _records(frame: pd.DataFrame) -> list[Row]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _step_times(measured: Measured) -> dict[str, list[Series]]:
    """point_id -> the step times of each repeat of the latest attempt, in milliseconds."""
    latest = latest_attempts(measured.points)
    ok = latest.loc[latest["status"] == "ok", ["point_id", "attempt"]]
    steps = slowest_rank_steps(measured.samples).merge(ok, on=["point_id", "attempt"])
    found: dict[str, list[Series]] = {}
    for (point_id, _), repeat in steps.groupby(["point_id", "repeat"]):
        times_ms = repeat["step_ns"].to_numpy(np.float64) / _NS_PER_MS
        found.setdefault(str(point_id), []).append(times_ms)
    return found


_Others = tuple[list[Start] | None, list[Start]]


def _others(measured: Measured) -> dict[str, _Others]:
    """point_id -> what is known of it from the named runs and from those that are alike."""
    named = _starts(measured.named or ())
    alike = _starts(measured.alike)
    return {
        point_id: (
            None if measured.named is None else named.get(point_id, []),
            alike.get(point_id, []),
        )
        for point_id in measured.points["point_id"].unique()
    }


def _starts(others: Sequence[Other]) -> dict[str, list[Start]]:
    """point_id -> its step times in these runs."""
    if not others:
        return {}
    latest = latest_attempts(pd.concat([other.points for other in others]))
    known = latest[(latest["status"] == "ok") & latest["step_ms_p50"].notna()]
    nodes = {run_id: one.node for one in others for run_id in one.points["run_id"].unique()}
    found: dict[str, list[Start]] = {}
    for row in _records(known):
        start = _start(row, nodes[row["run_id"]], row["step_ms_p50"])
        found.setdefault(row["point_id"], []).append(start)
    return found


def _start(row: Row, node: str, time_ms: float) -> Start:
    return Start(
        run_id=row["run_id"],
        node=node,
        started_at=row["started_at"],
        time_ms=time_ms,
        row=row,
    )


def _measured(
    row: Row,
    steps: Sequence[list[Series]],
    known: Sequence[tuple[Measured, _Others | None]],
    *,
    is_one_world: bool,
    threshold: float,
) -> _Change | None:
    """Fill in what is known before all points are looked at together; None: nothing to test."""
    if not all(steps):
        return None
    times_ms = [float(np.median(np.concatenate(repeats))) for repeats in steps]
    row |= {"base_ms": times_ms[0], "new_ms": times_ms[1], "ratio": times_ms[1] / times_ms[0]}
    row |= {"base_runs": 1, "new_runs": 1, "verdict": UNCLEAR}
    if other := _other_world(row["pair"]):
        row["why"] = other
        return None
    if min(sum(map(len, repeats)) for repeats in steps) < MIN_SAMPLES:
        row["why"] = f"fewer than {MIN_SAMPLES} samples"
        return None
    of_base = log_median_errors(steps[0], _BASE_SEED, steps[1])
    errors = log_median_errors(steps[1], _NEW_SEED, steps[0]) - of_base
    base, new = (
        _known(own, measured, time_ms, others)
        for own, (measured, others), time_ms in zip(row["pair"], known, times_ms, strict=True)
    )
    return _Change(
        row=row,
        sides=sides(base, new, is_one_world=is_one_world, threshold=threshold),
        errors=errors,
        starts=_noise(row["pair"], steps),
    )


def _known(own: Row, measured: Measured, time_ms: float, others: _Others | None) -> Known:
    """What is known of a side; runs on other devices or numbers of nodes are no repeats of it."""
    named, alike = others or (None, [])
    return Known(
        own=_start(own, measured.node, time_ms),
        named=None if named is None else [one for one in named if _is_of_world(one.row, own)],
        alike=[one for one in alike if _is_of_world(one.row, own)],
    )


def _is_of_world(row: Mapping[str, Any], own: Row) -> bool:
    return _other_world((own, row)) is None


def _other_world(pair: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the two rows are not of the same experiment."""
    for column, what in _WORLD.items():
        base, new = (one[column] for one in pair)
        if not (base == new or (pd.isna(base) and pd.isna(new))):
            before, now = (f"{one:g}" if isinstance(one, float) else one for one in (base, new))
            return f"other {what}: {before}, then {now}"
    return None


def _noise(pair: Sequence[Row], steps: Sequence[list[Series]]) -> StartNoise:
    """Without other runs: as documented, or wider by repeats.

    Repeats share their processes: that they agree tells nothing of other starts.
    """
    prior = documented(pair)
    repeats = [[float(np.median(samples)) for samples in of_run] for of_run in steps]
    return max(prior, updated(prior, repeats, 0.0, REPEATS), key=lambda noise: noise.floor)


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
    counts = {"base_runs": len(sides.base), "new_runs": len(sides.new)}
    return {"base_ms": base, "new_ms": new, "ratio": new / base, **counts}


def _learn_noise(changes: Sequence[_Change]) -> None:
    """Draw what is documented towards what the runs, or else the points, show."""
    again = [change for change in changes if change.has_runs]
    priors = raised(
        [documented(change.row["pair"]) for change in again],
        [change.runs for change in again],
        [change.within for change in again],
    )
    for change, prior in zip(again, priors, strict=True):
        known = updated(prior, change.runs, change.within, RUNS)
        change.starts = replace(known, source=RUNS)
    once = [change for change in changes if not change.has_runs]
    wide = widened(
        [change.starts for change in once],
        [math.log(change.row["ratio"]) for change in once],
        [float(change.errors.std()) for change in once],
    )
    for change, noise in zip(once, wide, strict=True):
        change.starts = noise


def _verdict(tested: _Change, threshold: float, count: int) -> tuple[str, str | None]:
    """The verdict, and what an unclear one lacks."""
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
