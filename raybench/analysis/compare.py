"""What changed between two sides of runs, point by point, and whether chance explains the change.

A side is one or several runs of the same thing. A run is one observation of a point: the geometric
mean over its rounds. Rounds of a run share machine and time, so they do not count as observations
(T. Kalibera, R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013). The scatter between
runs of a side is estimated by `raybench.stats.summary`. With a single run on a side, the verdict is
`unclear`.

Points are compared by their rate in samples/s, or in steps/s if their steps finish no samples. The
rate follows the mean step, because occasional stalls do not show in the median.

Below the comparison: facts of runs that may explain a change, parts and clocks of points, and the
`history` of points over many runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
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
from raybench.stats.levels import find_level_starts
from raybench.stats.summary import Scatter, scatter

# Smaller relative changes are ignored.
THRESHOLD = 0.015
# Share of comparisons without any change that may call a point slower; the same share may call a
# point faster (Y. Benjamini, Y. Hochberg, J. R. Stat. Soc. B 57(1), 1995, over all points).
# `benchmarks.simulations.gate` measures the actual share.
FALSE_VERDICTS = 0.0175
FASTER, SLOWER, SAME, UNCLEAR = "faster", "slower", "same", "unclear"
# With fewer runs a side, the scatter between runs is unknown.
LEAST_RUNS = 2


class Undecided(StrEnum):
    """Why a point of two sides is neither slower, faster nor the same."""

    # The sides are two different experiments.
    OTHER_DEVICE = "other_device"
    OTHER_NODE_COUNT = "other_node_count"
    FEW_RUNS = "few_runs"
    # The change exceeds the threshold, but runs of the same thing may differ so much.
    CHANCE = "chance"
    # The change is within the threshold, but its interval is not.
    WIDE = "wide"

    @property
    def is_obstacle(self) -> bool:
        """Whether no number of runs makes the sides comparable."""
        return self in (Undecided.OTHER_DEVICE, Undecided.OTHER_NODE_COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDecided:
    """Why a point has the verdict `unclear`. Fields of other kinds are empty."""

    kind: Undecided
    # OTHER_DEVICE: types or models; OTHER_NODE_COUNT: counts; values of the base first.
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
# Columns of `points` that `compare` needs.
POINT_COLUMNS = (
    *(*ATTEMPT_COLUMNS, *_SETTINGS, *_WORLD),
    *("step_ms_mean", "throughput"),
)
# Level of the interval that decides `same`: two one-sided tests at 5 % (D. J. Schuirmann,
# J. Pharmacokinet. Biopharm. 15(6), 1987).
_DECIDING = 0.9
# Level of the interval that reports show.
_SHOWN = 0.95


@dataclass(frozen=True, kw_only=True)
class ComparedPoint:
    """A point of two sides, with its settings. Fields are None if unknown.

    The verdict is `slower` or `faster` if the rate changed by more than the threshold and q_value
    is at most FALSE_VERDICTS. It is `same` if the 90 % interval of the ratio lies within the
    threshold, else `unclear`; `why` has the reason. It is None if a side has no ok run.
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
    # The worst failure of a round, else ok if a round is ok; None if no run has a row.
    status_base: Status | None
    status_new: Status | None
    # Share of rounds that failed.
    base_failed: float
    new_failed: float
    # Number of ok runs.
    base_runs: int
    new_runs: int
    # "samples/s", or "steps/s" if a run finishes no samples.
    unit: str
    # Geometric mean over the ok runs, in `unit`.
    base: float | None = None
    new: float | None = None
    # new / base: 0.94 means 6 % fewer samples/s.
    ratio: float | None = None
    # 90 % interval of `ratio`, which decides `same` and --blind.
    ratio_low: float | None = None
    ratio_high: float | None = None
    # 95 % interval of `ratio`, which reports show.
    interval_low: float | None = None
    interval_high: float | None = None
    # The slowdown that these runs detect in 95 % of cases, if this point alone changed.
    least_seen: float | None = None
    # The smallest level at which `slower` or `faster` holds over all points.
    q_value: float | None = None
    verdict: str | None = None
    why: NotDecided | None = None

    @property
    def batch(self) -> int | None:
        """The batch size of a device; in strong scaling, of all devices."""
        return self.global_batch_size if self.scaling == "strong" else self.batch_size


