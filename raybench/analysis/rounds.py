"""Many measurements of one point: its rounds as one row, its step by iteration, module and rank."""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raybench.conversion import NS_PER_MS
from raybench.records.doubts import Doubt, DoubtKind, worst_of_each
from raybench.records.status import Status
from raybench.results.breakdown import BREAKDOWN
from raybench.results.columns import TableColumn, columns_of
from raybench.results.metrics import half_interval
from raybench.results.point_row import PointRow, step_of_parts, why_no_breakdown
from raybench.results.tables import RegionRow

if TYPE_CHECKING:
    import pandas as pd

# Columns that identify an attempt, and its status and start.
ATTEMPT_COLUMNS = ("run_id", "point_id", "attempt", "round", "control_of", "status", "started_at")
# The following rules say how the rounds of a point become one row. The rules by name come first,
# then the rules by kind. All other columns come from the last round.
_LAST_ROUND_COLUMNS = ("attempt", "started_at", "duration_s", "round", "error_rank", "hang")
_SUMS = ("iterations", "warmup_iterations", "energy_j")
# In these columns null is a value.
_COLUMNS_WITH_NULLS = ("inner_iterations", "slowest_rank")
# These columns use only rounds that have a breakdown, because otherwise ranks wait for each other
# and have the same time. The used rounds have the same shares.
_BREAKDOWN_COLUMNS = (
    *(*BREAKDOWN, "parts_step_ms", "host_bound", "slowest_rank", "share_by_rank"),
)


