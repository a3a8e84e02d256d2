"""Many measurements of one point: its rounds as one row, its step by iteration, module and rank.

Pure.
"""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

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

# What tells the attempts of some runs apart, and what came of them.
ATTEMPT_COLUMNS = ("run_id", "point_id", "attempt", "round", "control_of", "status", "started_at")
# How the rounds of a point become one row: some columns by name, others by kind (`_BY_KIND`). The
# rest, as the times of an attempt, are those of the last round.
_OF_LAST = ("attempt", "started_at", "duration_s", "round", "error_rank")
_SUMS = ("iterations", "warmup_iterations", "energy_j")
# Their nulls count too.
_WITH_NULLS = ("inner_iterations", "slowest_rank")
# Taken from the rounds with a breakdown, which is the first: elsewhere ranks wait for each other,
# and take the same time. Of these rounds, only those with the shares of the last are joined.
_OF_BREAKDOWN = (
    *(*BREAKDOWN, "parts_step_ms", "host_bound", "slowest_rank", "share_by_rank"),
    *("wall_unsynced_ms_by_rank", "wall_synced_ms_by_rank"),
)
_BY_NAME: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    # Rounds on several models are compared with no other point.
    "device_name": lambda known: " and ".join(sorted(set(known))),
    "new_processes": all,
    # Null where rounds differ.
    "inner_iterations": lambda known: known[0] if len(set(known)) == 1 else None,
    "models_by_rank": lambda known: known[0] if len(set(known)) == 1 else None,
    # A round without a breakdown lacks the methods of the parts.
    "methods": lambda known: dict(ChainMap(*known)),
    "not_measured": lambda known: dict(ChainMap(*known)),
    "doubts": lambda known: worst_of_each(chain(*known)),
    # None stands out in most of the rounds: then none does.
    "slowest_rank": lambda known: Counter(known).most_common(1)[0][0],
    "step_ms_min": min,
    "step_ms_max": max,
    # What is loaded by the first process of a host has no other that is alike.
    "first_step_ms": median,
    "compiled_step_ms": median,
    # The interval holds over the rounds, so one unsteady round of many spoils little.
    "stable": lambda known: 2 * sum(known) >= len(known),
}
# A control that moved by more than this is a drift of the machine, and no noise of the step time.
LARGEST_DRIFT = 0.01


def latest_trials(points: Iterable[PointRow]) -> list[PointRow]:
    """Return each run's last attempt at each trial (`TrialKey`), in order of the first attempts."""
    latest: dict[tuple[Any, ...], PointRow] = {}
    for row in points:
        trial = (row.run_id, row.point_id, row.round, row.control_of)
        if trial not in latest or row.attempt >= latest[trial].attempt:
            latest[trial] = row
    return list(latest.values())


def without_controls(trials: Iterable[PointRow]) -> list[PointRow]:
    """Return the rows that are no control (`control_of` is None), in their order."""
    return [row for row in trials if row.control_of is None]


def mean_of_rounds(points: Iterable[PointRow]) -> list[PointRow]:
    """Return one row for each point of each run: its last attempt, or the mean of its rounds.

    Step times and rates are geometric means over the ok rounds; arithmetic by rank, and if
    one is 0 or less. Parts of the step are means of only the rounds that have a breakdown with the
    same shares as the last, and parts_step_ms is the step of those rounds. step_ms_min and
    step_ms_max are extremes, cold steps medians, counts of samples and energy sums, memory the
    largest. Number, start and duration are the last ok round's. `throttled` is true if one round
    was, `stable` if half were. Doubts of ok rounds are kept; any other round adds one. Without an
    ok round: the worst row (by `Status`).
    The interval is of the samples alone. points: all attempts in table order, controls are ignored.
    """
    by_point: dict[tuple[str, str], list[PointRow]] = {}
    for row in without_controls(latest_trials(points)):
        by_point.setdefault((row.run_id, row.point_id), []).append(row)
    return [rows[0] if len(rows) == 1 else _merge(rows) for rows in by_point.values()]


