"""What changed between two runs, point by point, and whether that is more than chance. Pure.

`compare` pairs points by `point_id`. The change of a point is the ratio of its median step times,
each the median over iterations of the slowest rank, with a 95 % interval from resampling repeats
and blocks of iterations. The interval speaks of these two starts of the processes only. So the
change is tested against what two starts of the same thing differ by, the noise floor of
`raybench.analysis.start_noise`: p_value is the chance to see such a change where there is none.
Among many points some p-values are small by chance; q_value is the p-value after Y. Benjamini and
Y. Hochberg, "Controlling the false discovery rate", J. R. Stat. Soc. B 57(1), 1995: of the points
called faster or slower, no more than FALSE_DISCOVERIES are so by chance on average. Where nothing
changed at all, that is also the chance of one false verdict among all points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.ratios import slowest_rank_steps
from raybench.analysis.resampling import Series, log_median_errors
from raybench.analysis.scaling import latest_attempts
from raybench.analysis.start_noise import StartNoise, documented, updated
from raybench.measure.stats import MIN_SAMPLES

THRESHOLD = 0.015
FALSE_DISCOVERIES = 0.02
FASTER, SLOWER, SAME, UNCLEAR = "faster", "slower", "same", "unclear"

_SETTINGS = ("workload", "params", "scaling", "precision", "cuda_graph", "world_size")
_BATCH = ("batch_size", "global_batch_size", "grad_accumulation")
# A pair that differs here is another experiment, not a change of the same one.
_WORLD = {"device_type": "device", "device_name": "device", "node_count": "nodes"}
_BASE_SEED, _NEW_SEED = 1, 2
_NS_PER_MS = 1e6
_COLUMNS = {
    **dict.fromkeys(("base_ms", "new_ms", "ratio", "ratio_low", "ratio_high"), "float64"),
    **dict.fromkeys(("noise_floor", "p_value", "q_value"), "float64"),
    **dict.fromkeys(("noise_from", "verdict", "why"), "object"),
}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run, as `raybench.load` gives it.

    points, samples: its rows of these tables; of `samples` STEP_COLUMNS of
    `raybench.analysis.ratios` are enough.
    again: the same table of each other run that differs from this one in nothing but its start.
    """

    points: pd.DataFrame
    samples: pd.DataFrame
    again: Sequence[pd.DataFrame] = ()


def compare(base: Measured, new: Measured, *, threshold: float = THRESHOLD) -> pd.DataFrame:
    """One row for each point of either run, in the order of `new`, then of `base`.

    Columns: point_id; the settings; status_base and status_new (null where a run has no row);
    base_ms and new_ms, the step times; ratio = new / base; ratio_low and ratio_high, its 95 %
    interval; noise_floor, the relative change that 19 of 20 A/A pairs stay below, and noise_from,
    where that was got; p_value, q_value; verdict and why.

    verdict: `slower` (or `faster`) where all three say so: the interval lies above (below) 1, the
    change is more than `threshold`, and q_value is at most FALSE_DISCOVERIES. `same` where the
    interval lies within the threshold or the noise floor, whichever is wider. `unclear` where
    neither holds; `why` says what is missing. Null where a run has no step time of the point.
    """
    rows = list(_pairs(latest_attempts(base.points), latest_attempts(new.points)))
    steps = [_step_times(measured) for measured in (base, new)]
    again = [_step_times_again(measured) for measured in (base, new)]
    for row in rows:
        _measure(row, [of_run.get(row["point_id"], []) for of_run in steps], again)
    tested = [row for row in rows if not math.isnan(row["p_value"])]
    adjusted = _false_discovery_rates([row["p_value"] for row in tested])
    for row, q_value in zip(tested, adjusted, strict=True):
        row["q_value"] = q_value
        row["verdict"], row["why"] = _verdict(row, threshold, len(tested))
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


def _step_times_again(measured: Measured) -> dict[str, list[float]]:
    """point_id -> its step time in each of the other runs."""
    if not measured.again:
        return {}
    latest = latest_attempts(pd.concat(measured.again))
    known = latest[(latest["status"] == "ok") & latest["step_ms_p50"].notna()]
    return {str(name): list(times) for name, times in known.groupby("point_id")["step_ms_p50"]}


