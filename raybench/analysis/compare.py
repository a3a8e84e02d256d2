"""What changed between two runs, point by point, and whether that is more than chance. Pure.

`compare` pairs points by `point_id`. The change of a point is the ratio of its median step times,
each the median over iterations of the slowest rank, with a 95 % interval from resampling repeats
and blocks of iterations. The interval speaks of these two starts of the processes only. So the
change is tested against what two starts of the same thing differ by, the noise floor of
`raybench.analysis.start_noise`: p_value is the chance to see such a change where there is none.
Where other runs of the same job are known, it is of the difference of their means.

Among many points some p-values are small by chance; q_value puts that right
(`raybench.analysis.false_discoveries`): of the points called faster or slower, no more than
FALSE_DISCOVERIES are so by chance on average. Where nothing changed at all, that is also the chance
of one false verdict among all points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.false_discoveries import false_discovery_rates
from raybench.analysis.ratios import slowest_rank_steps
from raybench.analysis.resampling import Series, log_median_errors
from raybench.analysis.scaling import latest_attempts
from raybench.analysis.start_noise import StartNoise, documented, raised, updated, widened
from raybench.measure.stats import MIN_SAMPLES

THRESHOLD = 0.015
FALSE_DISCOVERIES = 0.02
FASTER, SLOWER, SAME, UNCLEAR = "faster", "slower", "same", "unclear"

_SETTINGS = ("workload", "params", "scaling", "precision", "cuda_graph", "world_size")
_BATCH = ("batch_size", "global_batch_size", "grad_accumulation")
# A pair that differs here is another experiment, not a change of the same one.
_WORLD = {"device_type": "device", "device_name": "device", "node_count": "nodes"}
_BASE_SEED, _NEW_SEED = 1, 2
_RUNS = "A/A runs"
_NS_PER_MS = 1e6
# What `compare` needs of the table `points`.
POINT_COLUMNS = (
    *("run_id", "point_id", "attempt", "status", "step_ms_p50", "host_bound"),
    *_SETTINGS,
    *_BATCH,
    *_WORLD,
)
_COLUMNS = {
    **dict.fromkeys(("base_ms", "new_ms", "ratio", "ratio_low", "ratio_high"), "float64"),
    **dict.fromkeys(("noise_floor", "p_value", "q_value"), "float64"),
    **dict.fromkeys(("noise_from", "verdict", "why"), "object"),
}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run, as `raybench.load` gives it.

    points, samples: its rows of these tables; of `points` POINT_COLUMNS are enough, of `samples`
    STEP_COLUMNS of `raybench.analysis.ratios`.
    again: the same table of each other run that differs from this one in nothing but its start; one
    that stands on both sides tells of the noise, not of the change.
    """

    points: pd.DataFrame
    samples: pd.DataFrame
    again: Sequence[pd.DataFrame] = ()


@dataclass(slots=True, kw_only=True)
class _Change:
    """A point that is tested.

    row: what is said of it. size: the logarithm of the ratio of the means of all runs; spread: its
    standard deviation over that of a pair. errors: of the pair, as resampled. runs: groups of step
    times that differ by starts. noise: as documented, or wider by repeats, until all are tested.
    """

    row: Row
    size: float
    spread: float
    errors: Series
    runs: Sequence[Sequence[float]]
    noise: StartNoise

    @property
    def within(self) -> float:
        """Variance of the logarithm of one run's median, as resampled."""
        return float(self.errors.var()) / 2


def compare(base: Measured, new: Measured, *, threshold: float = THRESHOLD) -> pd.DataFrame:
    """One row for each point of either run, in the order of `new`, then of `base`.

    Columns: point_id; the settings; status_base and status_new (null where a run has no row);
    base_ms and new_ms, the step times; ratio = new / base; ratio_low and ratio_high, its 95 %
    interval; noise_floor, the relative change that 19 of 20 A/A pairs stay below, and noise_from,
    where that was got; p_value and q_value, of the means of all runs; verdict and why.

    verdict: `slower` (or `faster`) where all three say so: the interval lies above (below) 1, the
    change is more than `threshold`, and q_value is at most FALSE_DISCOVERIES. `same` where the
    interval lies within the threshold or the noise floor, whichever is wider; what repeats or the
    scatter of points add to the floor does not count here. `unclear` where neither holds; `why`
    says what is missing. Null where a run has no step time of the point.
    """
    rows = list(_pairs(latest_attempts(base.points), latest_attempts(new.points)))
    steps = [_step_times(measured) for measured in (base, new)]
    again = _step_times_again(base.again, new.again)
    measured = [
        _measured(row, [of_run.get(row["point_id"], []) for of_run in steps], again) for row in rows
    ]
    tested = [change for change in measured if change is not None]
    _test(tested)
    for change in tested:
        change.row["verdict"], change.row["why"] = _verdict(change, threshold, len(tested))
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


