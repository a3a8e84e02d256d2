"""What changed between two sides of runs, point by point, and whether that is more than chance.

A side is one run or several of the same thing. A run is one observation of a point: the geometric
mean over its rounds. Rounds of one run share its machine and its moment, so they make that mean
surer and add no observations: T. Kalibera, R. Jones, "Rigorous benchmarking in reasonable time",
ISMM 2013. How far runs of a side lie apart is estimated for each point by `raybench.stats.summary`,
the model that reports use for rounds. Where a side has one run, the verdict is `unclear`.

One figure of each point is tested and shown: its rate in samples/s, or in steps/s where a step
finishes no samples. The rate follows the mean step, because a stall now and then shows in the mean
alone. What may have changed it comes after: the facts of the runs, and parts and clocks of the
points; last the `history` of points over many runs. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.rounds import (
    ATTEMPT_COLUMNS,
    latest_trials,
    mean_of_rounds,
    without_controls,
)
from raybench.analysis.rows import EXECUTION
from raybench.conversion import MS_PER_S
from raybench.records.status import Status
from raybench.results.point_row import PointRow, step_of_parts, why_no_breakdown
from raybench.results.tables import Run
from raybench.stats.levels import find_steps
from raybench.stats.summary import Scatter, scatter

# Smaller changes are none.
THRESHOLD = 0.015
# Of comparisons in which nothing changed, the share that may call a point slower; as many may call
# one faster (Y. Benjamini, Y. Hochberg, J. R. Stat. Soc. B 57(1), 1995, over all points). The level
# is nominal: `benchmarks.simulations.gate` counts what becomes of it.
FALSE_VERDICTS = 0.0175
FASTER, SLOWER, SAME, UNCLEAR = "faster", "slower", "same", "unclear"
# With fewer runs a side nothing is known of how far runs lie apart.
LEAST_RUNS = 2


class Undecided(StrEnum):
    """Why a point of two sides is neither slower, faster nor the same."""

    # Sides that differ here are other experiments, not a change of the same one.
    OTHER_DEVICE = "other_device"
    OTHER_NODE_COUNT = "other_node_count"
    FEW_RUNS = "few_runs"
    # The change exceeds the threshold, but not what runs of the same thing may differ by.
    CHANCE = "chance"
    # The change is within the threshold, but its interval is not.
    WIDE = "wide"

    @property
    def is_obstacle(self) -> bool:
        """Whether the two sides cannot be compared at all, however many runs they have."""
        return self in (Undecided.OTHER_DEVICE, Undecided.OTHER_NODE_COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDecided:
    """Why a point has the verdict `unclear`. Fields of other kinds are empty."""

    kind: Undecided
    # OTHER_DEVICE: types or models; OTHER_NODE_COUNT: counts. The base's come first.
    values: tuple[str | int | None, ...] = ()
    # FEW_RUNS: the side with the fewest ok runs, "base" or "new", and how many it has.
    side: str = ""
    runs: int | None = None
    # WIDE: 90 % interval of the relative change.
    low: float | None = None
    high: float | None = None


_WORLD = {
    "device_type": Undecided.OTHER_DEVICE,
    "device_name": Undecided.OTHER_DEVICE,
    "node_count": Undecided.OTHER_NODE_COUNT,
}
_SETTINGS = (
    *("workload", "params", "scaling", *EXECUTION, "world_size"),
    *("batch_size", "global_batch_size", "grad_accumulation"),
)
# What `compare` needs of the table `points`.
POINT_COLUMNS = (
    *(*ATTEMPT_COLUMNS, *_SETTINGS, *_WORLD),
    *("step_ms_mean", "throughput"),
)
# The interval that lies within the threshold where a point is the same: two one-sided tests at 5 %
# (D. J. Schuirmann, J. Pharmacokinet. Biopharm. 15(6), 1987).
_DECIDING = 0.9
# The interval that reports show.
_SHOWN = 0.95


@dataclass(frozen=True, kw_only=True)
class ComparedPoint:
    """A point of two sides, with its settings. None: not known, or a side has no rate.

    status_base, status_new: over the rounds of the runs a failure if one failed, the worst; else ok
    if one is; None where no run has a row.
    base_failed, new_failed: the share of rounds that failed; 0 without a round.
    verdict: `slower`, else `faster`, where the rate changed by more than the threshold and q_value
    is at most FALSE_VERDICTS. `same` where the interval of the ratio lies within the threshold.
    `unclear` where neither holds; `why` has what is missing.
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
    base_runs: int
    new_runs: int
    # "samples/s", or "steps/s" where a run finishes no samples.
    unit: str
    # In `unit`: the geometric mean over the ok runs, which `base_runs` and `new_runs` count.
    base: float | None = None
    new: float | None = None
    # new / base: 0.94 means 6 % fewer samples/s.
    ratio: float | None = None
    # 90 % interval of `ratio`: each end is passed in 5 % of cases. It decides `same` and --blind.
    ratio_low: float | None = None
    ratio_high: float | None = None
    # 95 % interval of `ratio`, which reports show.
    interval_low: float | None = None
    interval_high: float | None = None
    # Such runs find a slowdown of this point alone by this share in 95 % of cases.
    least_seen: float | None = None
    # The smallest level at which `slower` or `faster` holds over all points.
    q_value: float | None = None
    verdict: str | None = None
    why: NotDecided | None = None

    @property
    def batch(self) -> int | None:
        """The batch size of a device, or of all devices in strong scaling."""
        return self.global_batch_size if self.scaling == "strong" else self.batch_size


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
        """Return the ok rows that have a mean step: a list of the base, one of the new side."""
        return [
            [row for row in side if row.status is Status.OK and row.step_ms_mean]
            for side in self.rows
        ]

    @cached_property
    def has_samples(self) -> bool:
        """Whether all steps finish samples; else both sides are compared by their steps."""
        return all(row.throughput for side in self.ok for row in side)

    @cached_property
    def logs(self) -> list[list[float]]:
        """Return the logarithms of the rates of the rows in `ok`."""

        def rate(row: PointRow) -> float:
            per_s = row.throughput if self.has_samples else None
            return per_s or MS_PER_S / (row.step_ms_mean or math.nan)

        return [[math.log(rate(row)) for row in side] for side in self.ok]

    @cached_property
    def obstacle(self) -> NotDecided | None:
        """Return why the runs of a point cannot be compared, or are too few; None if they can."""
        for column, kind in _WORLD.items():
            values = dict.fromkeys(getattr(row, column) for side in self.ok for row in side)
            if len(values) > 1:
                return NotDecided(kind=kind, values=tuple(values))
        runs, side = min((len(self.ok[0]), "base"), (len(self.ok[1]), "new"), key=lambda x: x[0])
        if runs >= LEAST_RUNS:
            return None
        return NotDecided(kind=Undecided.FEW_RUNS, side=side, runs=runs)

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
            unit="samples/s" if self.has_samples else "steps/s",
        )
        if not all(self.ok):
            return result
        base, new = (math.exp(np.mean(side)) for side in self.logs)
        measured = {"base": base, "new": new, "ratio": new / base}
        return replace(result, **measured | {"verdict": UNCLEAR, "why": self.obstacle} | found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """The test whether the rate of a point differs between the two sides."""

    point_id: str
    # Change of the logarithm of the rate; below 0 it is slower.
    size: float
    # Variance of `size` / variance of one run.
    share: float
    # How far runs lie apart.
    found: Scatter

    @property
    def ratio(self) -> float:
        """Return new / base."""
        return math.exp(self.size)

    def interval(self, level: float) -> tuple[float, float]:
        """Return the interval of `ratio` at a level, such as 0.95: (low, high)."""
        half = self.found.half_width(self.share, level)
        return math.exp(self.size - half), math.exp(self.size + half)

    def least_seen(self, threshold: float, tests: int) -> float:
        """Return the slowdown that such runs find in 95 % of cases if no other point changed."""
        # A verdict needs a change beyond both chance among so many tests and the threshold.
        beyond_chance = self.found.detectable(self.share, FALSE_VERDICTS / tests)
        half = self.found.half_width(self.share, _DECIDING)
        beyond_threshold = half - math.log1p(-threshold)
        return -math.expm1(-max(beyond_chance, beyond_threshold))


def _verdicts(pairs: Sequence[_Pair], threshold: float) -> dict[str, dict[str, Any]]:
    """Return point_id -> fields of a ComparedPoint, from all points with enough runs together."""
    from scipy.stats import false_discovery_control

    tests = _tests(pairs)
    if not tests:
        return {}
    slower, faster = (
        false_discovery_control(
            [test.found.p_value(sign * test.size, test.share) for test in tests]
        )
        for sign in (-1, 1)
    )
    verdicts = {}
    for test, *rates in zip(tests, slower.tolist(), faster.tolist(), strict=True):
        low, high = test.interval(_DECIDING)
        interval_low, interval_high = test.interval(_SHOWN)
        verdicts[test.point_id] = {
            **_verdict(test, rates, threshold),
            "ratio_low": low,
            "ratio_high": high,
            "interval_low": interval_low,
            "interval_high": interval_high,
            "least_seen": test.least_seen(threshold, len(tests)),
        }
    return verdicts


def _tests(pairs: Sequence[_Pair]) -> list[_Test]:
    """Return the test of each point that has a scatter between its runs."""
    if not pairs:
        return []
    runs = [
        [(number, row.run_id) for number, side in enumerate(pair.ok) for row in side]
        for pair in pairs
    ]
    starts = list(dict.fromkeys(chain(*runs)))
    values = np.full((len(pairs), len(starts)), math.nan)
    for place, (pair, of_point) in enumerate(zip(pairs, runs, strict=True)):
        values[place, [starts.index(run) for run in of_point]] = np.concatenate(pair.logs)
    sides = [number for number, _ in starts]
    return [
        _Test(
            point_id=pair.newest.point_id,
            size=float(np.mean(pair.logs[1]) - np.mean(pair.logs[0])),
            share=sum(1 / len(side) for side in pair.ok),
            found=found,
        )
        for pair, found in zip(pairs, scatter(values, sides), strict=True)
        if found is not None
    ]


def _verdict(test: _Test, rates: Sequence[float], threshold: float) -> dict[str, Any]:
    """Return verdict, q_value and why. rates: of false discoveries as slower, and as faster."""
    low, high = test.interval(_DECIDING)
    change = test.ratio - 1
    for verdict, sign, rate in ((SLOWER, -1, rates[0]), (FASTER, 1, rates[1])):
        if sign * change > threshold and rate <= FALSE_VERDICTS:
            return {"verdict": verdict, "q_value": rate, "why": None}
    if 1 - threshold <= low and high <= 1 + threshold:
        return {"verdict": SAME, "why": None}
    if abs(change) > threshold:
        why = NotDecided(kind=Undecided.CHANCE)
    else:
        why = NotDecided(kind=Undecided.WIDE, low=low - 1, high=high - 1)
    return {"verdict": UNCLEAR, "why": why}


class FactKind(StrEnum):
    """What a fact of a run is about, and so what its name means."""

    # Columns of the tables `runs` and `devices`.
    RUN = "run"
    DEVICE = "device"
    # Source files of the workload.
    CODE = "code"
    # Packages and libraries.
    VERSION = "version"
    # Environment variables.
    VARIABLE = "variable"


@dataclass(frozen=True, slots=True)
class Fact:
    """What may change the times of a run, such as a column of `devices` or a variable."""

    kind: FactKind
    name: str


NONE = "none"
_CODE = Fact(FactKind.RUN, "raybench_sha256")
# What tells devices of one model apart, what follows from which of them a run was given, and where
# the environment of Python was installed.
_NOT_LASTING = (
    *(Fact(FactKind.DEVICE, name) for name in ("uuid", "host", "nccl_path")),
    *(Fact(FactKind.VARIABLE, name) for name in ("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID")),
)
# Columns of `devices` that do not change from start to start by themselves.
_DEVICE_COLUMNS = (
    *("driver_version", "nccl_path", "power_cap_w", "sm_clock_max_mhz", "memory_clock_mhz"),
    *("topology", "pcie_link_max", "mig_mode", "persistence_mode", "memory_bytes", "cpu_count"),
    *("omp_num_threads", "niceness"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A fact that differs between two runs. base, new: its text in each; `none` where missing."""

    kind: FactKind
    name: str
    base: str
    new: str

    @property
    def fact(self) -> Fact:
        """The fact without its values."""
        return Fact(self.kind, self.name)


def facts(run: Run, devices: pd.DataFrame) -> dict[Fact, str]:
    """Return the text of each fact that may change the times: job, code, devices, variables.

    What is not known is left out. Where devices differ, the text lists their values, sorted, with
    commas. Hashes are cut to 12 digits.
    devices: the rows of the run in the table `devices`, as `reader.load` returns them.
    """
    models = sorted(Counter(devices["name"]).items())
    of_devices = {
        "name": ", ".join(f"{count} x {name}" for name, count in models) or NONE,
        # A point may use fewer of them.
        "node_id": str(devices["node_id"].nunique() or NONE),
        "host": _join(devices["host"]),
        # The UUID of a CPU worker names a process, which is another one in each run.
        "uuid": _join(devices.loc[devices["kind"] != "cpu", "uuid"]),
        **{column: _join(devices[column]) for column in _DEVICE_COLUMNS},
    }
    versions = _merge(run.versions, devices["versions"])
    found = {
        Fact(FactKind.RUN, "job_sha256"): run.job_sha256[:12],
        Fact(FactKind.RUN, "git_commit"): _short_commit(run.git_commit or NONE),
        # A file that only one of two runs has is not loaded by the other.
        **{Fact(FactKind.CODE, name): sha256[:12] for name, sha256 in run.workload_files.items()},
        _CODE: (run.raybench_sha256 or NONE)[:12],
        **{Fact(FactKind.DEVICE, column): text for column, text in of_devices.items()},
        **{Fact(FactKind.VERSION, name): text for name, text in versions.items()},
    }
    found = {fact: text for fact, text in found.items() if text != NONE}
    variables = _merge(run.environment, devices["environment"])
    for name, text in variables.items():
        # Quoted where it is set to `none`, as NCCL_NET_PLUGIN may be.
        found[Fact(FactKind.VARIABLE, name)] = repr(text) if text == NONE else text
    return found


def _short_commit(commit: str) -> str:
    """Cut the hash of a stored commit, which may end with `+changes`, to 12 digits."""
    sha, plus, changed = commit.partition("+")
    return sha[:12] + plus + changed


def lasting_changes(base: Mapping[Fact, str], new: Mapping[Fact, str]) -> tuple[Change, ...]:
    """Return `changes` without UUIDs, hosts, NCCL's file, CUDA_VISIBLE_DEVICES and NCCL_HOSTID."""
    return tuple(one for one in changes(base, new) if one.fact not in _NOT_LASTING)


def changes(base: Mapping[Fact, str], new: Mapping[Fact, str]) -> tuple[Change, ...]:
    """Return each fact that differs, also one that only one of the two runs has.

    base, new: as returned by `facts`. In the order of `base`; facts that only `new` has come last.
    A run without the fact has the text `NONE`. Source files count if both runs recorded their code.
    """
    is_code_known = _CODE in base and _CODE in new
    found = []
    for fact in dict.fromkeys([*base, *new]):
        before, now = base.get(fact, NONE), new.get(fact, NONE)
        is_of_code = fact == _CODE or fact.kind is FactKind.CODE
        if before != now and (is_code_known or not is_of_code):
            found.append(Change(kind=fact.kind, name=fact.name, base=before, new=now))
    return tuple(found)


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


_PARTS = (
    *("compute_ms", "optimizer_ms", "comm_exposed_ms", "unexplained_ms", "straggler_ms"),
    *("data_ms", "host_gap_ms"),
)
_STATES = ("throttled", "host_bound")
# A part is told where it explains at least this share of the change of the step.
_LEAST_SHARE = 0.25
# Clocks move by a few steps of 15 MHz from run to run.
_LEAST_CLOCK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChange:
    """A figure or a state of a point in two runs: a column of `points`. unit: empty for a bool."""

    column: str
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
    # The parts are of one round: what explains the change is held against the step of that round.
    step_ms = (step_of_parts(new) or math.nan) - (step_of_parts(base) or math.nan)
    is_broken_down = not (why_no_breakdown(base) or why_no_breakdown(new))
    parts = []
    for column in _PARTS:
        before, now = getattr(base, column), getattr(new, column)
        is_known = is_broken_down and before is not None and now is not None
        if is_known and step_ms and (now - before) / step_ms >= _LEAST_SHARE:
            parts.append(PointChange(column=column, base=before, new=now, unit="ms"))
    parts.sort(key=lambda part: -abs(part.new - part.base))
    states = [
        PointChange(column=column, base=before, new=now)
        for column in _STATES
        if (before := getattr(base, column)) is not None
        and (now := getattr(new, column)) is not None
        and before != now
    ]
    before, now = base.sm_clock_mhz_p50, new.sm_clock_mhz_p50
    if before and now and abs(now / before - 1) >= _LEAST_CLOCK:
        clock = PointChange(column="sm_clock_mhz_p50", base=before, new=now, unit="MHz")
        states.append(clock)
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


# The step time of a point over many runs, and where it changed its level.

# What `history`, and those that filter or show its rows, need of the table `points`.
HISTORY_COLUMNS = (
    *(*ATTEMPT_COLUMNS, *_SETTINGS, *_WORLD),
    *("env", "host_bound", "step_ms_p50", "step_ms_ci_low", "step_ms_ci_high"),
)
_TWO_SIDED_95 = 1.96


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