def _equal_or_none(values: Sequence[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else None


_RULES_BY_NAME: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    # A joined name equals no other name, so rounds on several models are not compared.
    "device_name": lambda values: " and ".join(sorted(set(values))),
    "new_processes": all,
    "inner_iterations": _equal_or_none,
    "models_by_rank": _equal_or_none,
    # Merge the maps, because a round without a breakdown lacks the methods of the parts.
    "methods": lambda values: dict(ChainMap(*values)),
    "not_measured": lambda values: dict(ChainMap(*values)),
    "doubts": lambda values: worst_of_each(chain(*values)),
    # No rank is reported unless the same rank is slow in most rounds.
    "slowest_rank": lambda values: Counter(values).most_common(1)[0][0],
    "step_ms_min": min,
    "step_ms_max": max,
    # Take the median, because the first process of a host also pays for loading shared libraries.
    "first_step_ms": median,
    "compiled_step_ms": median,
    # The interval is over the rounds, so an unsteady round does little harm.
    "stable": lambda values: 2 * sum(values) >= len(values),
}
# A larger relative change of a control is a drift of the machine and not noise.
LARGEST_DRIFT = 0.01


def latest_trials(points: Iterable[PointRow]) -> list[PointRow]:
    """Return the last attempt at each trial of each run."""
    latest: dict[tuple[Any, ...], PointRow] = {}
    for row in points:
        trial = (row.run_id, row.point_id, row.round, row.control_of)
        if trial not in latest or row.attempt >= latest[trial].attempt:
            latest[trial] = row
    return list(latest.values())


def without_controls(trials: Iterable[PointRow]) -> list[PointRow]:
    """Return the rows without the controls."""
    return [row for row in trials if row.control_of is None]


def mean_of_rounds(points: Iterable[PointRow]) -> list[PointRow]:
    """Return one row for each point of each run: the mean of its ok rounds.

    Without an ok round, the row is the worst round.

    * Step times and rates: geometric mean; arithmetic mean for values by rank.
    * Parts of the step: mean over the rounds with a breakdown and the same shares.
    * Cold steps: median. Counts of samples, and energy: sum. Memory: maximum.
    * `throttled`: whether a round was throttled. `stable`: whether half of the rounds were stable.
    * `step_ms_ci_low`, `step_ms_ci_high`: from the samples, and not from the scatter of rounds.
    * `doubts`: each failed round adds a doubt.

    Args:
        points: all attempts in table order; controls are ignored.
    """
    rounds_by_point: dict[tuple[str, str], list[PointRow]] = {}
    for row in without_controls(latest_trials(points)):
        rounds_by_point.setdefault((row.run_id, row.point_id), []).append(row)
    return [
        rounds[0] if len(rounds) == 1 else _merge_rounds(rounds)
        for rounds in rounds_by_point.values()
    ]


def _merge_rounds(rounds: Sequence[PointRow]) -> PointRow:
    """Return one row of the ok rounds, mostly means; the worst round if no round is ok."""
    ok = [row for row in rounds if row.status is Status.OK]
    if not ok:
        # `Status` lists the worst failures first.
        worst_first = list(Status)
        return min(rounds, key=lambda row: worst_first.index(row.status))
    # Parts of the step are comparable only between rounds with a breakdown, whose ranks divide the
    # samples of a step in the same way as in the last such round.
    with_parts = [row for row in ok if row.local_step_ms_by_rank] or ok
    last_shares = with_parts[-1].share_by_rank
    with_parts = [row for row in with_parts if row.share_by_rank == last_shares]
    # `_combine` takes the mean, or for some columns the sum, the maximum or the last round.
    values: dict[str, Any] = {}
    for column in columns_of(PointRow):
        used_rounds = with_parts if column.name in _BREAKDOWN_COLUMNS else ok
        values[column.name] = _combine(column, [getattr(row, column.name) for row in used_rounds])
    merged = PointRow(**values)
    if len(ok) > 1:
        # The rounds are independent, so the squares of half widths add up.
        intervals_ms = [(row.step_ms_p50, row.step_ms_ci_low, row.step_ms_ci_high) for row in ok]
        are_known = all(all(interval_ms) for interval_ms in intervals_ms)
        low_ms, high_ms = None, None
        if merged.step_ms_p50 and are_known:
            # Three arrays of logarithms with an entry for each round.
            step, low, high = np.log(np.array(intervals_ms, np.float64)).T
            width_below = math.hypot(*(step - low)) / len(ok)
            width_above = math.hypot(*(high - step)) / len(ok)
            low_ms = merged.step_ms_p50 * math.exp(-width_below)
            high_ms = merged.step_ms_p50 * math.exp(width_above)
        merged = replace(merged, step_ms_ci_low=low_ms, step_ms_ci_high=high_ms)
    doubts = list(merged.doubts or ())
    for row in rounds:
        if row.status is not Status.OK:
            subject = f"{row.status}: {row.error_message or 'no reason known'}"
            failure = Doubt(kind=DoubtKind.ROUND_FAILED, value=row.round or 1, subject=subject)
            doubts.append(failure)
    are_doubts_known = all(row.doubts is not None for row in ok)
    return replace(merged, doubts=tuple(doubts) if doubts or are_doubts_known else None)


def _combine(column: TableColumn, values: Sequence[Any]) -> Any:
    """Combine the values of a column in the ok rounds; None if the result is unknown."""
    name, arrow_type = column.name, column.kind
    if name in _LAST_ROUND_COLUMNS:
        return values[-1]
    known = [value for value in values if value is not None or name in _COLUMNS_WITH_NULLS]
    if not known:
        return None
    if name in _SUMS:
        return sum(known) if len(known) == len(values) else None
    if arrow_type == "int64" and name.endswith("_bytes"):
        return max(known)
    rule = _RULES_BY_NAME.get(name) or _RULES_BY_KIND.get(arrow_type)
    return rule(known) if rule else known[-1]


def _mean(values: Sequence[float]) -> float:
    """Return the geometric mean; the arithmetic mean if a value is not positive."""
    return math.exp(fmean(map(math.log, values))) if min(values) > 0 else fmean(values)


def _mean_by_rank(rounds: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    """Return the mean of each rank over the rounds; None if a round lacks a value."""
    means = np.array(rounds, np.float64).mean(axis=0).tolist()
    return tuple(None if math.isnan(mean) else mean for mean in means)


def _mean_by_name(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values_by_name: dict[str, list[float]] = {}
    for values_of_round in rounds:
        for name, value in values_of_round.items():
            values_by_name.setdefault(name, []).append(value)
    return {name: _mean(values) for name, values in values_by_name.items()}


_RULES_BY_KIND: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "bool": any,
    "int64": lambda values: round(median(values)),
    "double": _mean,
    "list<double>": _mean_by_rank,
    "list<string>": lambda values: tuple(dict.fromkeys(chain(*values))),
    "map<string,double>": _mean_by_name,
}


class ControlDrift(NamedTuple):
    """A control whose step differs from the earlier step of its point in the same round."""

    # Counts from 1.
    round: int
    # World size of the block of points that the control ends.
    world_size: int
    # Relative change of the step time; positive if the control is slower.
    change: float


class Trials:
    """The ok trials of runs by point and round, and their controls.

    A control repeats a point of a round after a block of points, to show how the machine drifts.

    Args:
        points: rows of the table `points`; the last attempt at each trial counts.
    """

    def __init__(self, points: Iterable[PointRow]) -> None:
        # Key: (run_id, point_id), and then the round.
        self._rounds: dict[tuple[str, str], dict[int, PointRow]] = {}
        # Key: (run_id, round, world size of the block of points that the control ends).
        self._controls: dict[tuple[str, int, int], PointRow] = {}
        for row in latest_trials(points):
            round_number = row.round or 1
            if row.status is not Status.OK:
                continue
            if row.control_of is None:
                self._rounds.setdefault((row.run_id, row.point_id), {})[round_number] = row
            else:
                self._controls[row.run_id, round_number, row.control_of] = row

    def rounds(self, row: PointRow) -> Mapping[int, PointRow]:
        """Return the ok rows of a point by round, which counts from 1."""
        return self._rounds.get((row.run_id, row.point_id), {})

    def logs(self, row: PointRow, value: Callable[[PointRow], float | None]) -> dict[int, float]:
        """Return the logarithm of a value of a point by round.

        Empty unless the value is positive in all rounds.

        Args:
            row: a point.
            value: returns the value of one round.
        """
        logs = {}
        for round_number, attempt in self.rounds(row).items():
            value_of_round = value(attempt) or 0.0
            if value_of_round <= 0:
                return {}
            logs[round_number] = math.log(value_of_round)
        return logs

    def log_ratios(self, base: PointRow, row: PointRow) -> dict[int, float]:
        """Return ln(throughput of `row` / throughput of `base`) by round.

        The ratio is corrected for the drift of the machine between the two trials.
        """
        base_attempts, log_ratios = self.rounds(base), {}
        for round_number, attempt in self.rounds(row).items():
            base_attempt = base_attempts.get(round_number)
            if base_attempt is None or not attempt.throughput or not base_attempt.throughput:
                continue
            log_ratio = math.log(attempt.throughput / base_attempt.throughput)
            drift_per_s = self._drift_rates.get((attempt.run_id, round_number), 0.0)
            drift = drift_per_s * (_timed_at_s(attempt) - _timed_at_s(base_attempt))
            # If steps became longer since `base`, the throughput of `row` is too low.
            log_ratios[round_number] = log_ratio + drift
        return log_ratios

    @cached_property
    def _drift_rates(self) -> dict[tuple[str, int], float]:
        """The growth of ln(step) per second by (run_id, round), from the controls of the round."""
        lines_by_run: dict[str, dict[int, _Line]] = {}
        for (run_id, round_number), trials in self._control_trials().items():
            if (line := _line_through(trials)) is not None:
                lines_by_run.setdefault(run_id, {})[round_number] = line
        rates: dict[tuple[str, int], float] = {}
        for run_id, lines in lines_by_run.items():
            # Noise in the slopes would add noise to speed-ups. Multiply the slopes of a run by
            # 1 - 1/F, the share of their variance that noise does not explain (empirical Bayes).
            degrees = sum(line.degrees for line in lines.values())
            residual = sum(line.residual for line in lines.values())
            noise_variance = residual / degrees if degrees else math.inf
            explained_variance = fmean(line.explained for line in lines.values())
            factor = 0.0
            if explained_variance:
                # F is explained_variance / noise_variance.
                factor = max(0.0, 1 - noise_variance / explained_variance)
            for round_number, line in lines.items():
                rates[run_id, round_number] = factor * line.slope
        return rates

    def _control_trials(self) -> dict[tuple[str, int], list[PointRow]]:
        """Return the first trial of the repeated point, then its controls, by (run_id, round)."""
        trials: dict[tuple[str, int], list[PointRow]] = {}
        for (run_id, round_number, _), control in self._controls.items():
            trials_of_round = trials.setdefault((run_id, round_number), [])
            # The point was measured in this round before its controls.
            first_trial = self.rounds(control).get(round_number)
            if not trials_of_round and first_trial is not None:
                trials_of_round.append(first_trial)
            trials_of_round.append(control)
        return trials

    def drifts(self) -> Iterator[ControlDrift]:
        """Yield the controls whose step changed by more than LARGEST_DRIFT and more than noise."""
        for (_, round_number, world_size), control in self._controls.items():
            # The trial of the same point in this round.
            earlier = self.rounds(control).get(round_number)
            if earlier is None or not earlier.step_ms_p50 or not control.step_ms_p50:
                continue
            log_change = math.log(control.step_ms_p50 / earlier.step_ms_p50)
            noise = math.hypot(half_interval(earlier) or 0.0, half_interval(control) or 0.0)
            if abs(log_change) > max(LARGEST_DRIFT, noise):
                yield ControlDrift(round_number, world_size, math.expm1(log_change))


def _timed_at_s(row: PointRow) -> float:
    """Return the middle of the time after set-up and heating, in s since the epoch."""
    before_s = (row.setup_s or 0.0) + (row.heated_s or 0.0)
    return row.started_at.timestamp() + (before_s + (row.duration_s or 0.0)) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A least-squares line of ln(step) over time in seconds."""

    slope: float
    # Sum of squares that the line explains.
    explained: float
    # Sum of squares of the residuals.
    residual: float
    # Degrees of freedom of the residuals.
    degrees: int


def _line_through(trials: Sequence[PointRow]) -> _Line | None:
    """Fit a line to the steps of trials; None for fewer than two different times."""
    timed = [row for row in trials if row.step_ms_p50]
    times_s = np.array([_timed_at_s(row) for row in timed], np.float64)
    if len(timed) < 2 or not np.ptp(times_s):
        return None
    logs = np.log([row.step_ms_p50 or math.nan for row in timed])
    times_s, logs = times_s - times_s.mean(), logs - logs.mean()
    squares_of_times = float(times_s @ times_s)
    slope = float(times_s @ logs) / squares_of_times
    residuals = logs - slope * times_s
    return _Line(
        slope=slope,
        explained=slope**2 * squares_of_times,
        residual=float(residuals @ residuals),
        degrees=len(timed) - 2,
    )


# Columns of `samples` that `rank_by_iteration` needs.
SAMPLE_COLUMNS = ("repeat", "rank", "iteration", "is_warmup", "step_ns")


def join_rounds(rounds: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate the samples of all rounds of a point, and number `repeat` over all rounds.

    Args:
        rounds: rows of the table `samples`, a frame for each round; at least one.
    """
    import pandas as pd

    joined: list[pd.DataFrame] = []
    repeats = 0
    for samples in rounds:
        joined.append(samples.assign(repeat=samples["repeat"] + repeats))
        repeats = joined[-1]["repeat"].max() + 1 if len(samples) else repeats
    return pd.concat(joined, ignore_index=True)


def rank_by_iteration(samples: pd.DataFrame, columns: int) -> tuple[pd.DataFrame, float]:
    """Return the timed samples of a point in ms as [ranks, iterations], and their median.

    NaN marks an iteration that a rank lacks. Without timed samples the frame is empty.

    Args:
        samples: rows of the table `samples` of one attempt, or of several by `join_rounds`.
        columns: largest number of columns. With more iterations, a column stands for several
            iterations: it has the index of the first iteration and, for each rank, the time
            farthest from the median.
    """
    import pandas as pd

    timed = samples[~samples["is_warmup"].astype(bool)]
    steps = timed.pivot_table(index="rank", columns=["repeat", "iteration"], values="step_ns")
    times_ms = steps.to_numpy(np.float64) / NS_PER_MS
    if not times_ms.size:
        return pd.DataFrame(), math.nan
    median_ms = float(np.nanmedian(times_ms))
    # First iteration of each column; `unique`, because there may be fewer iterations than columns.
    firsts = np.unique(np.linspace(0, times_ms.shape[1], columns, endpoint=False).astype(int))
    farthest_ms = []
    for times_of_column in np.split(times_ms, firsts[1:], axis=1):
        # -1: a missing time is never the farthest, unless all are missing.
        distances = np.nan_to_num(np.abs(times_of_column - median_ms), nan=-1.0)
        farthest = distances.argmax(axis=1)[:, np.newaxis]
        farthest_ms.append(np.take_along_axis(times_of_column, farthest, axis=1))
    frame = pd.DataFrame(np.hstack(farthest_ms), index=steps.index, columns=firsts)
    return frame, median_ms


def rank_steps(samples: pd.DataFrame) -> pd.DataFrame:
    """Return one row per rank: rank, iterations, median_ms, min_ms, max_ms, data_ms.

    data_ms is the median wait for the next batch; NaN without batches.

    Args:
        samples: rows of the table `samples`; the warm-up is ignored.
    """
    timed = samples[~samples["is_warmup"].astype(bool)]
    steps = timed.groupby("rank").agg(
        iterations=("step_ns", "count"),
        median_ms=("step_ns", "median"),
        min_ms=("step_ns", "min"),
        max_ms=("step_ns", "max"),
        data_ms=("data_ns", "median"),
    )
    time_columns = [name for name in steps.columns if name != "iterations"]
    steps[time_columns] = steps[time_columns].astype("float64") / NS_PER_MS
    return steps.reset_index()


def slowest_modules(modules: pd.DataFrame) -> pd.DataFrame:
    """Return one row per module: module, kind, calls, forward_ms, backward_ms.

    Each number is the maximum over ranks. The slowest module comes first.

    Args:
        modules: rows of the table `modules` of one attempt.
    """
    by_module = modules.groupby(["module", "kind"], sort=False)
    longest = by_module[["calls", "forward_ms", "backward_ms"]].max().reset_index()
    total = longest["forward_ms"] + longest["backward_ms"].fillna(0.0)
    order = total.sort_values(ascending=False, kind="stable").index
    return longest.loc[order].reset_index(drop=True)


def slowest_regions(regions: Iterable[RegionRow]) -> list[RegionRow]:
    """Return for each region of an attempt the row of the slowest rank."""
    longest: dict[str, RegionRow] = {}
    for row in regions:
        if row.region not in longest or row.region_ms > longest[row.region].region_ms:
            longest[row.region] = row
    return list(longest.values())


def regions_by_point(regions: Sequence[RegionRow]) -> dict[str, list[RegionRow]]:
    """Return the regions of each point on their slowest rank, by point_id.

    Args:
        regions: rows of one run. The last attempt that has regions counts.
    """
    last_attempts: dict[str, int] = {}
    for row in regions:
        last_attempts[row.point_id] = max(row.attempt, last_attempts.get(row.point_id, 0))
    last_rows: dict[str, list[RegionRow]] = {}
    for row in regions:
        if row.attempt == last_attempts[row.point_id]:
            last_rows.setdefault(row.point_id, []).append(row)
    return {point_id: slowest_regions(rows) for point_id, rows in last_rows.items()}


# If a step has more ranks, a report shows only rank 0, the quickest and the slowest rank.
MOST_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """How one rank spends a step."""

    rank: int
    # Work of the device; if `idle_ms` is None, all time without communication and waits.
    computes_ms: float
    # Time in which the device waits for its host; None on a CPU or if unknown.
    idle_ms: float | None
    # Time in which the rank waits for the slowest rank.
    waits_ms: float
    # Exposed communication, the same on all ranks; None if unknown.
    exposed_ms: float | None
    # The rest of the step, the same on all ranks; negative if instrumented steps were slower.
    unexplained_ms: float

    @property
    def local_step_ms(self) -> float:
        """The rank's step in ms, without waits for other ranks and communication."""
        return self.computes_ms + (self.idle_ms or 0.0)


def ranks_of_step(row: PointRow) -> tuple[RankStep, ...]:
    """Return the step of each rank with a share of the work, sorted by rank.

    Empty if a single rank works, or without a valid breakdown (`why_no_breakdown`).
    """
    local_ms, device_ms = row.local_step_ms_by_rank or (), row.device_ms_by_rank
    step_ms = step_of_parts(row)
    if len(local_ms) < 2 or step_ms is None or why_no_breakdown(row):
        return ()
    # Both lists of times omit ranks without a share; with equal shares every rank works.
    working = list(range(len(local_ms)))
    if row.share_by_rank:
        working = [rank for rank, items in enumerate(row.share_by_rank) if items]
    exposed_ms = row.comm_exposed_ms
    unexplained_ms = step_ms - max(local_ms) - (exposed_ms or 0.0)
    steps = []
    for index, (rank, rank_ms) in enumerate(zip(working, local_ms, strict=True)):
        # Work that was queued beforehand may appear longer than the whole step.
        computes_ms = min(device_ms[index], rank_ms) if device_ms else rank_ms
        step = RankStep(
            rank=rank,
            computes_ms=computes_ms,
            idle_ms=max(0.0, rank_ms - device_ms[index]) if device_ms else None,
            waits_ms=max(local_ms) - rank_ms,
            exposed_ms=exposed_ms,
            unexplained_ms=unexplained_ms,
        )
        steps.append(step)
    return tuple(steps)


def ranks_to_show(ranks: Sequence[RankStep]) -> list[RankStep]:
    """Return all ranks if they are at most MOST_RANKS, or else the first, quickest and slowest.

    Args:
        ranks: sorted by rank.
    """
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    quickest = min(ranks, key=lambda step: step.local_step_ms)
    slowest = max(ranks, key=lambda step: step.local_step_ms)
    chosen = {step.rank: step for step in (ranks[0], quickest, slowest)}
    return [chosen[rank] for rank in sorted(chosen)]
