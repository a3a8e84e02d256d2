"""A run and what follows from its rows: all that its report, page and exports are made of."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from raybench.analysis.doubts import DoubtGroup
from raybench.analysis.references import (
    SHIPPED,
    Measurement,
    References,
    Standing,
    impossible_figures,
    standings,
)
from raybench.analysis.rounds import Trials, latest_trials, regions_by_point, without_controls
from raybench.analysis.rows import (
    BY_NAME,
    DEGREES,
    OPTIONAL,
    ScaledRow,
    batch_column,
    point_rows,
    setting,
    setting_order,
    typed_rows,
    value_of,
    varying,
    workload_metrics,
)
from raybench.analysis.scaling import half_widths, samples_per_joule, scaling
from raybench.analysis.uneven import Fleet, fleets
from raybench.errors import JobError
from raybench.job.model import answer_of_run
from raybench.job.point import EQUAL, RUN_SETTINGS, setting_text
from raybench.job.registry import Answer
from raybench.job.source import overrides_in, parse_source
from raybench.records import Cause, Metric, RunStatus, Status, TrialKey, by_point
from raybench.records.doubts import worst_of_each
from raybench.report import formatting, messages
from raybench.report.documents import records
from raybench.report.formatting import counted, plain, span
from raybench.report.messages import MessageGroup, marks
from raybench.report.point_settings import (
    distinguishing_settings,
    settings_words,
    short_name,
)
from raybench.report.words.doubts import MARKS
from raybench.report.words.reasons import losses_unknown_words
from raybench.results import reader
from raybench.results.tables import PointRow, RegionRow, Run, units
from raybench.sweep.scheduler import BETWEEN_ROUNDS_S, WORTHWHILE, is_largest_known
from raybench.workloads.base import builtin_class

_NOUNS = {
    "step_ms_p50": "step time",
    "step_ms_p99": "99th percentile of the step time",
    "peak_mem_allocated_bytes": "memory",
    "energy_j": "energy",
    "busbw_gb_s": "bus bandwidth",
    "memory_gb_s": "memory bandwidth",
    "wall_unsynced_share": "share of the step that time.time() shows without waiting",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreRounds:
    """What it takes to have `rounds` rounds in all: about `seconds` more."""

    rounds: int
    seconds: float

    @property
    def sentence(self) -> str:
        """Return one sentence with a command, whose JOB and RUN are placeholders; no full stop."""
        time = formatting.long_time(self.seconds)
        more = f"{self.rounds} rounds, which give an interval, would take about {time} more"
        return f"{more}: sweep JOB --resume RUN --set measure.rounds={self.rounds}"


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class Summary:
    """A run with its rows of the tables, and what follows from them.

    What is computed is kept: do not change the lists. folder: of the results. points: all attempts,
    with controls, in table order. devices, region_rows: its rows of `devices` and `regions`, as
    `raybench.load` gives them. references: what its figures are held against.
    """

    run: Run
    devices: pd.DataFrame
    points: Sequence[PointRow]
    folder: Path = Path("results")
    region_rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    references: References = SHIPPED

    @cached_property
    def rows(self) -> list[ScaledRow]:
        """Return one row per point, ok or not, with its speed-up over its baseline (`scaling`).

        In the order of `points`. Figures that are impossible are among the doubts of a point.
        """
        return [
            replace(row, doubts=worst_of_each((*(row.doubts or ()), *doubts))) if doubts else row
            for row in scaling(self.points, self.run.baseline)
            for attempts_s in [[one.duration_s for one in self._trials.rounds(row).values()]]
            for doubts in [impossible_figures(row, self.references, attempts_s)]
        ]

    @cached_property
    def standings(self) -> list[Standing]:
        """Return those `measurements` of `rows` that have a reference, each with it."""
        return standings(measurements(self.rows), self.references, self.run.run_id)

    @cached_property
    def _trials(self) -> Trials:
        return Trials(self.points)

    @cached_property
    def _attempts(self) -> list[PointRow]:
        return without_controls(latest_trials(self.points))

    @cached_property
    def ranks(self) -> str:
        """Return `workers` if the first device (without one, all points) is a CPU, else `GPUs`."""
        known = list(self.devices["kind"][:1]) if not self.devices.empty else []
        kinds = {kind for kind in known or [row.device_type for row in self.rows] if kind}
        return "workers" if kinds == {"cpu"} else "GPUs"

    @cached_property
    def shared(self) -> Mapping[str, str]:
        """Return name -> text of parameters and non-default OPTIONAL settings all points share."""
        rows = self.rows
        if not rows:
            return {}
        first = rows[0]
        same = {k: v for k, v in first.params.items() if all(r.params.get(k) == v for r in rows)}
        alike = [name for name in OPTIONAL if len({getattr(row, name) for row in rows}) == 1]
        return same | {
            name: formatting.setting(name, value)
            for name in alike
            if formatting.has_value(value := getattr(first, name))
            and value != RUN_SETTINGS[name].default
        }

    @cached_property
    def has_throughput(self) -> bool:
        """Return whether any point has a throughput; if none is ok, whether any has a batch."""
        if any(row.status == "ok" for row in self.rows):
            return any(row.throughput is not None for row in self.rows)
        return any(batch_column(row) for row in self.rows)

    @cached_property
    def unit(self) -> formatting.Unit:
        """Return the unit of step times in tables; slow devices and scopes are always in ms."""
        return formatting.unit_of(self.rows)

    @cached_property
    def settings(self) -> list[str]:
        """Return the names of settings that tell the points apart: `distinguishing_settings`."""
        return distinguishing_settings(self.rows)

    @cached_property
    def case_settings(self) -> list[str]:
        """Return those of `settings` that are not compared: each combination of values is a case.

        Compared are those in `answer.over`, but no sizes of the problem (`_SIZES`); without such
        ones all settings but sizes. Batch and accumulation are compared if `over` has nothing else,
        and numbers of ranks if layouts divide the same work (strong scaling).
        """
        asked = [name for name in self.settings if name in self.answer.over]
        if asked and {"batch", "grad_accumulation"}.issuperset(asked):
            return [name for name in self.settings if name not in asked]
        free = [name for name in self.settings if name not in _SIZES]
        compared = [name for name in asked if name in free] or free
        is_strong = {row.scaling for row in self.rows} == {"strong"}
        if is_strong and any(name in DEGREES for name in compared):
            compared.append("world_size")
        return [name for name in self.settings if name not in compared]

    @cached_property
    def table_settings(self) -> list[str]:
        """Return `settings`, those of `case_settings` first."""
        return sorted(self.settings, key=lambda name: name not in self.case_settings)

    @cached_property
    def ordered(self) -> list[ScaledRow]:
        """Return `rows` case by case; in each the best first, last what is not ok or has no value.

        In the order of their settings if the answer is a ratio to the baseline or not measured.
        """
        answer = self.answer
        metric = None if answer.metric in RATIOS else find_metric(self.rows, answer.metric)
        names = self.case_settings if metric else self.table_settings

        def place(row: ScaledRow) -> tuple[object, ...]:
            case = [setting_order(setting(row, name)) for name in names]
            value = value_of(row, metric) if metric and row.status == "ok" else None
            return case, value is None, (value or 0.0) * (-1 if answer.best == "max" else 1)

        return sorted(self.rows, key=place)

    @cached_property
    def alike(self) -> str:
        """Return the main settings that all points share: `fp32, batch 64 per device, 2 GPUs`.

        A batch that varies is named without its value; "" for no points.
        """
        if not self.rows:
            return ""
        first, apart = self.rows[0], varying(self.rows)
        names = ("precision", "batch", "world_size")
        words = {name: settings_words(first, [name], self.ranks) for name in names}
        words |= {name: "batch" if name == "batch" else "" for name in names if name in apart}
        if "dtype" in first.params:  # it computes nothing in the precision
            words["precision"] = ""
        elif words["precision"] and self.is_precision_unknown:
            words["precision"] = "precision as the script has it"
        if words["batch"] and first.scaling and "scaling" not in apart:
            words["batch"] += " per device" if first.scaling == "weak" else " over all devices"
        return ", ".join(filter(None, words.values()))

    @property
    def is_precision_unknown(self) -> bool:
        """Return whether a script ran whose job sets no precision: ignore the one in its rows."""
        texts = (self.run.job_text, *overrides_in(self.run.argv))
        is_set = any(re.search(r"(?m)^[^#\n]*(?<![\w-])precision[\"' ]*[:=]", one) for one in texts)
        return bool(self.points) and self.points[0].workload == "script" and not is_set

    @cached_property
    def is_batch_search(self) -> bool:
        """Return whether the job searched for the largest batch: out of memory is a result then."""
        with suppress(JobError):
            job = parse_source("job", self.run.job_text, overrides_in(self.run.argv)).data
            matrix = job.get("matrix")
            return isinstance(matrix, dict) and isinstance(matrix.get("batch_size"), str | dict)
        return False

    @cached_property
    def words(self) -> dict[str, str]:
        """Return ranks, baseline ("" without one) and items in words, for `metric_column`."""
        baseline = formatting.settings(self.run.baseline)
        return {"ranks": self.ranks, "baseline": baseline, "items": self.answer.items}

    @cached_property
    def marks_meaning(self) -> str:
        """Return the meanings of the marks that any point has, joined by "; "."""
        letters = {letter for row in self.rows for letter in marks(row)}
        return "; ".join(f"{mark} {text}" for mark, text in MARKS.items() if mark in letters)

    @cached_property
    def answer(self) -> Answer:
        """Return what the job asks, else its workload, else the speed-up: see `answer_of_run`.

        Points may lack the metric. `over`: the settings asked for that vary, all that vary if none
        is asked for; with `batch` for the column that the job fixes, as in `settings`.
        """
        batch = next(filter(None, map(batch_column, self.rows)), "batch")
        asked = [batch if name == "batch" else name for name in varying(self.rows)]
        found = answer_of_run(self.run.job_text, overrides_in(self.run.argv), asked)
        return replace(found, over=tuple("batch" if n == batch else n for n in found.over))

    @cached_property
    def fleets(self) -> Sequence[Fleet]:
        """Return the groups of ok points alike but for `shares`, two or more each; may be empty."""
        return fleets(self.rows) if any(row.shares != EQUAL for row in self.rows) else ()

    @cached_property
    def regions(self) -> Mapping[str, Sequence[RegionRow]]:
        """Return point_id -> the regions of its last attempt with any: see `regions_by_point`."""
        return regions_by_point(typed_rows(self.region_rows, RegionRow))

    @cached_property
    def largest_batches(self) -> tuple[LargestBatch, ...]:
        """Return the largest batch that fits of each series in which it is known.

        It is known if a batch above it by at most 1 %, or one item, ran out of memory, as a search
        finds it. Weak scaling only. In the order of their settings.
        """
        series: dict[tuple[str, ...], list[ScaledRow]] = {}
        names = varying(self.rows, ("scaling", "batch"), always=("precision", "world_size"))
        for row in self.rows:
            if row.scaling == "weak" and row.batch_size is not None:
                key = tuple(str(setting(row, name)) for name in names)
                series.setdefault(key, []).append(row)
        found = []
        for rows in series.values():
            ran_out = min((row.batch_size or 0 for row in rows if row.status == "oom"), default=0)
            fitting = {row.batch_size or 0: row for row in rows if row.status == "ok"}
            fits = max((size for size in fitting if size < ran_out), default=None)
            if fits is not None and is_largest_known(fits, ran_out):
                found.append(
                    LargestBatch(
                        settings={name: setting(fitting[fits], name) for name in names},
                        batch_size=fits,
                        ran_out=ran_out,
                        peak_mem_allocated_bytes=fitting[fits].peak_mem_allocated_bytes,
                    )
                )
        return tuple(sorted(found, key=lambda o: [*map(setting_order, o.settings.values())]))

    @cached_property
    def ranked_by(self) -> Answer:
        """Return `answer` with a metric, and its `best`, that can rank points without a baseline.

        It is the metric of `answer` if that was measured and is no speed-up, efficiency or batch;
        else the first of throughput, bandwidths and TFLOP/s that was measured; else the
        step time, measured or not.
        """
        asked = self.answer
        if asked.metric not in (*RATIOS, "batch_size") and find_metric(self.rows, asked.metric):
            return asked
        for name in ("throughput", "busbw_gb_s", "memory_gb_s", "achieved_tflops_per_device"):
            if find_metric(self.rows, name) is not None:
                return replace(asked, metric=name, best="max")
        return replace(asked, metric="step_ms_p50", best="min")

    @cached_property
    def cases(self) -> list[Case]:
        """Return the cases in the order of their settings, in each its points, the best first.

        Only ok points that have the metric of `ranked_by`; empty if there are none.
        """
        metric, of_cases = find_metric(self.rows, self.ranked_by.metric), self.case_settings
        if metric is None:
            return []
        names = [name for name in self.settings if name not in of_cases]
        groups: dict[tuple[Any, ...], list[Candidate]] = {}
        is_exact = metric.format == "gib"  # memory is the same in each start
        known = {} if is_exact else self._half_widths(metric)
        for row in self.rows:
            if row.status == "ok" and (value := value_of(row, metric)) is not None:
                half_width = known.get(row.point_id)
                one = Candidate(
                    name=short_name(row, names, self.ranks) if names else "",
                    value=float(value),
                    low=None if half_width is None else value * math.exp(-half_width),
                    high=None if half_width is None else value * math.exp(half_width),
                    is_exact=is_exact,
                    row=row,
                )
                key = tuple(setting_order(setting(row, name)) for name in of_cases)
                groups.setdefault(key, []).append(one)
        is_most = self.ranked_by.best == "max"
        return [
            Case(
                name=settings_words(groups[key][0].row, of_cases, self.ranks),
                ranked=tuple(sorted(groups[key], key=lambda one: one.value, reverse=is_most)),
            )
            for key in sorted(groups)
        ]

    def _half_widths(self, metric: Metric) -> dict[str, float]:
        """Return point_id -> half of the 95 % interval of a metric, by its value in each round."""

        def number(row: PointRow) -> float | None:
            if metric.name == "samples_per_joule":  # no column of a single round
                return samples_per_joule([row])
            value = value_of(row, metric)
            return float(value) if isinstance(value, int | float) else None

        measured = [(row, self._trials.logs(row, number)) for row in self.rows]
        return {row.point_id: half_width for row, half_width in half_widths(measured)}

    @cached_property
    def compared(self) -> list[ScaledRow]:
        """Return the points with a speed-up, but the baseline; [] if `answer` is no ratio to it."""
        return rows_compared(self.rows) if self.answer.metric in RATIOS else []

    @property
    def contested(self) -> list[Case]:
        """Return the `cases` with two points or more, also those with a clear best."""
        return [case for case in self.cases if len(case.ranked) > 1]

    @cached_property
    def machine(self) -> str:
        """Return `4 x NVIDIA H200 on 1 node; P2P/CUMEM` (transports); `run.cluster` if unknown."""
        devices = self.devices
        if devices.empty:
            return self.run.cluster
        most = max((row.node_count or 0 for row in self.rows), default=0)
        # A Ray that was started anew gives the same host another id. Hosts may have the same name;
        # one has a device of each index once. After `--resume` elsewhere no point may have had all.
        alike = devices.groupby(["host", "address", "index"]).size()
        nodes = int(alike.groupby(level=["host", "address"]).max().sum())
        if not 0 < most <= nodes:
            nodes = int(devices["node_id"].nunique())
        text = formatting.machine(records(devices), nodes)
        if 0 < most < nodes:
            text += f", at most {counted(most, 'node')} in a point"
        if self.run.only_devices:
            text += ", only those that --devices named"
        ways = {way for row in self.rows for way in row.transports or ()}
        return f"{text}; {formatting.some(sorted(ways))}" if ways else text

    @cached_property
    def model(self) -> tuple[str, ...]:
        """Return what the points run, the parameters of their models, and the optimizers.

        As in ("MLP of 8 layers, 4,096 wide", "134 M parameters", "adam"); unknown ones left out.
        """
        names, counts, optimizers = {}, set(), set()
        for workload, params in ((row.workload, row.params) for row in self.rows):
            found = builtin_class(workload) if params else None
            names[(found.describe(params) if found else "") or workload] = True
            counts.add((found and found.parameter_count(params)) or 0)
            if params.get("mode") != "inference" and "optimizer" in params:
                optimizers.add(params["optimizer"])
        sizes = sorted(counts - {0})
        size = span(*(formatting.amount(count) for count in sizes[:: len(sizes) - 1 or 1]))
        size += " parameters" if size else ""
        return tuple(filter(None, (", ".join(names), size, ", ".join(sorted(optimizers)))))

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Return name -> version of the run's software and driver, such as `2.27.3 and 2.28.9`.

        Versions of the workers replace versions of the driver process.
        """
        of_workers: dict[str, set[str]] = {}
        for device in self.devices.to_dict("records"):
            found = dict(device["versions"] or {})
            if formatting.has_value(device["driver_version"]):
                found["driver"] = device["driver_version"]
            for name, version in found.items():
                of_workers.setdefault(name, set()).add(version)
        joined = {name: " and ".join(sorted(versions)) for name, versions in of_workers.items()}
        return {**self.run.versions, **joined}

    @cached_property
    def lost_nodes(self) -> tuple[str, ...]:
        """Return the hosts whose loss ended any attempt, each once; of an attempt only one."""
        hosts = (row.error_host for row in self.points if row.error_type == Cause.NODE_LOST)
        return tuple(dict.fromkeys(host for host in hosts if host is not None))

    @cached_property
    def counts(self) -> str:
        """Return how the points ended: `36 points: 36 ok, 0 failed, 0 skipped; 3 rounds`.

        A point of which any round failed counts as failed. Then, if any, those at the power cap.
        """
        ended = {TrialKey(row.point_id, row.round or 1): str(row.status) for row in self._attempts}
        rounds = max((row.rounds for row in self.rows), default=1)
        text = formatting.counts(self.run, list(by_point(ended).values()))
        capped = sum("power_cap" in (row.throttle_reasons or ()) for row in self.rows)
        text += f"; {rounds} rounds" if rounds > 1 else ""
        return text + (f"; power cap reached in {counted(capped, 'point')}" if capped else "")

    @property
    def course(self) -> str:
        """Return start and duration: `2026-11-26 01:16 UTC, interrupted after 2 min 3 s`."""
        return f"{formatting.when(self.run.started_at)}, {formatting.course(self.run)}"

    @cached_property
    def failures(self) -> tuple[MessageGroup, ...]:
        """Return how points that are not ok ended, and why: the last attempt in each round."""
        return messages.failures(self._attempts)

    @property
    def may_retry_failed(self) -> bool:
        """Return whether points failed by an error or their time limit; `oom` is a result."""
        mended = (Status.ERROR, Status.TIMEOUT)
        return any(row.status in mended for row in self._attempts)

    @property
    def is_cut_short(self) -> bool:
        """Return whether the run was interrupted, or lost points with their workers."""
        is_lost = any(row.status == Status.LOST for row in self._attempts)
        return is_lost or self.run.status is RunStatus.INTERRUPTED

    @cached_property
    def without_speed_up(self) -> tuple[MessageGroup, ...]:
        """Return the `why` of ok points without speed-up; of baselines only if no other has one."""
        without = [row for row in self.rows if row.why is not None]
        others = [row for row in without if not row.is_baseline] or without
        return messages.not_compared(row.why for row in others if row.why is not None)

    @cached_property
    def doubts(self) -> tuple[DoubtGroup, ...]:
        """Return what makes numbers doubtful, the most harmful first."""
        return messages.doubt_groups(self.rows, self._trials)

    @cached_property
    def warnings(self) -> tuple[MessageGroup, ...]:
        """Return `doubts` in words."""
        return messages.warnings(self.doubts, self.rows, self.ranks)

    @cached_property
    def plus_minus(self) -> str:
        """Return a sentence on which rounds ± is computed over; "" if no point has an interval."""
        known = [row.rounds for row in self.rows if row.step_ms_low is not None]
        counts = span(*(str(choose(known)) for choose in (min, max) if known))
        return counts and f"± is half of the 95 % interval over the {counts} rounds of this run."

    @cached_property
    def more_rounds(self) -> MoreRounds | None:
        """Return what 3 rounds take; None if a point has them, none is ok, or the run may go on."""
        measured = [row for row in self.rows if row.status == "ok"]
        done = max((row.rounds for row in measured), default=WORTHWHILE)
        if done >= WORTHWHILE or self.run.status in (RunStatus.RUNNING, RunStatus.INTERRUPTED):
            return None
        rounds = [one for row in measured for one in self._trials.rounds(row).values()]
        each_s = sum(one.duration_s or 0.0 for one in rounds) / done
        more = WORTHWHILE - done
        return MoreRounds(rounds=WORTHWHILE, seconds=more * (each_s + BETWEEN_ROUNDS_S))