def _step_times_again(
    base: Sequence[pd.DataFrame], new: Sequence[pd.DataFrame]
) -> list[dict[str, list[float]]]:
    """point_id -> its step time in other runs like base, like new, and like both."""
    base_ids, new_ids = (_run_ids(frames) for frames in (base, new))
    return [
        _medians([one for one in base if not _run_ids([one]) & new_ids]),
        _medians([one for one in new if not _run_ids([one]) & base_ids]),
        _medians([one for one in base if _run_ids([one]) & new_ids]),
    ]


def _run_ids(frames: Sequence[pd.DataFrame]) -> set[str]:
    return {str(run_id) for frame in frames for run_id in frame["run_id"]}


def _medians(frames: Sequence[pd.DataFrame]) -> dict[str, list[float]]:
    if not frames:
        return {}
    latest = latest_attempts(pd.concat(frames))
    known = latest[(latest["status"] == "ok") & latest["step_ms_p50"].notna()]
    return {str(name): list(times) for name, times in known.groupby("point_id")["step_ms_p50"]}


def _measured(
    row: Row, steps: Sequence[list[Series]], again: Sequence[Mapping[str, list[float]]]
) -> _Change | None:
    """Fill in what is known before all points are looked at together; None: nothing to test."""
    if not all(steps):
        return None
    base_ms, new_ms = (float(np.median(np.concatenate(repeats))) for repeats in steps)
    row |= {"base_ms": base_ms, "new_ms": new_ms, "ratio": new_ms / base_ms}
    row["verdict"] = UNCLEAR
    if other := _other_world(row["pair"]):
        row["why"] = other
        return None
    if min(sum(map(len, repeats)) for repeats in steps) < MIN_SAMPLES:
        row["why"] = f"fewer than {MIN_SAMPLES} samples"
        return None
    of_base = log_median_errors(steps[0], _BASE_SEED, steps[1])
    errors = log_median_errors(steps[1], _NEW_SEED, steps[0]) - of_base
    low, high = np.quantile(errors, [0.025, 0.975])
    row["ratio_low"], row["ratio_high"] = (row["ratio"] * math.exp(end) for end in (low, high))
    like_base, like_new, like_both = (of_run.get(row["point_id"], []) for of_run in again)
    runs = [[*like_base, base_ms], [*like_new, new_ms]]
    means = [float(np.log(times).mean()) for times in runs]
    return _Change(
        row=row,
        size=means[1] - means[0],
        spread=math.sqrt((1 / len(runs[0]) + 1 / len(runs[1])) / 2),
        errors=errors,
        runs=[*runs, like_both],
        noise=_noise(row["pair"], steps),
    )


def _other_world(pair: Sequence[Row]) -> str | None:
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
    return max(prior, updated(prior, repeats, 0.0, "repeats"), key=lambda noise: noise.floor)


def _test(changes: Sequence[_Change]) -> None:
    """Fill in what is known from all points together."""
    again = [change for change in changes if any(len(group) > 1 for group in change.runs)]
    priors = raised(
        [documented(change.row["pair"]) for change in again],
        [change.runs for change in again],
        [change.within for change in again],
    )
    for change, prior in zip(again, priors, strict=True):
        change.noise = updated(prior, change.runs, change.within, _RUNS)
    once = [change for change in changes if change.noise.source != _RUNS]
    wide = widened(
        [change.noise for change in once],
        [change.size for change in once],
        [float(change.errors.std()) for change in once],
    )
    for change, noise in zip(once, wide, strict=True):
        change.noise = noise
    p_values = [_p_value(change) for change in changes]
    for change, p, q in zip(
        changes, p_values, false_discovery_rates(p_values, FALSE_DISCOVERIES), strict=True
    ):
        change.row |= {"p_value": p, "q_value": q}
        change.row |= {"noise_floor": change.noise.floor, "noise_from": change.noise.source}


def _p_value(change: _Change) -> float:
    """P(|error + noise of starts| >= |size|): errors as resampled, the noise as Student's t.

    The mean over the resampled errors of the exact tails.
    """
    from scipy.special import stdtr

    size, scale = abs(change.size) / change.spread, change.noise.sd_of_change
    above = stdtr(change.noise.degrees, (change.errors - size) / scale)
    below = stdtr(change.noise.degrees, (-change.errors - size) / scale)
    return min(1.0, float((above + below).mean()))


def _verdict(tested: _Change, threshold: float, count: int) -> tuple[str, str | None]:
    """The verdict, and what an unclear one lacks."""
    row = tested.row
    change, low, high = (row[name] - 1 for name in ("ratio", "ratio_low", "ratio_high"))
    is_apart = (low > 0 or high < 0) and change * tested.size > 0
    if is_apart and abs(change) > threshold and row["q_value"] <= FALSE_DISCOVERIES:
        return (SLOWER if change > 0 else FASTER), None
    known = tested.noise if tested.noise.source == _RUNS else documented(row["pair"])
    tolerated = max(threshold, known.floor)
    if -tolerated <= low and high <= tolerated:
        return SAME, None
    if abs(change) <= threshold or not is_apart:
        return UNCLEAR, "known too loosely to be called the same"
    if row["p_value"] <= FALSE_DISCOVERIES:
        return UNCLEAR, f"one of {count} points may change as much by chance"
    return UNCLEAR, "starts of the same thing may differ as much"