def _measure(
    row: Row, steps: Sequence[list[Series]], again: Sequence[Mapping[str, list[float]]]
) -> None:
    """Fill in what is known before all points are looked at together."""
    if not all(steps):
        return
    base_ms, new_ms = (float(np.median(np.concatenate(repeats))) for repeats in steps)
    row |= {"base_ms": base_ms, "new_ms": new_ms, "ratio": new_ms / base_ms}
    row["verdict"] = UNCLEAR
    if other := _other_world(row["pair"]):
        row["why"] = other
        return
    if min(sum(map(len, repeats)) for repeats in steps) < MIN_SAMPLES:
        row["why"] = f"fewer than {MIN_SAMPLES} samples"
        return
    of_base = log_median_errors(steps[0], _BASE_SEED, steps[1])
    errors = log_median_errors(steps[1], _NEW_SEED, steps[0]) - of_base
    low, high = np.quantile(errors, [0.025, 0.975])
    noise = _noise(row, steps, again, float(errors.var()) / 2)
    row |= {
        "ratio_low": row["ratio"] * math.exp(low),
        "ratio_high": row["ratio"] * math.exp(high),
        "noise_floor": noise.floor,
        "noise_from": noise.source,
        "p_value": _p_value(math.log(row["ratio"]), errors, noise),
    }


def _other_world(pair: Sequence[Row]) -> str | None:
    """Why the two rows are not of the same experiment."""
    for column, what in _WORLD.items():
        base, new = (one[column] for one in pair)
        if not (base == new or (pd.isna(base) and pd.isna(new))):
            before, now = (f"{one:g}" if isinstance(one, float) else one for one in (base, new))
            return f"other {what}: {before}, then {now}"
    return None


def _noise(
    row: Row,
    steps: Sequence[list[Series]],
    again: Sequence[Mapping[str, list[float]]],
    within: float,
) -> StartNoise:
    """From runs of the same job where there are any, else from repeats, else as documented.

    within: variance of the logarithm of one run's median, as resampled.
    """
    prior = documented(row["pair"])
    runs = [
        [*of_run.get(row["point_id"], []), row[name]]
        for of_run, name in zip(again, ("base_ms", "new_ms"), strict=True)
    ]
    found = updated(prior, runs, within, "A/A runs")
    if found is not prior:
        return found
    repeats = [[float(np.median(samples)) for samples in of_run] for of_run in steps]
    return updated(prior, repeats, 0.0, "repeats")


def _p_value(change: float, errors: Series, noise: StartNoise) -> float:
    """P(|error + noise of two starts| >= |change|): errors as resampled, the noise as Student's t.

    change: the logarithm of the ratio. The mean over the resampled errors of the exact tails.
    """
    from scipy.special import stdtr

    scale = noise.sd_of_change
    above = stdtr(noise.degrees, (errors - abs(change)) / scale)
    below = stdtr(noise.degrees, (-errors - abs(change)) / scale)
    return min(1.0, float((above + below).mean()))


def _false_discovery_rates(p_values: Sequence[float]) -> list[float]:
    if not p_values:
        return []
    from scipy.stats import false_discovery_control

    return [float(value) for value in false_discovery_control(p_values, method="bh")]


def _verdict(row: Row, threshold: float, count: int) -> tuple[str, str | None]:
    """The verdict of a tested row, and what an unclear one lacks."""
    change, low, high = (row[name] - 1 for name in ("ratio", "ratio_low", "ratio_high"))
    tolerated = max(threshold, row["noise_floor"])
    is_apart = low > 0 or high < 0
    if is_apart and abs(change) > threshold and row["q_value"] <= FALSE_DISCOVERIES:
        return (SLOWER if change > 0 else FASTER), None
    if -tolerated <= low and high <= tolerated:
        return SAME, None
    if abs(change) <= threshold or not is_apart:
        return UNCLEAR, "known too loosely to be called the same"
    if row["p_value"] <= FALSE_DISCOVERIES:
        return UNCLEAR, f"one of {count} points may change as much by chance"
    return UNCLEAR, "starts of the same thing may differ as much"