# Ratios to a baseline: these points are told by their speed-up, not by a rank among each other.
RATIOS = ("speed_up", "efficiency")
# Sizes of the problem: points that differ in one of them are cases, of which none is the best.
_SIZES = (
    *("workload", "scaling", "batch", "world_size", "slow_ratio", "slow_count", "operation"),
    *("grad_accumulation", "size_bytes", "m", "n", "k", "preset", "phase", "seq_len", "mode"),
    "scope",
)
SIZE = "size_bytes"
_TIMES = ("step_ms_p50", "step_ms_mean")
_RATES = ("achieved_tflops_per_device", "mfu_pct", "mfu_6n_pct", "gemm_share_pct", "throughput")


def load_summary(results: Path, run: str, references: References = SHIPPED) -> Summary:
    """Return the summary of a run; a health check's lacks findings. run: see `reader.find_run`.

    Raises ResultsError if `run` means none or several, or the run cannot be read.
    """
    root, run_id = reader.find_run(results, run)
    return Summary(
        run=reader.read_run(root, run_id),
        folder=root,
        devices=reader.load(root, "devices", run_id),
        points=point_rows(reader.load(root, "points", run_id)),
        region_rows=reader.load(root, "regions", run_id),
        references=references,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point as one of those that may be the best.

    name: the settings that are compared, in short. low, high: the 95 % interval of the value over
    the rounds of the run; None where it is not known. is_exact: each start has the same value.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    is_exact: bool
    row: ScaledRow

    @property
    def half_width(self) -> float | None:
        """Return half of the interval as a share of the value; None if unknown, or the value 0."""
        return formatting.relative_half_width(self.low, self.value, self.high)

    @property
    def is_sure(self) -> bool:
        """Return whether it is known how far the value differs from start to start."""
        return self.is_exact or self.low is not None

    def may_equal(self, other: Candidate) -> bool:
        """Return whether the intervals overlap; without two intervals, whether values are equal."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return self.value == other.value or self.is_sure != other.is_sure
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Points that are alike but for the settings that are compared, the best first.

    name: the settings that make the case, in words; empty where no setting makes cases.
    """

    name: str
    ranked: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """Return the point with the best value."""
        return self.ranked[0]

    @property
    def rivals(self) -> tuple[Candidate, ...]:
        """Return the other points that may be as good as the best point."""
        return tuple(other for other in self.ranked[1:] if self.best.may_equal(other))


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch per device that fits, found by a search.

    settings: precision, world_size and what else differs between series. ran_out: the smallest
    batch size that does not fit. peak_mem_allocated_bytes: of the largest batch that fits, on the
    rank that needs most; None on a CPU.
    """

    settings: Mapping[str, Any]
    batch_size: int
    ran_out: int
    peak_mem_allocated_bytes: int | None


def find_metric(rows: Iterable[ScaledRow], name: str) -> Metric | None:
    """Return the metric of this name, a workload's own first; None if no ok point has a number."""
    measured = [row for row in rows if row.status == "ok"]
    own = {metric.name: metric for metric in workload_metrics(measured)}
    found = own.get(name) or BY_NAME.get(name)
    values = [value_of(row, found) for row in measured] if found else []
    return found if any(isinstance(value, int | float) for value in values) else None


def answer_metric(summary: Summary) -> Metric | None:
    """Return the metric of `ranked_by`, by which points are ranked; None if no ok point has it."""
    return find_metric(summary.rows, summary.ranked_by.metric)


def metric_noun(summary: Summary, metric: Metric) -> str:
    """Return what a metric is, in words: `tokens/s`, `step time`."""
    if metric.name == "throughput":
        return f"{summary.answer.items}/s"
    return _NOUNS.get(metric.name, metric.title)


def amount(summary: Summary, metric: Metric, value: float) -> str:
    """Return a value, stored in ms or bytes, with its unit or title: `1.50 GiB`, `3.000 loss`."""
    if metric.name == "throughput":
        return f"{formatting.number(value)} {summary.answer.items}/s"
    if metric.name.endswith("_ms") or metric.name.startswith("step_ms"):
        return formatting.duration(value)
    text = formatting.metric(metric, value)
    unit = {"gib": "GiB", "share": "", "percent": "", "ratio": "x"}.get(metric.format)
    return f"{text} {metric.unit or metric.title if unit is None else unit}".rstrip()


def size_of(row: ScaledRow) -> int:
    """Return `size_bytes`, of a message or an array; 0 if missing or no whole number."""
    text = str(row.params.get(SIZE, ""))
    return int(text) if text.isdecimal() else 0


def follows_step_time(metric: Metric) -> bool:
    """Return whether a metric is the median or mean step time, or titled such as `ms/token`."""
    return metric.name in _TIMES or metric.title.startswith("ms/")


def is_speed(metric: Metric) -> bool:
    """Return whether a metric is a rate or a step time, so that its best point is the fastest."""
    return metric.name in _RATES or "/s" in metric.title or follows_step_time(metric)


def why_not_known(rows: Iterable[ScaledRow]) -> dict[str, int]:
    """Return reason -> number of points whose losses it hides, the most frequent first."""
    reasons = Counter(row.why_no_losses for row in rows if row.why_no_losses)
    return {losses_unknown_words(why): count for why, count in reasons.most_common()}


def unknown_losses(rows: Iterable[ScaledRow]) -> list[str]:
    """Return a sentence for each reason of `why_not_known`."""
    return [
        f"What is lost is not known at {counted(count, 'point')}: {reason}."
        for reason, count in why_not_known(rows).items()
    ]


def rows_compared(rows: Iterable[ScaledRow]) -> list[ScaledRow]:
    """Return the points that have a speed-up, without the baseline points."""
    return [r for r in rows if r.speed_up is not None and not r.is_baseline]


def with_most_ranks(rows: Iterable[ScaledRow]) -> list[ScaledRow]:
    """Return those of `rows_compared` on the largest number of ranks among them; [] for none."""
    compared = rows_compared(rows)
    most = max((row.world_size for row in compared), default=0)
    return [row for row in compared if row.world_size == most]


# What a point is judged by: the first of these that it has, and its burst.
_FIGURES = ("busbw_gb_s", "throughput", "memory_gb_s", "achieved_tflops_per_device", "step_ms_p50")
_BURST = "burst_tflops_per_device"


def measurements(rows: Iterable[PointRow], uuids: Sequence[str] = ()) -> Iterator[Measurement]:
    """Yield for each row its main rate or step time and, if it has one, its burst rate.

    Rows that are not ok, not on GPUs of one model, quick, or had neighbours are left out; controls
    and attempts that were repeated are not. uuids: of all devices of the run. A measurement names
    them if the row had one ("a/b": one of these) or all ("a+b"): which it had is not kept.
    """
    for row in rows:
        model = row.device_name or ""
        is_sound = row.status is Status.OK and row.device_type == "cuda"
        if not is_sound or row.quick or row.neighbours or not model or ", " in model:
            continue
        of = defining_settings(row)
        if row.world_size > 1:
            of["node_count"] = str(row.node_count)
        joint = {len(uuids): "+", 1: "/"}.get(row.world_size)
        main = next((name for name in _FIGURES if getattr(row, name)), None)
        for name in filter(None, (main, _BURST)):
            if value := getattr(row, name):
                yield Measurement(
                    model=model,
                    of=of,
                    metric=name,
                    unit=units("points")[name],
                    fabric="; ".join(row.transports or ()) if row.world_size > 1 else "",
                    value=value,
                    devices=joint.join(uuids) if joint else "",
                    point_id=row.point_id,
                )


def defining_settings(row: PointRow) -> dict[str, str]:
    """Return name -> text of the settings that define a point, without OPTIONAL at defaults.

    Also without what is not known. The batch has the name of its `batch_column`.
    """
    values: dict[str, Any] = {"workload": row.workload, **row.params}
    for name in OPTIONAL:
        if (value := setting(row, name)) != RUN_SETTINGS[name].default:
            values[name] = value
    for name in filter(None, ("precision", batch_column(row), "world_size")):
        values[name] = getattr(row, name)
    return {plain(n): plain(setting_text(v)) for n, v in values.items() if v is not None}
