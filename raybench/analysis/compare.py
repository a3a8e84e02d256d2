"""What changed between two sides of runs, point by point, and whether chance explains the change.

A side is one or several runs of the same thing. A run is one observation of a point: the geometric
mean over its rounds. The rounds are not observations, because they share machine and time (T.
Kalibera, R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013). With a single run on a
side, the verdict is `unclear`.

Points are compared by their rate in samples/s, or in steps/s if their steps finish no samples. The
rate follows the mean step, because occasional stalls do not show in the median.

The second half has facts of runs that may explain a change, changes of parts and clocks, and the
history of points over many runs.
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
from raybench.errors import ResultsError
from raybench.records.status import Status
from raybench.results.point_row import PointRow, step_of_parts, why_no_breakdown
from raybench.results.tables import Run
from raybench.stats.levels import find_level_starts
from raybench.stats.summary import Scatter, scatter

# Smaller relative changes are ignored.
THRESHOLD = 0.015
# Largest false discovery rate of `slower`, and of `faster`, over all points (Y. Benjamini, Y.
# Hochberg, J. R. Stat. Soc. B 57(1), 1995). `benchmarks.simulations.gate` measures the actual rate.
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
    # The change exceeds the threshold, but chance may explain the change.
    CHANCE = "chance"
    # The change is within the threshold, but its interval is not.
    WIDE = "wide"

    @property
    def is_obstacle(self) -> bool:
        """Whether the sides remain incomparable however many runs they have."""
        return self in (Undecided.OTHER_DEVICE, Undecided.OTHER_NODE_COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDecided:
    """Why a point has the verdict `unclear`; a field is empty unless its kind is named above it."""

    kind: Undecided
    # OTHER_DEVICE: device types or models; OTHER_NODE_COUNT: node counts. The base comes first.
    values: tuple[str | int | None, ...] = ()
    # FEW_RUNS: the side with the fewest ok runs, "base" or "new", and its number of ok runs.
    side: str = ""
    runs: int | None = None
    # WIDE: 90 % interval of the relative change.
    low: float | None = None
    high: float | None = None


# Columns that must be equal on both sides, and the reason if they are not.
_MACHINE_COLUMNS = {
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
    *(*ATTEMPT_COLUMNS, *_SETTINGS, *_MACHINE_COLUMNS),
    *("step_ms_mean", "throughput"),
)
# Confidence of the interval that decides `same`: two one-sided tests at 5 % (D. J. Schuirmann,
# J. Pharmacokinet. Biopharm. 15(6), 1987).
_DECIDING_CONFIDENCE = 0.9
# Confidence of the interval that reports show.
_SHOWN_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class ComparedPoint:
    """A point of two sides, with its settings. Fields are None if unknown.

    * `slower` or `faster`: the rate changed by more than the threshold, and q_value is at most
      FALSE_VERDICTS.
    * `same`: the 90 % interval of the ratio lies within the threshold.
    * `unclear`: all other points; `why` has the reason.
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
    # A failure of any round, or else ok if a round is ok; None if no run has the point.
    status_base: Status | None
    status_new: Status | None
    # Failed rounds / all rounds.
    base_failed: float
    new_failed: float
    # Numbers of ok runs.
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
    # False discovery rate of `slower` or `faster`; None for other verdicts.
    q_value: float | None = None
    # None if a side has no ok run.
    verdict: str | None = None
    # Reason of `unclear`.
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
        base: the runs of this side, the newest last; for each run its rows of the table `points`,
            with POINT_COLUMNS at least.
        new: the runs of the other side.
        threshold: smaller relative changes are ignored; 0.015 means 1.5 %.
    """
    base_rows, base_statuses = _rows_and_statuses(base)
    new_rows, new_statuses = _rows_and_statuses(new)
    pairs = []
    for point_id in dict.fromkeys((*new_rows, *base_rows)):
        pair = _Pair(
            rows=[base_rows.get(point_id, []), new_rows.get(point_id, [])],
            statuses=[base_statuses.get(point_id, []), new_statuses.get(point_id, [])],
        )
        pairs.append(pair)
    comparable = [pair for pair in pairs if all(pair.ok_rows) and not pair.obstacle]
    tested_fields = _tested_fields_by_point(comparable, threshold)
    return [pair.as_compared(tested_fields.get(pair.newest.point_id, {})) for pair in pairs]


def check_same_cpu_section(runs: Iterable[Run]) -> None:
    """Raise ResultsError if only some of the runs used the section `cpu` of their job."""
    with_cpu: list[str] = []
    without: list[str] = []
    for run in runs:
        (with_cpu if run.cpu_section else without).append(run.run_id)
    if with_cpu and without:
        raise ResultsError(
            f"{with_cpu[0]} used the section cpu: of its job and {without[0]} did not, so they "
            "measured different things; compare runs with it, or runs without it"
        )


def _rows_and_statuses(
    points_of_runs: Sequence[Sequence[PointRow]],  # of one side
) -> tuple[dict[str, list[PointRow]], dict[str, list[Status]]]:
    """Return point_id -> the mean over the rounds of each run, and point_id -> all statuses."""
    rows: dict[str, list[PointRow]] = {}
    statuses: dict[str, list[Status]] = {}
    for points in points_of_runs:
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
        """The row of the newest run; the base has it if the new side lacks the point."""
        return (self.rows[1] or self.rows[0])[-1]

    @cached_property
    def ok_rows(self) -> list[list[PointRow]]:
        """The ok rows with a mean step: a list for the base, a list for the new side."""
        sides = []
        for side in self.rows:
            sides.append([row for row in side if row.status is Status.OK and row.step_ms_mean])
        return sides

    @cached_property
    def has_samples(self) -> bool:
        """Whether samples/s are compared; otherwise steps/s are."""
        return all(row.throughput for side in self.ok_rows for row in side)

    @cached_property
    def log_rates(self) -> list[list[float]]:
        """The logarithms of the rates of the rows in `ok_rows`."""
        sides = []
        for side in self.ok_rows:
            sides.append([math.log(self._rate(row)) for row in side])
        return sides

    def _rate(self, row: PointRow) -> float:
        """Return samples/s, or steps/s if a row of the pair has no samples."""
        samples_per_s = row.throughput if self.has_samples else None
        return samples_per_s or MS_PER_S / (row.step_ms_mean or math.nan)

    @cached_property
    def obstacle(self) -> NotDecided | None:
        """Why the runs of the point cannot be compared, or are too few."""
        for column, kind in _MACHINE_COLUMNS.items():
            values = dict.fromkeys(getattr(row, column) for side in self.ok_rows for row in side)
            if len(values) > 1:
                return NotDecided(kind=kind, values=tuple(values))
        base_runs, new_runs = map(len, self.ok_rows)
        runs, side = (new_runs, "new") if new_runs < base_runs else (base_runs, "base")
        if runs >= LEAST_RUNS:
            return None
        return NotDecided(kind=Undecided.FEW_RUNS, side=side, runs=runs)

    def as_compared(self, tested_fields: Mapping[str, Any]) -> ComparedPoint:
        """Return the point with its settings, rates and verdict.

        Args:
            tested_fields: fields of `ComparedPoint` that follow from a test; empty if the point was
                not tested.
        """
        # `Status` lists failures first, then ok.
        worst_first = list(Status)
        worst, failed_shares = [], []
        for statuses in self.statuses:
            worst.append(min(statuses, key=worst_first.index, default=None))
            failures = [status for status in statuses if status.is_failure]
            failed_shares.append(len(failures) / max(1, len(statuses)))
        point = ComparedPoint(
            point_id=self.newest.point_id,
            **{name: getattr(self.newest, name) for name in _SETTINGS},
            status_base=worst[0],
            status_new=worst[1],
            base_failed=failed_shares[0],
            new_failed=failed_shares[1],
            base_runs=len(self.ok_rows[0]),
            new_runs=len(self.ok_rows[1]),
            unit="samples/s" if self.has_samples else "steps/s",
        )
        if not all(self.ok_rows):
            return point
        base, new = (math.exp(np.mean(side)) for side in self.log_rates)
        point = replace(point, base=base, new=new, ratio=new / base)
        if not tested_fields:
            return replace(point, verdict=UNCLEAR, why=self.obstacle)
        return replace(point, **tested_fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """The test whether the rate of a point differs between the two sides."""

    point_id: str
    # Change of the logarithm of the rate; negative if the new side is slower.
    log_change: float
    # Variance of `log_change` / variance of one run: 1/n + 1/m for n and m runs.
    variance_ratio: float
    # Scatter between the runs of a side.
    scatter: Scatter

    @property
    def ratio(self) -> float:
        """The ratio new / base."""
        return math.exp(self.log_change)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return the confidence interval of `ratio`: (low, high)."""
        half_width = self.scatter.half_width(self.variance_ratio, confidence)
        return math.exp(self.log_change - half_width), math.exp(self.log_change + half_width)

    def detectable_slowdown(self, threshold: float, tests: int) -> float:
        """Return the slowdown that these runs detect in 95 % of cases if no other point changed.

        Args:
            tests: number of points that are tested together.
        """
        # A verdict needs a change beyond chance among all tests, and beyond the threshold. The
        # 90 % interval leaves 5 % of cases on each side.
        beyond_chance = self.scatter.detectable(self.variance_ratio, FALSE_VERDICTS / tests)
        half_width = self.scatter.half_width(self.variance_ratio, _DECIDING_CONFIDENCE)
        beyond_threshold = half_width - math.log1p(-threshold)
        log_slowdown = max(beyond_chance, beyond_threshold)
        return -math.expm1(-log_slowdown)


