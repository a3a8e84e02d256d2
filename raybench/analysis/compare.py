"""What changed between two sides of runs, point by point, and whether that is more than chance.

A side is one run or several of the same thing. A run is one observation of a point: the geometric
mean over its rounds. Rounds of one run share its machine and its moment, so they make that mean
surer and add no observations: T. Kalibera, R. Jones, "Rigorous benchmarking in reasonable time",
ISMM 2013. How far runs of a side lie apart is estimated for each point by `raybench.stats.summary`,
the model that reports use for rounds. Where a side has one run, the verdict is `unclear`.

Two figures of each point are tested: the median step, and the rate (samples/s), which follows the
mean step: a stall now and then shows in the mean alone. What may have changed it comes after: the
facts of the runs, and parts and clocks of the points; last the `history` of points over many runs.
Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raybench.analysis.rounds import (
    ATTEMPT_COLUMNS,
    latest_trials,
    mean_of_rounds,
    without_controls,
)
from raybench.analysis.rows import EXECUTION
from raybench.records import Status
from raybench.results.tables import PointRow, Run, why_no_breakdown
from raybench.stats.summary import Scatter, scatter

# Smaller changes of the step time are none.
THRESHOLD = 0.015
# At most this share of comparisons in which nothing changed calls a point slower, and as many call
# one faster (Y. Benjamini, Y. Hochberg, J. R. Stat. Soc. B 57(1), 1995, over all points).
FALSE_VERDICTS = 0.0175
FASTER, SLOWER, SAME, UNCLEAR = "faster", "slower", "same", "unclear"
# With fewer runs a side nothing is known of how far runs lie apart.
LEAST_RUNS = 2
# Sides that differ here are other experiments, not a change of the same one.
_WORLD = {"device_type": "device", "device_name": "device", "node_count": "nodes"}
_SETTINGS = (
    *("workload", "params", "scaling", *EXECUTION, "world_size"),
    *("batch_size", "global_batch_size", "grad_accumulation"),
)
# What `compare` needs of the table `points`.
POINT_COLUMNS = (
    *(*ATTEMPT_COLUMNS, *_SETTINGS, *_WORLD),
    *("step_ms_p50", "step_ms_mean", "throughput"),
)
# Of the 90 % interval, which lies within the threshold where a point is the same: two one-sided
# tests at 5 % (D. J. Schuirmann, J. Pharmacokinet. Biopharm. 15(6), 1987).
_INTERVAL = 0.9


@dataclass(frozen=True, kw_only=True)
class ComparedPoint:
    """A point of two sides, with its settings. None: not known, or a side has no time.

    status_base, status_new: over the rounds of the runs a failure if one failed, the worst; else ok
    if one is; None where no run has a row.
    base_failed, new_failed: the share of rounds that failed; 0 without a round.
    base_ms, new_ms: geometric mean of the median steps of the ok runs, which `base_runs` and
    `new_runs` count. ratio: new / base of these. rate_ratio: the same of samples/s, or of steps/s
    where a step finishes no samples (`rate_unit`), so 0.94 means 6 % fewer. *_low, *_high: their
    90 % intervals.
    least_seen: from this change on, of this point alone, either figure would have been called.
    q_value: the smallest level at which `slower` or `faster` holds over all points, else None.
    verdict: `slower`, else `faster`, where the step or the time for a sample changed by more than
    the threshold and q_value is at most FALSE_VERDICTS. `same` where the intervals of both lie
    within the threshold. `unclear` where neither holds; `why` says what is missing.
    """

    point_id: str
    workload: str
    params: Mapping[str, str]
    scaling: str | None
    precision: str
    cuda_graph: bool
    shares: str
    slow_ratio: float
    slow_count: int
    slow_by: str
    devices: str
    strategy: str
    world_size: int
    batch_size: int | None
    global_batch_size: int | None
    grad_accumulation: int | None
    status_base: Status | None
    status_new: Status | None
    base_failed: float
    new_failed: float
    base_ms: float | None = None
    new_ms: float | None = None
    base_runs: int
    new_runs: int
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    rate_ratio: float | None = None
    rate_ratio_low: float | None = None
    rate_ratio_high: float | None = None
    least_seen: float | None = None
    q_value: float | None = None
    rate_unit: str
    verdict: str | None = None
    why: str | None = None


def compare(
    base: Sequence[Sequence[PointRow]],
    new: Sequence[Sequence[PointRow]],
    *,
    threshold: float = THRESHOLD,
) -> list[ComparedPoint]:
    """Return each point of two sides with its verdict: those of `new`, then those only in `base`.

    Each in the order in which it first occurs. Controls are left out. `ComparedPoint` defines the
    verdicts: None where a side has no ok run, `unclear` where one has a single one, or where
    models of devices or numbers of nodes differ.
    base, new: for each run of the side, the newest last, its rows of the table `points`, with
    POINT_COLUMNS at least. threshold: a relative change up to this counts as none (0.015: 1.5 %).
    """
    sides = []
    for side in (base, new):
        rows: dict[str, list[PointRow]] = {}
        statuses: dict[str, list[Status]] = {}
        for points in side:
            for row in without_controls(latest_trials(points)):
                statuses.setdefault(row.point_id, []).append(row.status)
            for row in mean_of_rounds(points):
                rows.setdefault(row.point_id, []).append(row)
        sides.append((rows, statuses))
    pairs = [
        _Pair(
            rows=[rows.get(point_id, []) for rows, _ in sides],
            statuses=[statuses.get(point_id, []) for _, statuses in sides],
        )
        for point_id in dict.fromkeys((*sides[1][0], *sides[0][0]))
    ]
    verdicts = _verdicts([one for one in pairs if all(one.ok) and not one.obstacle], threshold)
    return [one.compared(**verdicts.get(one.newest.point_id, {})) for one in pairs]


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A point of two sides, the base first.

    rows: one a run that has it, its rounds as one. statuses: of the rounds of all runs.
    """

    rows: Sequence[Sequence[PointRow]]
    statuses: Sequence[Sequence[Status]]

    @property
    def newest(self) -> PointRow:
        return (self.rows[1] or self.rows[0])[-1]

    @cached_property
    def ok(self) -> list[list[PointRow]]:
        """Return the ok rows that have a step time: a list of the base, one of the new side."""
        return [
            [row for row in side if row.status is Status.OK and row.step_ms_p50]
            for side in self.rows
        ]

    @cached_property
    def has_samples(self) -> bool:
        """Whether all steps finish samples; else both sides are compared by their steps."""
        return all(row.throughput for side in self.ok for row in side)

    @cached_property
    def logs(self) -> dict[str, list[list[float]]]:
        """Return figure -> logarithms of the base, then of the new side, in the order of `ok`.

        ratio: of the median step in ms. rate_ratio: of the time for a sample, or of the mean step
        where a run finishes none; NaN where not known.
        """

        def rate(row: PointRow) -> float:
            per_s = row.throughput if self.has_samples else None
            return 1 / per_s if per_s else row.step_ms_mean or math.nan

        return {
            "ratio": [[math.log(row.step_ms_p50 or math.nan) for row in side] for side in self.ok],
            "rate_ratio": [[math.log(rate(row)) for row in side] for side in self.ok],
        }

    @cached_property
    def obstacle(self) -> str | None:
        """Return why the runs of a point cannot be compared, or are too few; None if they can."""
        for column, what in _WORLD.items():
            values = [getattr(row, column) for side in self.ok for row in side]
            if len(set(values)) > 1:
                names = dict.fromkeys("none" if value is None else str(value) for value in values)
                return f"other {what}: {', then '.join(names)}"
        runs, side = min((len(self.ok[0]), "base"), (len(self.ok[1]), "new"), key=lambda x: x[0])
        if runs >= LEAST_RUNS:
            return None
        return f"{runs} run of {side}, and a verdict needs {LEAST_RUNS}"

    def compared(self, **found: Any) -> ComparedPoint:
        """Return the point as a ComparedPoint, with the results of its tests.

        found: fields of ComparedPoint. Without any the verdict is `unclear` and `why` the obstacle;
        it is None where one side has not timed the point.
        """
        order = list(Status)  # the worst first
        worst = [min(found, key=order.index, default=None) for found in self.statuses]
        failed = [sum(s.is_failure for s in found) / max(1, len(found)) for found in self.statuses]
        result = ComparedPoint(
            point_id=self.newest.point_id,
            **{name: getattr(self.newest, name) for name in _SETTINGS},
            status_base=worst[0],
            status_new=worst[1],
            base_failed=failed[0],
            new_failed=failed[1],
            base_runs=len(self.ok[0]),
            new_runs=len(self.ok[1]),
            rate_unit="samples/s" if self.has_samples else "steps/s",
        )
        if not all(self.ok):
            return result
        base_ms, new_ms = (math.exp(np.mean(side)) for side in self.logs["ratio"])
        rate_ratio = math.exp(-_change(self.logs["rate_ratio"]))
        return replace(
            result,
            base_ms=base_ms,
            new_ms=new_ms,
            ratio=new_ms / base_ms,
            rate_ratio=None if math.isnan(rate_ratio) else rate_ratio,
            **{"verdict": UNCLEAR, "why": self.obstacle} | found,
        )