def compare(
    base: Sequence[Sequence[PointRow]],
    new: Sequence[Sequence[PointRow]],
    *,
    threshold: float = THRESHOLD,
) -> list[ComparedPoint]:
    """Return each point of two sides with its verdict.

    Points of `new` come first, then points that only `base` has. Controls are left out.

    Args:
        base: for each run of this side, its rows of the table `points`; the newest run is last.
            Rows need POINT_COLUMNS.
        new: the other side, as `base`.
        threshold: smaller relative changes are ignored; 0.015 means 1.5 %.
    """
    rows_base, statuses_base = _rows_and_statuses(base)
    rows_new, statuses_new = _rows_and_statuses(new)
    pairs = []
    for point_id in dict.fromkeys((*rows_new, *rows_base)):
        pair = _Pair(
            rows=[rows_base.get(point_id, []), rows_new.get(point_id, [])],
            statuses=[statuses_base.get(point_id, []), statuses_new.get(point_id, [])],
        )
        pairs.append(pair)
    comparable = [pair for pair in pairs if all(pair.ok) and not pair.obstacle]
    verdicts = _verdicts(comparable, threshold)
    return [pair.compared(**verdicts.get(pair.newest.point_id, {})) for pair in pairs]


def _rows_and_statuses(
    side: Sequence[Sequence[PointRow]],
) -> tuple[dict[str, list[PointRow]], dict[str, list[Status]]]:
    """Return point_id -> a row for each run (the mean of its rounds), and -> all statuses."""
    rows: dict[str, list[PointRow]] = {}
    statuses: dict[str, list[Status]] = {}
    for points in side:
        for row in without_controls(latest_trials(points)):
            statuses.setdefault(row.point_id, []).append(row.status)
        for row in mean_of_rounds(points):
            rows.setdefault(row.point_id, []).append(row)
    return rows, statuses


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A point of two sides, the base first."""

    # For each side, a row for each run that has the point: the mean of its rounds.
    rows: Sequence[Sequence[PointRow]]
    # For each side, the statuses of the rounds of all runs.
    statuses: Sequence[Sequence[Status]]

    @property
    def newest(self) -> PointRow:
        """The row of the newest run, for settings; a point may be on one side only."""
        return (self.rows[1] or self.rows[0])[-1]

    @cached_property
    def ok(self) -> list[list[PointRow]]:
        """The ok rows with a mean step: a list for the base, a list for the new side."""
        sides = []
        for side in self.rows:
            sides.append([row for row in side if row.status is Status.OK and row.step_ms_mean])
        return sides

    @cached_property
    def has_samples(self) -> bool:
        """Whether samples/s are compared; otherwise steps/s are."""
        return all(row.throughput for side in self.ok for row in side)

    @cached_property
    def logs(self) -> list[list[float]]:
        """The logarithms of the rates of the rows in `ok`."""
        sides = []
        for side in self.ok:
            sides.append([math.log(self._rate(row)) for row in side])
        return sides

    def _rate(self, row: PointRow) -> float:
        """Return samples/s, or steps/s if a row has no samples."""
        per_s = row.throughput if self.has_samples else None
        return per_s or MS_PER_S / (row.step_ms_mean or math.nan)

    @cached_property
    def obstacle(self) -> NotDecided | None:
        """Why the runs of the point cannot be compared, or are too few."""
        for column, kind in _WORLD.items():
            values = dict.fromkeys(getattr(row, column) for side in self.ok for row in side)
            if len(values) > 1:
                return NotDecided(kind=kind, values=tuple(values))
        counts = ((len(self.ok[0]), "base"), (len(self.ok[1]), "new"))
        runs, side = min(counts, key=lambda count: count[0])
        if runs >= LEAST_RUNS:
            return None
        return NotDecided(kind=Undecided.FEW_RUNS, side=side, runs=runs)

    def compared(self, **results: Any) -> ComparedPoint:
        """Return the compared point.

        Args:
            results: fields that follow from the test of the point; none if it was not tested.
        """
        worst_first = list(Status)
        worst, failed = [], []
        for statuses in self.statuses:
            worst.append(min(statuses, key=worst_first.index, default=None))
            failures = [status for status in statuses if status.is_failure]
            failed.append(len(failures) / max(1, len(statuses)))
        point = ComparedPoint(
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
            return point
        base, new = (math.exp(np.mean(side)) for side in self.logs)
        rates = {"base": base, "new": new, "ratio": new / base}
        # Fields of the test override these two.
        untested = {"verdict": UNCLEAR, "why": self.obstacle}
        return replace(point, **rates | untested | results)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """The test whether the rate of a point differs between the two sides."""

    point_id: str
    # Change of the logarithm of the rate; negative if the new side is slower.
    size: float
    # Variance of `size` / variance of one run: 1/n + 1/m for n and m runs.
    share: float
    # How far runs lie apart.
    scatter: Scatter

    @property
    def ratio(self) -> float:
        """The ratio new / base."""
        return math.exp(self.size)

    def interval(self, level: float) -> tuple[float, float]:
        """Return the interval of `ratio` at a level, such as 0.95: (low, high)."""
        half = self.scatter.half_width(self.share, level)
        return math.exp(self.size - half), math.exp(self.size + half)

    def least_seen(self, threshold: float, tests: int) -> float:
        """Return the slowdown that these runs detect in 95 % of cases if no other point changed.

        Args:
            tests: number of points that are tested together.
        """
        # A verdict needs a change beyond the threshold, and beyond chance among all tests.
        beyond_chance = self.scatter.detectable(self.share, FALSE_VERDICTS / tests)
        half = self.scatter.half_width(self.share, _DECIDING)
        beyond_threshold = half - math.log1p(-threshold)
        return -math.expm1(-max(beyond_chance, beyond_threshold))


def _verdicts(pairs: Sequence[_Pair], threshold: float) -> dict[str, dict[str, Any]]:
    """Return point_id -> fields of ComparedPoint, by tests of all points together."""
    from scipy.stats import false_discovery_control

    tests = _tests(pairs)
    if not tests:
        return {}
    p_slower = [test.scatter.p_value(-test.size, test.share) for test in tests]
    p_faster = [test.scatter.p_value(test.size, test.share) for test in tests]
    slower = false_discovery_control(p_slower).tolist()
    faster = false_discovery_control(p_faster).tolist()
    verdicts = {}
    for test, *rates in zip(tests, slower, faster, strict=True):
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
    """Return the test of each point whose scatter between runs is known."""
    if not pairs:
        return []
    # (side, run) -> column of `values`.
    columns: dict[tuple[int, str], int] = {}
    for pair in pairs:
        for side, rows in enumerate(pair.ok):
            for row in rows:
                columns.setdefault((side, row.run_id), len(columns))
    values = np.full((len(pairs), len(columns)), math.nan)
    for number, pair in enumerate(pairs):
        for side, rows in enumerate(pair.ok):
            for row, log in zip(rows, pair.logs[side], strict=True):
                values[number, columns[side, row.run_id]] = log
    scatters = scatter(values, [side for side, _ in columns])
    tests = []
    for pair, of_point in zip(pairs, scatters, strict=True):
        if of_point is not None:
            test = _Test(
                point_id=pair.newest.point_id,
                size=float(np.mean(pair.logs[1]) - np.mean(pair.logs[0])),
                share=sum(1 / len(rows) for rows in pair.ok),
                scatter=of_point,
            )
            tests.append(test)
    return tests


def _verdict(test: _Test, rates: Sequence[float], threshold: float) -> dict[str, Any]:
    """Return the fields verdict, q_value and why.

    Args:
        rates: false discovery rates of the verdicts slower and faster.
    """
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
    """What a fact of a run is about."""

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
    """Something that may change the times of a run, such as an environment variable."""

    kind: FactKind
    name: str


NONE = "none"
_CODE = Fact(FactKind.RUN, "raybench_sha256")
# Facts that depend on which devices of a model a run got, or on where Python packages are.
_NOT_LASTING = (
    *(Fact(FactKind.DEVICE, name) for name in ("uuid", "host", "nccl_path")),
    *(Fact(FactKind.VARIABLE, name) for name in ("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID")),
)
# Columns of `devices` that do not change by themselves between starts.
_DEVICE_COLUMNS = (
    *("driver_version", "nccl_path", "power_cap_w", "sm_clock_max_mhz", "memory_clock_mhz"),
    *("topology", "pcie_link_max", "mig_mode", "persistence_mode", "memory_bytes", "cpu_count"),
    *("omp_num_threads", "niceness"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A fact that differs between two runs."""

    kind: FactKind
    name: str
    # Text of the fact in each run; `none` if the run lacks the fact.
    base: str
    new: str

    @property
    def fact(self) -> Fact:
        """The fact without its values."""
        return Fact(self.kind, self.name)