def _merge(rows: Sequence[PointRow]) -> PointRow:
    """Return one row for several rounds of a point: their mean; of none that is ok the worst."""
    ok = [row for row in rows if row.status is Status.OK]
    if not ok:
        worst_first = list(Status)
        return min(rows, key=lambda row: worst_first.index(row.status))
    taken_apart = [row for row in ok if row.local_step_ms_by_rank] or ok
    shares = taken_apart[-1].share_by_rank
    taken_apart = [row for row in taken_apart if row.share_by_rank == shares]
    values: dict[str, Any] = {}
    for column in columns_of(PointRow):
        of_rounds = taken_apart if column.name in _OF_BREAKDOWN else ok
        values[column.name] = _as_one(column, [getattr(row, column.name) for row in of_rounds])
    merged = PointRow(**values)
    if len(ok) > 1:
        # The interval of the samples: of independent rounds, squares add up.
        steps_ms = [(row.step_ms_p50, row.step_ms_ci_low, row.step_ms_ci_high) for row in ok]
        low_ms, high_ms = None, None
        if merged.step_ms_p50 and all(map(all, steps_ms)):
            step, low, high = np.log(np.array(steps_ms, np.float64)).T
            low_ms = merged.step_ms_p50 * math.exp(-math.hypot(*(step - low)) / len(ok))
            high_ms = merged.step_ms_p50 * math.exp(math.hypot(*(high - step)) / len(ok))
        merged = replace(merged, step_ms_ci_low=low_ms, step_ms_ci_high=high_ms)
    failures = (
        Doubt(
            kind=DoubtKind.ROUND_FAILED,
            value=row.round or 1,
            subject=f"{row.status}: {row.error_message or 'no reason known'}",
        )
        for row in rows
        if row.status is not Status.OK
    )
    doubts = (*(merged.doubts or ()), *failures)
    is_known = all(row.doubts is not None for row in ok)
    return replace(merged, doubts=doubts if doubts or is_known else None)


def _as_one(column: TableColumn, values: Sequence[Any]) -> Any:
    """Return one value for a column's values in several rounds that are ok; None where none is.

    A sum is known only where all its values are.
    """
    name, kind = column.name, column.kind
    if name in _OF_LAST:
        return values[-1]
    known = [value for value in values if value is not None or name in _WITH_NULLS]
    if not known:
        return None
    if name in _SUMS:
        return sum(known) if len(known) == len(values) else None
    if kind == "int64" and name.endswith("_bytes"):
        return max(known)
    combine = _BY_NAME.get(name) or _BY_KIND.get(kind)
    return combine(known) if combine else known[-1]


def _mean(known: Sequence[float]) -> float:
    """Return the geometric mean, for rates and times alike; arithmetic if a value is 0 or less."""
    return math.exp(fmean(map(math.log, known))) if min(known) > 0 else fmean(known)


def _mean_by_rank(known: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    means = np.array(known, np.float64).mean(axis=0).tolist()
    return tuple(None if mean != mean else mean for mean in means)


def _mean_by_name(known: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for value in known for name in value)
    return {name: _mean([value[name] for value in known if name in value]) for name in names}


_BY_KIND: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "bool": any,
    "int64": lambda known: round(median(known)),
    "double": _mean,
    "list<double>": _mean_by_rank,
    "list<string>": lambda known: tuple(dict.fromkeys(chain(*known))),
    "map<string,double>": _mean_by_name,
}