def _change(logs: Sequence[Sequence[float]]) -> float:
    return float(np.mean(logs[1]) - np.mean(logs[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """The test whether one figure of a point differs between the two sides.

    figure: `ratio` or `rate_ratio`. size: the change of the logarithm of its time, which is larger
    where it is slower. share: variance of the change over that of one run. found: how far runs lie
    apart. change, low, high: the relative change, and the ends of its interval.
    """

    point_id: str
    figure: str
    size: float
    share: float
    found: Scatter
    change: float
    low: float
    high: float


def _verdicts(pairs: Sequence[_Pair], threshold: float) -> dict[str, dict[str, Any]]:
    """Return point_id -> fields of a ComparedPoint, from all points with enough runs together."""
    from scipy.stats import false_discovery_control

    tests = [test for figure in ("ratio", "rate_ratio") for test in _tests(pairs, figure)]
    if not tests:
        return {}
    rates = [
        false_discovery_control(
            [test.found.p_value(sign * test.size, test.share) for test in tests]
        )
        for sign in (1, -1)
    ]
    of_point: dict[str, list[tuple[_Test, Sequence[float]]]] = {}
    for test, *both in zip(tests, *rates, strict=True):
        of_point.setdefault(test.point_id, []).append((test, [float(rate) for rate in both]))
    alone = 1 - 2 * FALSE_VERDICTS / len(tests)
    verdicts = {}
    for point_id, members in of_point.items():
        found = verdicts[point_id] = _verdict(members, threshold)
        reach = max(test.found.half_width(test.share, alone) for test, _ in members)
        found["least_seen"] = max(threshold, math.expm1(reach))
        for test, _ in members:
            low, high = 1 + test.low, 1 + test.high
            if test.figure == "rate_ratio":
                low, high = 1 / high, 1 / low
            found |= {f"{test.figure}_low": low, f"{test.figure}_high": high}
    return verdicts


def _tests(pairs: Sequence[_Pair], figure: str) -> Iterator[_Test]:
    """Yield the test of each point with the figure in all its runs, and a scatter of its starts."""
    known = [one for one in pairs if not np.isnan(np.concatenate(one.logs[figure])).any()]
    runs = [
        [(number, row.run_id) for number, side in enumerate(one.ok) for row in side]
        for one in known
    ]
    starts = list(dict.fromkeys(chain(*runs)))
    values = np.full((len(known), len(starts)), math.nan)
    for place, (one, of_point) in enumerate(zip(known, runs, strict=True)):
        columns = [starts.index(run) for run in of_point]
        values[place, columns] = np.concatenate(one.logs[figure])
    for one, found in zip(known, scatter(values, [number for number, _ in starts]), strict=True):
        if found is not None:
            size, share = _change(one.logs[figure]), sum(1 / len(side) for side in one.ok)
            half_width = found.half_width(share, _INTERVAL)
            yield _Test(
                point_id=one.newest.point_id,
                figure=figure,
                size=size,
                share=share,
                found=found,
                change=math.expm1(size),
                low=math.expm1(size - half_width),
                high=math.expm1(size + half_width),
            )


def _verdict(tests: Sequence[tuple[_Test, Sequence[float]]], threshold: float) -> dict[str, Any]:
    """Return the fields verdict, q_value and why of a point.

    tests: of the point, each with its rates of false discoveries as slower and as faster.
    """
    for place, (verdict, sign) in enumerate(((SLOWER, 1), (FASTER, -1))):
        rates = [rates[place] for test, rates in tests if sign * test.change > threshold]
        if rates and min(rates) <= FALSE_VERDICTS:
            return {"verdict": verdict, "q_value": min(rates), "why": None}
    low = min(test.low for test, _ in tests)
    high = max(test.high for test, _ in tests)
    if -threshold <= low and high <= threshold:
        return {"verdict": SAME, "why": None}
    if any(abs(test.change) > threshold for test, _ in tests):
        why = "runs of the same thing may differ as much"
    else:
        why = f"known to {low:+.1%} to {high:+.1%} only, which is not within the threshold"
    return {"verdict": UNCLEAR, "why": why}


NONE = "none"
_CODE = "code of raybench"
_UUIDS, _HOSTS = "device UUIDs", "hosts"
# What tells devices of one model apart, and what follows from which of them a run was given.
_OF_ALLOCATION = (_UUIDS, _HOSTS, "variable CUDA_VISIBLE_DEVICES", "variable NCCL_HOSTID")

# Column of `devices` -> what it is called. Not what changes from start to start by itself.
_DEVICE_FACTS = {
    "driver_version": "driver",
    "power_cap_w": "power cap W",
    "sm_clock_max_mhz": "highest SM clock MHz",
    "memory_clock_mhz": "memory clock MHz",
    "topology": "topology",
    "pcie_link_max": "PCIe link",
    "mig_mode": "MIG",
    "persistence_mode": "persistence mode",
    "memory_bytes": "memory bytes",
    "cpu_count": "CPU cores",
    "omp_num_threads": "OMP threads",
    "niceness": "niceness",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A fact that differs between two runs. base, new: its text in each; `none` where missing."""

    name: str
    base: str
    new: str


def facts(run: Run, devices: pd.DataFrame) -> dict[str, str]:
    """Return name -> text of what may change the times: job, code, versions, devices, variables.

    Names are such as `driver`, `code FILE` or `variable NAME`. What is not known is left out. Where
    devices differ, the text lists their values, sorted, with commas. Hashes are cut to 12 digits.
    devices: the rows of the run in the table `devices`, as `reader.load` returns them.
    """
    commit, plus, changed = (run.git_commit or NONE).partition("+")
    models = sorted(Counter(devices["name"]).items())
    found = {
        "job file": run.job_sha256[:12],
        "git commit": commit[:12] + plus + changed,
        # A file that only one of two runs has is not loaded by the other.
        **{f"code {name}": digest[:12] for name, digest in run.workload_files.items()},
        _CODE: (run.raybench_sha256 or NONE)[:12],
        "devices": ", ".join(f"{count} x {name}" for name, count in models) or NONE,
        # A point may use fewer of them.
        "nodes of the run": str(devices["node_id"].nunique() or NONE),
        _HOSTS: _join(devices["host"]),
        # Of a CPU worker it names a process, which is another one in each run.
        _UUIDS: _join(devices.loc[devices["kind"] != "cpu", "uuid"]),
    }
    found |= {name: _join(devices[column]) for column, name in _DEVICE_FACTS.items()}
    found |= _merge(run.versions, devices["versions"])
    found = {name: value for name, value in found.items() if value != NONE}
    variables = _merge(run.environment, devices["environment"]).items()
    # Quoted where it is set to `none`, as NCCL_NET_PLUGIN may be.
    return found | {f"variable {k}": repr(v) if v == NONE else v for k, v in variables}


def lasting_changes(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[Change, ...]:
    """Return `changes` without UUIDs, hosts, CUDA_VISIBLE_DEVICES and NCCL_HOSTID."""
    return tuple(one for one in changes(base, new) if one.name not in _OF_ALLOCATION)


def changes(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[Change, ...]:
    """Return each fact that differs, also one that only one of the two runs has.

    base, new: as returned by `facts`. In the order of `base`; facts that only `new` has come last.
    A run without the fact has the text `NONE`. Source files count if both runs recorded their code.
    """
    both_tell_of_code = _CODE in base and _CODE in new
    return tuple(
        Change(name=name, base=base.get(name, NONE), new=new.get(name, NONE))
        for name in dict.fromkeys([*base, *new])
        if base.get(name) != new.get(name) and (both_tell_of_code or not name.startswith("code "))
    )


def _merge(of_driver: Any, of_workers: pd.Series) -> dict[str, str]:
    """Return name -> text of the workers' versions or variables, and of those only the driver has.

    of_workers: a mapping or None for each. Values that differ stand beside each other, with commas.
    """
    seen: dict[str, list[Any]] = {}
    for one in of_workers:
        for name, value in dict(one or {}).items():
            seen.setdefault(name, []).append(value)
    return dict(of_driver) | {name: _join(values) for name, values in seen.items()}


def _join(values: Iterable[Any]) -> str:
    """Return the known values once each, sorted, with commas; `none` where none is known."""
    # An integer column with nulls holds floats.
    texts = (f"{v:.15g}" if isinstance(v, float) else str(v) for v in values if not pd.isna(v))
    return ", ".join(sorted(set(texts))) or NONE


_PARTS = {
    "compute_ms": "compute",
    "optimizer_ms": "optimizer",
    "comm_exposed_ms": "exposed communication",
    "straggler_ms": "one rank slower",
    "data_ms": "waiting for data",
    "host_gap_ms": "device idle",
}
_STATES = {"throttled": "throttled", "host_bound": "host-bound"}
# A part is told where it explains at least this share of the change of the step.
_LEAST_SHARE = 0.25
# Clocks move by a few steps of 15 MHz from run to run.
_LEAST_CLOCK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChange:
    """A figure or a state of a point in two runs. unit: empty for a bool."""

    name: str
    base: float | bool
    new: float | bool
    unit: str = ""


def point_changes(base: PointRow, new: PointRow) -> tuple[PointChange, ...]:
    """Return the parts of the step that explain a quarter of its change or more, then the states.

    Parts are in ms; those that changed most come first. There are none where a step is
    unknown or did not change, or a breakdown contradicts it (`why_no_breakdown`). States: throttled
    and host-bound (bool) if they differ, and the SM clock in MHz if it moved by 2 % or more. What
    one row lacks is left out. base, new: the same point in two runs.
    """
    step_ms = (new.step_ms_p50 or math.nan) - (base.step_ms_p50 or math.nan)
    is_broken_down = not (why_no_breakdown(base) or why_no_breakdown(new))
    parts = []
    for column, name in _PARTS.items():
        before, now = getattr(base, column), getattr(new, column)
        is_known = is_broken_down and before is not None and now is not None
        if is_known and step_ms and (now - before) / step_ms >= _LEAST_SHARE:
            parts.append(PointChange(name=name, base=before, new=now, unit="ms"))
    parts.sort(key=lambda part: -abs(part.new - part.base))
    states = [
        PointChange(name=name, base=before, new=now)
        for column, name in _STATES.items()
        if (before := getattr(base, column)) is not None
        and (now := getattr(new, column)) is not None
        and before != now
    ]
    before, now = base.sm_clock_mhz_p50, new.sm_clock_mhz_p50
    if before and now and abs(now / before - 1) >= _LEAST_CLOCK:
        states.append(PointChange(name="SM clock", base=before, new=now, unit="MHz"))
    return (*parts, *states)


def all_point_changes(
    base: Sequence[PointRow], new: Sequence[PointRow]
) -> dict[str, tuple[PointChange, ...]]:
    """Return point_id -> `point_changes` of the points ok in both runs; () if none is known.

    base, new: of one run each, as returned by `mean_of_rounds`. In the order of `new`.
    """
    of_base = {row.point_id: row for row in base if row.status is Status.OK}
    return {
        row.point_id: point_changes(of_base[row.point_id], row)
        for row in new
        if row.status is Status.OK and row.point_id in of_base
    }


# The step time of a point over many runs, and where it changed its level. A step is searched for by
# binary segmentation (A. J. Scott, M. Knott, "A cluster analysis method for grouping means in the
# analysis of variance", Biometrics 30(3), 1974): the place where the runs before and after differ
# most is a step if that is too much to be chance, and then either side is searched.

# The chance that a series without a step shows one.
FALSE_STEPS = 0.02
# What `history`, and those that filter or show its rows, need of the table `points`.
HISTORY_COLUMNS = (
    *(*ATTEMPT_COLUMNS, *_SETTINGS, *_WORLD),
    *("env", "host_bound", "step_ms_p50", "step_ms_ci_low", "step_ms_ci_high"),
)
# Below this, the differences of neighbours may be the step itself.
_MIN_RUNS = 5
# The efficiency of the median absolute deviation for normal noise, and its scale.
_EFFICIENCY = 0.37
_NORMAL = 1.4826
_TWO_SIDED_95 = 1.96
# Runs that agree to the last digit still differ by as much.
_LEAST_SD = 1e-6


@dataclass(frozen=True, kw_only=True)
class HistoryRow(PointRow):
    """A point of a run among those of other runs.

    machine: counts from 0, a number for each model and count of nodes. level_ms: geometric mean of
    the runs between two steps. step: relative change from the level before (`find_steps`), in the
    first run of a new level; None in the others, and in the first level of a machine.
    """

    machine: int
    level_ms: float
    step: float | None = None


def history(points: Sequence[PointRow], *, threshold: float = THRESHOLD) -> list[HistoryRow]:
    """Return a row for each ok point of each run, rounds as one, with the level of its step time.

    Rows without a step time are left out. Points are in the order in which they first occur, rows
    of a point by start. Each machine has levels of its own, but its rows are not kept apart.
    points: rows of the table `points` of any runs, with HISTORY_COLUMNS at least. threshold: as of
    `find_steps`, 0.015 for 1.5 %.
    """
    order = {name: place for place, name in enumerate(dict.fromkeys(p.point_id for p in points))}
    ok = [row for row in mean_of_rounds(points) if row.status is Status.OK and row.step_ms_p50]
    ok.sort(key=lambda row: (row.started_at, row.run_id))
    machines: dict[tuple[object, ...], int] = {}
    series: dict[tuple[str, int], list[PointRow]] = {}
    for row in ok:
        key = (row.device_type, row.device_name, row.node_count)
        machine = machines.setdefault(key, len(machines))
        series.setdefault((row.point_id, machine), []).append(row)
    found = []
    for (_, machine), rows in series.items():
        values = np.log([row.step_ms_p50 or math.nan for row in rows])
        spans = [
            row.step_ms_ci_high / row.step_ms_ci_low
            for row in rows
            if row.step_ms_ci_high and row.step_ms_ci_low
        ]
        within = math.log(float(np.median(spans))) / 2 / _TWO_SIDED_95 if spans else 0.0
        firsts = [0, *find_steps(values, within, threshold), len(values)]
        before: float | None = None
        for first, end in pairwise(firsts):
            level = float(values[first:end].mean())
            step = None if before is None else math.expm1(level - before)
            shared: dict[str, Any] = {"machine": machine, "level_ms": math.exp(level)}
            found.append(HistoryRow(**vars(rows[first]), **shared, step=step))
            found += [HistoryRow(**vars(row), **shared) for row in rows[first + 1 : end]]
            before = level
    return sorted(found, key=lambda row: (order[row.point_id], row.started_at, row.run_id))


def find_steps(values: NDArray[np.float64], within: float, threshold: float) -> list[int]:
    """Return the indices at which a new level begins, ascending; empty for fewer than five runs.

    Index 0 is never one. A step is larger than `threshold`, a relative change. It was larger than
    chance explains (FALSE_STEPS) when it was found; steps found later may make it smaller. values:
    logarithms of step times, one per run, in the order of time. within: standard deviation of a
    value by the samples of its run alone; 0 if not known.
    """
    from scipy.special import stdtr

    if len(values) < _MIN_RUNS:
        return []
    # Of the differences of neighbours, of which steps spoil few.
    seen = _NORMAL * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)
    sd, degrees = max(seen, within, _LEAST_SD), _EFFICIENCY * (len(values) - 1)
    found: list[int] = []
    open_ends = [(0, len(values))]
    while open_ends:
        first, end = open_ends.pop()
        if (count := end - first) < 2:
            continue
        before, sums = np.arange(1, count), np.cumsum(values[first:end])
        change = (sums[-1] - sums[:-1]) / (count - before) - sums[:-1] / before
        statistics = np.abs(change) / (sd * np.sqrt(1 / before + 1 / (count - before)))
        largest = int(statistics.argmax())
        # Bonferroni: any of the places could have been the largest.
        chance = 2 * float(stdtr(degrees, -statistics[largest])) * (count - 1)
        if abs(math.expm1(change[largest])) > threshold and chance <= FALSE_STEPS:
            place = first + largest + 1
            found.append(place)
            open_ends += [(first, place), (place, end)]
    found.sort()
    while found:
        sizes = np.abs(np.expm1(np.diff([part.mean() for part in np.split(values, found)])))
        if sizes.min() > threshold:
            break
        del found[int(sizes.argmin())]
    return found