def facts(run: Run, devices: pd.DataFrame) -> dict[Fact, str]:
    """Return the text of each known fact that may change the times of a run.

    If devices differ, the text lists their values. Hashes are cut to 12 digits.

    Args:
        run: the run.
        devices: its rows in the table `devices`.
    """
    models = sorted(Counter(devices["name"]).items())
    of_devices = {
        "name": ", ".join(f"{count} x {name}" for name, count in models) or NONE,
        "node_id": str(devices["node_id"].nunique() or NONE),
        "host": _join(devices["host"]),
        # The UUID of a CPU worker names a process, so it would always differ.
        "uuid": _join(devices.loc[devices["kind"] != "cpu", "uuid"]),
        **{column: _join(devices[column]) for column in _DEVICE_COLUMNS},
    }
    versions = _merge(run.versions, devices["versions"])
    texts = {
        Fact(FactKind.RUN, "job_sha256"): run.job_sha256[:12],
        Fact(FactKind.RUN, "git_commit"): _short_commit(run.git_commit or NONE),
        **{Fact(FactKind.CODE, name): sha256[:12] for name, sha256 in run.workload_files.items()},
        _CODE: (run.raybench_sha256 or NONE)[:12],
        **{Fact(FactKind.DEVICE, column): text for column, text in of_devices.items()},
        **{Fact(FactKind.VERSION, name): text for name, text in versions.items()},
    }
    texts = {fact: text for fact, text in texts.items() if text != NONE}
    variables = _merge(run.environment, devices["environment"])
    for name, text in variables.items():
        # Quoted if a variable is set to `none`, as NCCL_NET_PLUGIN may be.
        texts[Fact(FactKind.VARIABLE, name)] = repr(text) if text == NONE else text
    return texts