class Trials:
    """The ok trials of some runs, by point and round, and their controls.

    points: rows of that table; of several attempts at a trial the last one counts.
    """

    def __init__(self, points: Iterable[PointRow]) -> None:
        self._rounds: dict[tuple[str, str], dict[int, PointRow]] = {}
        self._controls: dict[tuple[str, int, int], PointRow] = {}
        for row in latest_trials(points):
            number = row.round or 1
            if row.status is not Status.OK:
                continue
            if row.control_of is None:
                self._rounds.setdefault((row.run_id, row.point_id), {})[number] = row
            else:
                self._controls[row.run_id, number, row.control_of] = row

    def rounds(self, row: PointRow) -> Mapping[int, PointRow]:
        """Return round -> ok row of the point of `row`, rounds from 1; empty if none is ok."""
        return self._rounds.get((row.run_id, row.point_id), {})

    def logs(self, row: PointRow, value: Callable[[PointRow], float | None]) -> dict[int, float]:
        """Return round -> ln(value of that round); empty unless all rounds have one above 0."""
        values = {number: value(one) or 0.0 for number, one in self.rounds(row).items()}
        if min(values.values(), default=0.0) <= 0:
            return {}
        return {number: math.log(one) for number, one in values.items()}

    def log_ratios(self, base: PointRow, row: PointRow) -> dict[int, float]:
        """Return round -> ln(throughput of row / that of base), for rounds in which both have one.

        A drift of the machine between the two trials, which the controls show, is removed. Only the
        run and point ids of base and row are used.
        """
        of_base, found = self.rounds(base), {}
        for number, one in self.rounds(row).items():
            first = of_base.get(number)
            if first is not None and one.throughput and first.throughput:
                rate = self._drift_rates.get((one.run_id, number), 0.0)
                drift = rate * (_timed_at_s(one) - _timed_at_s(first))
                found[number] = math.log(one.throughput / first.throughput) + drift
        return found

    @cached_property
    def _drift_rates(self) -> dict[tuple[str, int], float]:
        """Return (run, round) -> growth of ln(step) per second, by the controls of that round."""
        by_run: dict[str, dict[int, _Line]] = {}
        for (run_id, number), trials in self._control_trials().items():
            if (line := _line_through(trials)) is not None:
                by_run.setdefault(run_id, {})[number] = line
        rates: dict[tuple[str, int], float] = {}
        for run_id, lines in by_run.items():
            # A slope that is noise would add noise to speed-ups. Shrink the slopes of a run by
            # 1 - 1/F, the share of their variance that noise does not explain (empirical Bayes).
            freedom = sum(line.freedom for line in lines.values())
            noise = sum(line.residual for line in lines.values()) / freedom if freedom else math.inf
            signal = fmean(line.explained for line in lines.values())
            share = max(0.0, 1 - noise / signal) if signal else 0.0
            rates |= {(run_id, number): share * line.slope for number, line in lines.items()}
        return rates

    def _control_trials(self) -> dict[tuple[str, int], list[PointRow]]:
        """Return (run, round) -> its controls, and the trial of their point in that round."""
        found: dict[tuple[str, int], list[PointRow]] = {}
        for (run_id, number, _), control in self._controls.items():
            first = self.rounds(control).get(number)
            known = found.setdefault((run_id, number), [] if first is None else [first])
            known.append(control)
        return found

    def drifts(self) -> Iterator[tuple[int, int, float]]:
        """Yield (round, block, relative change of the step time) of each control that moved.

        It moved if its step differs from that of its point in this round by more than LARGEST_DRIFT
        and than half their intervals, added in quadrature. Above 0: slower. block: its world_size.
        """
        for (_, number, block), control in self._controls.items():
            first = self.rounds(control).get(number)
            if first is None or not first.step_ms_p50 or not control.step_ms_p50:
                continue
            drift = math.log(control.step_ms_p50 / first.step_ms_p50)
            unsure = math.hypot(half_interval(first) or 0.0, half_interval(control) or 0.0)
            if abs(drift) > max(LARGEST_DRIFT, unsure):
                yield number, block, math.expm1(drift)