def _tested_fields_by_point(pairs: Sequence[_Pair], threshold: float) -> dict[str, dict[str, Any]]:
    """Test all points together; return point_id -> fields of `ComparedPoint` that follow."""
    from scipy.stats import false_discovery_control

    tests = _tests(pairs)
    if not tests:
        return {}
    p_slower = [test.scatter.p_value(-test.log_change, test.variance_ratio) for test in tests]
    p_faster = [test.scatter.p_value(test.log_change, test.variance_ratio) for test in tests]
    q_values_slower = false_discovery_control(p_slower).tolist()
    q_values_faster = false_discovery_control(p_faster).tolist()
    fields_by_point = {}
    for test, q_slower, q_faster in zip(tests, q_values_slower, q_values_faster, strict=True):
        ratio_low, ratio_high = test.interval(_DECIDING_CONFIDENCE)
        interval_low, interval_high = test.interval(_SHOWN_CONFIDENCE)
        fields_by_point[test.point_id] = {
            **_verdict_fields(test, q_slower, q_faster, threshold),
            "ratio_low": ratio_low,
            "ratio_high": ratio_high,
            "interval_low": interval_low,
            "interval_high": interval_high,
            "least_seen": test.detectable_slowdown(threshold, len(tests)),
        }
    return fields_by_point