def _short_commit(commit: str) -> str:
    """Cut the hash of a commit, which may end with `+changes`, to 12 digits."""
    sha, plus, changed = commit.partition("+")
    return sha[:12] + plus + changed


def lasting_changes(base: Mapping[Fact, str], new: Mapping[Fact, str]) -> tuple[Change, ...]:
    """Return `changes` without facts that depend on the devices that a run got.

    These are UUIDs, hosts, NCCL's file, CUDA_VISIBLE_DEVICES and NCCL_HOSTID.
    """
    return tuple(change for change in changes(base, new) if change.fact not in _NOT_LASTING)


def changes(base: Mapping[Fact, str], new: Mapping[Fact, str]) -> tuple[Change, ...]:
    """Return each fact that differs, or that one run lacks.

    Facts of `base` come first. Source files are compared only if both runs recorded their code.

    Args:
        base: as returned by `facts`.
        new: as returned by `facts`.
    """
    is_code_known = _CODE in base and _CODE in new
    changed = []
    for fact in dict.fromkeys([*base, *new]):
        before, now = base.get(fact, NONE), new.get(fact, NONE)
        is_of_code = fact == _CODE or fact.kind is FactKind.CODE
        if before != now and (is_code_known or not is_of_code):
            changed.append(Change(kind=fact.kind, name=fact.name, base=before, new=now))
    return tuple(changed)


def _merge(driver_facts: Any, worker_facts: pd.Series) -> dict[str, str]:
    """Return name -> text; values of workers override the value of the driver.

    Args:
        driver_facts: name -> value.
        worker_facts: a mapping or None for each worker.
    """
    by_name: dict[str, list[Any]] = {}
    for facts_of_worker in worker_facts:
        for name, value in dict(facts_of_worker or {}).items():
            by_name.setdefault(name, []).append(value)
    return dict(driver_facts) | {name: _join(values) for name, values in by_name.items()}


def _join(values: Iterable[Any]) -> str:
    """Return the distinct known values, sorted, with commas; `none` if all are unknown."""
    # pandas turns integers with nulls into floats, so write 2.0 as 2.
    texts = (f"{v:.15g}" if isinstance(v, float) else str(v) for v in values if not pd.isna(v))
    return ", ".join(sorted(set(texts))) or NONE