def _timed_at_s(row: PointRow) -> float:
    """Return the middle of the time after the set-up and the heating of an attempt."""
    before_s = (row.setup_s or 0.0) + (row.heated_s or 0.0)
    return row.started_at.timestamp() + (before_s + (row.duration_s or 0.0)) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A least-squares line of ln(step) over the time in seconds, with its sums of squares."""

    slope: float
    explained: float
    residual: float
    # Trials beyond the two that any line fits.
    freedom: int


def _line_through(trials: Sequence[PointRow]) -> _Line | None:
    """Fit a line to the steps of some trials; None for fewer than two different times."""
    known = [(_timed_at_s(row), math.log(row.step_ms_p50)) for row in trials if row.step_ms_p50]
    times_s, logs = np.array(known, np.float64).reshape(-1, 2).T
    if len(known) < 2 or not np.ptp(times_s):
        return None
    times_s, logs = times_s - times_s.mean(), logs - logs.mean()
    spread = float(times_s @ times_s)
    slope = float(times_s @ logs) / spread
    residuals = logs - slope * times_s
    return _Line(
        slope=slope,
        explained=slope**2 * spread,
        residual=float(residuals @ residuals),
        freedom=len(known) - 2,
    )


# What `rank_by_iteration` needs of the table `samples`.
SAMPLE_COLUMNS = ("repeat", "rank", "iteration", "is_warmup", "step_ns")


def join_rounds(rounds: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the samples of all rounds of a point in one frame; `repeat` counts on over the rounds.

    rounds: rows of the table `samples`, one frame per round. Raises ValueError for no rounds.
    """
    import pandas as pd

    joined: list[pd.DataFrame] = []
    repeats = 0
    for samples in rounds:
        joined.append(samples.assign(repeat=samples["repeat"] + repeats))
        repeats = joined[-1]["repeat"].max() + 1 if len(samples) else repeats
    return pd.concat(joined, ignore_index=True)


def rank_by_iteration(samples: pd.DataFrame, columns: int) -> tuple[pd.DataFrame, float]:
    """Return timed samples of a point in ms, ranks by iterations; and the median of all of them.

    samples: rows of that table of one attempt, or of several by `join_rounds` (else it takes means
    of them); warm-up is left out. Empty and NaN without any; NaN if a rank lacks an iteration. Of
    more than `columns` (1 or more) iterations, a column stands for several in a row: per rank the
    time farthest from the median, under the index of the first, from 0 over all repeats.
    """
    import pandas as pd

    timed = samples[~samples["is_warmup"].astype(bool)]
    wide = timed.pivot_table(index="rank", columns=["repeat", "iteration"], values="step_ns")
    times_ms = wide.to_numpy(np.float64) / NS_PER_MS
    if not times_ms.size:
        return pd.DataFrame(), math.nan
    middle = float(np.nanmedian(times_ms))
    firsts = np.unique(np.linspace(0, times_ms.shape[1], columns, endpoint=False).astype(int))
    farthest = []
    for part in np.split(times_ms, firsts[1:], axis=1):
        distances = np.nan_to_num(np.abs(part - middle), nan=-1.0)
        places = distances.argmax(axis=1)[:, np.newaxis]
        farthest.append(np.take_along_axis(part, places, axis=1))
    return pd.DataFrame(np.hstack(farthest), index=wide.index, columns=firsts), middle


def rank_steps(samples: pd.DataFrame) -> pd.DataFrame:
    """Return one row per rank: rank, iterations, median_ms, min_ms, max_ms, data_ms.

    Of timed samples alone, sorted by rank; no rows without any. iterations: their number. data_ms:
    median wait for the next batch; NaN where steps take none. samples: of one attempt or several.
    """
    timed = samples[~samples["is_warmup"].astype(bool)]
    found = timed.groupby("rank").agg(
        iterations=("step_ns", "count"),
        median_ms=("step_ns", "median"),
        min_ms=("step_ns", "min"),
        max_ms=("step_ns", "max"),
        data_ms=("data_ns", "median"),
    )
    times = found.columns[1:]
    found[times] = found[times].astype("float64") / NS_PER_MS
    return found.reset_index()