def _tests(pairs: Sequence[_Pair]) -> list[_Test]:
    """Return the test of each point whose scatter between runs is known."""
    if not pairs:
        return []
    # Number the runs (side, run_id): they are the columns of the matrix [points, runs].
    columns: dict[tuple[int, str], int] = {}
    for pair in pairs:
        for side, rows in enumerate(pair.ok_rows):
            for row in rows:
                columns.setdefault((side, row.run_id), len(columns))
    log_rates = np.full((len(pairs), len(columns)), math.nan)
    for point, pair in enumerate(pairs):
        for side, rows in enumerate(pair.ok_rows):
            for row, log_rate in zip(rows, pair.log_rates[side], strict=True):
                log_rates[point, columns[side, row.run_id]] = log_rate
    scatters = scatter(log_rates, [side for side, _ in columns])
    tests = []
    for pair, point_scatter in zip(pairs, scatters, strict=True):
        if point_scatter is not None:
            base_log_rates, new_log_rates = pair.log_rates
            test = _Test(
                point_id=pair.newest.point_id,
                log_change=float(np.mean(new_log_rates) - np.mean(base_log_rates)),
                # The variance of a mean of n runs is 1/n of the variance of one run.
                variance_ratio=sum(1 / len(rows) for rows in pair.ok_rows),
                scatter=point_scatter,
            )
            tests.append(test)
    return tests