_PARTS = (
    *("compute_ms", "optimizer_ms", "comm_exposed_ms", "unexplained_ms", "straggler_ms"),
    *("data_ms", "host_gap_ms"),
)
_STATES = ("throttled", "host_bound")
# A part is shown if it explains at least this share of the change of the step.
_LEAST_SHARE = 0.25
# Clocks move by a few steps of 15 MHz from run to run.
_LEAST_CLOCK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChange:
    """A column of `points` that changed between two runs; `unit` is "" for a bool."""

    column: str
    base: float | bool
    new: float | bool
    unit: str = ""


def point_changes(base: PointRow, new: PointRow) -> tuple[PointChange, ...]:
    """Return what changed of a point between two runs.

    Parts of the step (ms) come first if they explain at least a quarter of its change, the largest
    change before the others. Throttling and host-bound steps follow, and then the SM clock (MHz) if
    it moved by 2 % or more.
    """
    # Parts are of one round, so they are compared with the step of that round.
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
    """Return point_id -> `point_changes`, for points that are ok in both runs.

    Args:
        base: rows of one run, as returned by `mean_of_rounds`.
        new: as `base`; decides the order.
    """
    of_base = {row.point_id: row for row in base if row.status is Status.OK}
    return {
        row.point_id: point_changes(of_base[row.point_id], row)
        for row in new
        if row.status is Status.OK and row.point_id in of_base
    }


# Columns of `points` that `history` and reports on it need.
HISTORY_COLUMNS = (
    *(*ATTEMPT_COLUMNS, *_SETTINGS, *_WORLD),
    *("env", "host_bound", "step_ms_p50", "step_ms_ci_low", "step_ms_ci_high"),
)
_TWO_SIDED_95 = 1.96


@dataclass(frozen=True, kw_only=True)
class HistoryRow(PointRow):
    """A point of one of many runs."""

    # Counts from 0. A machine is a model of device and a number of nodes.
    machine: int
    # Geometric mean of the runs of the same level.
    level_ms: float
    # In the first run of a level: relative change from the level before.
    step: float | None = None


def history(points: Sequence[PointRow], *, threshold: float = THRESHOLD) -> list[HistoryRow]:
    """Return a row for each ok point of each run, with the level of its step time.

    Rows of a point are sorted by start. Each machine has levels of its own.

    Args:
        points: rows of the table `points` of any runs, with HISTORY_COLUMNS at least.
        threshold: smaller relative changes make no new level; 0.015 means 1.5 %.
    """
    order: dict[str, int] = {}
    for row in points:
        order.setdefault(row.point_id, len(order))
    ok = [row for row in mean_of_rounds(points) if row.status is Status.OK and row.step_ms_p50]
    ok.sort(key=lambda row: (row.started_at, row.run_id))
    machines: dict[tuple[object, ...], int] = {}
    series: dict[tuple[str, int], list[PointRow]] = {}
    for row in ok:
        key = (row.device_type, row.device_name, row.node_count)
        machine = machines.setdefault(key, len(machines))
        series.setdefault((row.point_id, machine), []).append(row)
    history_rows = []
    for (_, machine), rows in series.items():
        values = np.log([row.step_ms_p50 or math.nan for row in rows])
        # The typical interval of a step gives the noise of a single run.
        spans = [
            row.step_ms_ci_high / row.step_ms_ci_low
            for row in rows
            if row.step_ms_ci_high and row.step_ms_ci_low
        ]
        within = math.log(float(np.median(spans))) / 2 / _TWO_SIDED_95 if spans else 0.0
        # The indices at which levels begin, and the end of the last level.
        ends = [0, *find_level_starts(values, within, threshold), len(values)]
        level_before: float | None = None
        for first, end in pairwise(ends):
            level = float(values[first:end].mean())
            step = None if level_before is None else math.expm1(level - level_before)
            shared: dict[str, Any] = {"machine": machine, "level_ms": math.exp(level)}
            history_rows.append(HistoryRow(**vars(rows[first]), **shared, step=step))
            history_rows += [HistoryRow(**vars(row), **shared) for row in rows[first + 1 : end]]
            level_before = level
    return sorted(history_rows, key=lambda row: (order[row.point_id], row.started_at, row.run_id))