def slowest_modules(modules: pd.DataFrame) -> pd.DataFrame:
    """Return one row per module: module, kind, calls, forward_ms, backward_ms.

    Each number is the largest of any rank; backward_ms is null without a backward pass. The
    module with the longest forward and backward time comes first. modules: rows of the table
    `modules` of one attempt at one point.
    """
    by_module = modules.groupby(["module", "kind"], sort=False)
    longest = by_module[["calls", "forward_ms", "backward_ms"]].max().reset_index()
    total = longest["forward_ms"] + longest["backward_ms"].fillna(0.0)
    order = total.sort_values(ascending=False, kind="stable").index
    return longest.loc[order].reset_index(drop=True)


def slowest_regions(regions: Iterable[RegionRow]) -> list[RegionRow]:
    """Return one row per region: that of the rank with the largest `region_ms`.

    In the order in which the regions first occur. regions: the rows of one attempt at one point.
    """
    longest: dict[str, RegionRow] = {}
    for one in regions:
        if one.region not in longest or one.region_ms > longest[one.region].region_ms:
            longest[one.region] = one
    return list(longest.values())


def regions_by_point(regions: Sequence[RegionRow]) -> dict[str, list[RegionRow]]:
    """Return point_id -> the regions of its last attempt with any, as from `slowest_regions`.

    regions: all rows of one run. A point without regions is left out.
    """
    last: dict[str, list[RegionRow]] = {}
    for one in sorted(regions, key=lambda one: one.attempt):
        before = last.get(one.point_id, [])
        is_newer = bool(before) and before[0].attempt < one.attempt
        last[one.point_id] = [one] if is_newer else [*before, one]
    return {point_id: slowest_regions(rows) for point_id, rows in last.items()}


# Of more ranks those that tell most are shown: rank 0, the quickest and the slowest.
MOST_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's part of a step, in ms.

    computes_ms: its device works; if idle_ms is None, its whole own step. idle_ms: its device waits
    for its host; None on a CPU or if unknown. waits_ms: for the slowest rank. exposed_ms: exposed
    communication, None if unknown. unexplained_ms: the rest of the step; below 0 if instrumented
    steps were slower. The last two are the same on all ranks.
    """

    rank: int
    computes_ms: float
    idle_ms: float | None
    waits_ms: float
    exposed_ms: float | None
    unexplained_ms: float

    @property
    def own_ms(self) -> float:
        """Return the ms of the rank's step without waits for ranks and communication."""
        return self.computes_ms + (self.idle_ms or 0.0)


def ranks_of_step(row: PointRow) -> tuple[RankStep, ...]:
    """Return the step of each rank of a point, by rank; a rank without a share is left out.

    Empty if one rank alone works, and without a breakdown that may be shown (`why_no_breakdown`).
    """
    own, device = row.local_step_ms_by_rank or (), row.device_ms_by_rank
    step_ms = step_of_parts(row)
    if len(own) < 2 or step_ms is None or why_no_breakdown(row):
        return ()
    shares = row.share_by_rank or own
    working = [rank for rank, share in enumerate(shares) if share]
    exposed_ms = row.comm_exposed_ms
    unexplained_ms = step_ms - max(own) - (exposed_ms or 0.0)
    return tuple(
        RankStep(
            rank=rank,
            # Queued beforehand, the device's work may come out longer than the whole step.
            computes_ms=min(device[place], own_ms) if device else own_ms,
            idle_ms=max(0.0, own_ms - device[place]) if device else None,
            waits_ms=max(own) - own_ms,
            exposed_ms=exposed_ms,
            unexplained_ms=unexplained_ms,
        )
        for place, (rank, own_ms) in enumerate(zip(working, own, strict=True))
    )


def ranks_to_show(ranks: Sequence[RankStep]) -> list[RankStep]:
    """Return all of up to MOST_RANKS ranks; of more the first, quickest and slowest by `own_ms`.

    ranks: sorted by rank, as is the result. Each comes once, so all equally quick give one.
    """
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    quickest, slowest = (pick(ranks, key=lambda one: one.own_ms) for pick in (min, max))
    chosen = {one.rank: one for one in (ranks[0], quickest, slowest)}
    return [chosen[rank] for rank in sorted(chosen)]