def _verdict_fields(
    test: _Test, q_slower: float, q_faster: float, threshold: float
) -> dict[str, Any]:
    """Return the fields verdict and why, and q_value of a slower or faster point."""
    change = test.ratio - 1  # of the rate, so negative if the new side is slower
    if -change > threshold and q_slower <= FALSE_VERDICTS:
        return {"verdict": SLOWER, "q_value": q_slower, "why": None}
    if change > threshold and q_faster <= FALSE_VERDICTS:
        return {"verdict": FASTER, "q_value": q_faster, "why": None}
    low, high = test.interval(_DECIDING_CONFIDENCE)
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


# Text of a fact that a run lacks.
NONE = "none"
_RAYBENCH_CODE = Fact(FactKind.RUN, "raybench_sha256")
# Facts that depend on which devices of a model a run got, or on where Python packages are.
_INCIDENTAL_FACTS = (
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
        devices: the rows of the run in the table `devices`.
    """
    models = sorted(Counter(devices["name"]).items())
    device_texts = {
        "name": ", ".join(f"{count} x {name}" for name, count in models) or NONE,
        "node_id": str(devices["node_id"].nunique() or NONE),
        "host": _distinct(devices["host"]),
        # The UUID of a CPU worker names a process, so it would always differ.
        "uuid": _distinct(devices.loc[devices["kind"] != "cpu", "uuid"]),
        **{column: _distinct(devices[column]) for column in _DEVICE_COLUMNS},
    }
    versions = _driver_and_workers(run.versions, devices["versions"])
    texts = {
        Fact(FactKind.RUN, "job_sha256"): run.job_sha256[:12],
        Fact(FactKind.RUN, "git_commit"): _short_commit(run.git_commit or NONE),
        **{Fact(FactKind.CODE, name): sha256[:12] for name, sha256 in run.workload_files.items()},
        _RAYBENCH_CODE: (run.raybench_sha256 or NONE)[:12],
        **{Fact(FactKind.DEVICE, column): text for column, text in device_texts.items()},
        **{Fact(FactKind.VERSION, name): text for name, text in versions.items()},
    }
    texts = {fact: text for fact, text in texts.items() if text != NONE}
    variables = _driver_and_workers(run.environment, devices["environment"])
    for name, text in variables.items():
        # Quote the value of a variable that is set to `none`, as NCCL_NET_PLUGIN may be.
        texts[Fact(FactKind.VARIABLE, name)] = repr(text) if text == NONE else text
    return texts


def _short_commit(commit: str) -> str:
    """Cut the hash of a commit, which may end with `+changes`, to 12 digits."""
    sha, plus, changed = commit.partition("+")
    return sha[:12] + plus + changed


def lasting_changes(base: Mapping[Fact, str], new: Mapping[Fact, str]) -> tuple[Change, ...]:
    """Return the changed facts without facts that depend on the devices that a run got.

    These are UUIDs, hosts, NCCL's file, CUDA_VISIBLE_DEVICES and NCCL_HOSTID.
    """
    return tuple(change for change in changes(base, new) if change.fact not in _INCIDENTAL_FACTS)


def changes(base: Mapping[Fact, str], new: Mapping[Fact, str]) -> tuple[Change, ...]:
    """Return the facts that differ, or that one run lacks.

    Source files are compared only if both runs recorded their code.
    """
    is_code_known = _RAYBENCH_CODE in base and _RAYBENCH_CODE in new
    changed = []
    for fact in dict.fromkeys([*base, *new]):
        base_text, new_text = base.get(fact, NONE), new.get(fact, NONE)
        is_about_code = fact == _RAYBENCH_CODE or fact.kind is FactKind.CODE
        if base_text != new_text and (is_code_known or not is_about_code):
            changed.append(Change(kind=fact.kind, name=fact.name, base=base_text, new=new_text))
    return tuple(changed)


def _driver_and_workers(driver_texts: Any, worker_texts: pd.Series) -> dict[str, str]:
    """Return the text of each name; values of workers override the value of the driver."""
    values_by_name: dict[str, list[Any]] = {}
    for texts in worker_texts:
        for name, value in dict(texts or {}).items():
            values_by_name.setdefault(name, []).append(value)
    merged = dict(driver_texts)
    for name, values in values_by_name.items():
        merged[name] = _distinct(values)
    return merged


def _distinct(values: Iterable[Any]) -> str:
    """Return the distinct known values, sorted, with commas; `none` if all are unknown."""
    texts = set()
    for value in values:
        if not pd.isna(value):
            # pandas turns integers with nulls into floats, so write 2.0 as 2.
            texts.add(f"{value:.15g}" if isinstance(value, float) else str(value))
    return ", ".join(sorted(texts)) or NONE


_PARTS = (
    *("compute_ms", "optimizer_ms", "comm_exposed_ms", "unexplained_ms", "straggler_ms"),
    *("data_ms", "host_gap_ms"),
)
_STATES = ("throttled", "host_bound")
# A part is shown if it explains at least a quarter of the change of the step.
_MIN_SHARE_OF_CHANGE = 0.25
# Clocks move by less than 2 % from run to run: a few steps of 15 MHz.
_MIN_CLOCK_CHANGE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChange:
    """A column of `points` that changed between two runs; `unit` is "" for a bool."""

    column: str
    base: float | bool
    new: float | bool
    unit: str = ""


def point_changes(base: PointRow, new: PointRow) -> tuple[PointChange, ...]:
    """Return which columns of a point changed between two runs.

    The parts of the step that explain at least a quarter of its change come first, the largest
    change before smaller changes. Throttling and host-bound steps follow, and then the SM clock if
    it moved by 2 % or more.
    """
    # The parts are of one round, so they are compared with the step of that round.
    step_change_ms = (step_of_parts(new) or math.nan) - (step_of_parts(base) or math.nan)
    have_breakdowns = not (why_no_breakdown(base) or why_no_breakdown(new))
    parts = []
    for column in _PARTS:
        base_ms, new_ms = getattr(base, column), getattr(new, column)
        is_known = have_breakdowns and base_ms is not None and new_ms is not None
        if not is_known or not step_change_ms:
            continue
        if (new_ms - base_ms) / step_change_ms >= _MIN_SHARE_OF_CHANGE:
            parts.append(PointChange(column=column, base=base_ms, new=new_ms, unit="ms"))
    parts.sort(key=lambda part: -abs(part.new - part.base))
    states = []
    for column in _STATES:
        base_state, new_state = getattr(base, column), getattr(new, column)
        if base_state is not None and new_state is not None and base_state != new_state:
            states.append(PointChange(column=column, base=base_state, new=new_state))
    base_mhz, new_mhz = base.sm_clock_mhz_p50, new.sm_clock_mhz_p50
    if base_mhz and new_mhz and abs(new_mhz / base_mhz - 1) >= _MIN_CLOCK_CHANGE:
        clock = PointChange(column="sm_clock_mhz_p50", base=base_mhz, new=new_mhz, unit="MHz")
        states.append(clock)
    return (*parts, *states)


def all_point_changes(
    base: Sequence[PointRow], new: Sequence[PointRow]
) -> dict[str, tuple[PointChange, ...]]:
    """Return the changed columns of the points that are ok in both runs, by point_id.

    Args:
        base: rows of one run, from `mean_of_rounds`.
        new: rows of the other run, which decides the order.
    """
    base_rows = {row.point_id: row for row in base if row.status is Status.OK}
    changed_columns = {}
    for row in new:
        if row.status is Status.OK and row.point_id in base_rows:
            changed_columns[row.point_id] = point_changes(base_rows[row.point_id], row)
    return changed_columns


# Columns of `points` that `history` and reports on it need.
HISTORY_COLUMNS = (
    *(*ATTEMPT_COLUMNS, *_SETTINGS, *_MACHINE_COLUMNS),
    *("env", "host_bound", "step_ms_p50", "step_ms_ci_low", "step_ms_ci_high"),
)
# Half width of a 95 % interval of a normal value / its standard deviation.
_SDS_OF_95_PERCENT = 1.96


@dataclass(frozen=True, kw_only=True)
class HistoryRow(PointRow):
    """A point of one of many runs."""

    # Number of the machine, from 0. A machine is a device model and a number of nodes.
    machine: int
    # Geometric mean of the step times of the same level.
    level_ms: float
    # Relative change of the step time from the level before, where a level begins; else None.
    level_change: float | None = None


def history(points: Sequence[PointRow], *, threshold: float = THRESHOLD) -> list[HistoryRow]:
    """Return a row for each ok point of each run, with the level of its step time.

    Rows of a point are sorted by start. Levels are found for each machine by itself.

    Args:
        points: rows of the table `points` of any runs, with HISTORY_COLUMNS at least.
        threshold: smaller relative changes make no new level; 0.015 means 1.5 %.
    """
    point_order: dict[str, int] = {}
    for row in points:
        point_order.setdefault(row.point_id, len(point_order))
    ok = [row for row in mean_of_rounds(points) if row.status is Status.OK and row.step_ms_p50]
    ok.sort(key=lambda row: (row.started_at, row.run_id))
    machines: dict[tuple[object, ...], int] = {}
    series: dict[tuple[str, int], list[PointRow]] = {}
    for row in ok:
        model_and_nodes = (row.device_type, row.device_name, row.node_count)
        machine = machines.setdefault(model_and_nodes, len(machines))
        series.setdefault((row.point_id, machine), []).append(row)
    history_rows = []
    for (_, machine), rows in series.items():
        log_steps = np.log([row.step_ms_p50 or math.nan for row in rows])
        # The typical interval of a step gives the standard deviation of a single run.
        interval_ratios = [
            row.step_ms_ci_high / row.step_ms_ci_low
            for row in rows
            if row.step_ms_ci_high and row.step_ms_ci_low
        ]
        log_sd = 0.0
        if interval_ratios:
            log_sd = math.log(float(np.median(interval_ratios))) / 2 / _SDS_OF_95_PERCENT
        # The indices at which levels begin, and the end of the last level.
        bounds = [0, *find_level_starts(log_steps, log_sd, threshold), len(log_steps)]
        log_level_before: float | None = None
        for first, end in pairwise(bounds):
            log_level = float(log_steps[first:end].mean())
            change = None if log_level_before is None else math.expm1(log_level - log_level_before)
            level_fields: dict[str, Any] = {"machine": machine, "level_ms": math.exp(log_level)}
            # Only the first row of a level has the change.
            first_row = HistoryRow(**vars(rows[first]), **level_fields, level_change=change)
            history_rows.append(first_row)
            for row in rows[first + 1 : end]:
                history_rows.append(HistoryRow(**vars(row), **level_fields))
            log_level_before = log_level

    def order(row: HistoryRow) -> tuple[int, object, str]:
        return point_order[row.point_id], row.started_at, row.run_id

    return sorted(history_rows, key=order)
