"""What a run answers, as values: its points case by case, the best first, and what is compared.

`lead` writes the sentence of a report, its findings and its large figures from them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raybench.analysis.rows import (
    BY_NAME,
    ScaledRow,
    setting,
    setting_order,
    value_of,
    varying,
    workload_metrics,
)
from raybench.job.model import Answer
from raybench.records import Metric
from raybench.report import formatting
from raybench.report.point_settings import DEGREES, distinguishing_settings, short_name
from raybench.sweep.scheduler import is_found

# Ratios to a baseline: these points are told by their speed-up, not by a rank among each other.
RATIOS = ("speed_up", "efficiency")
# Sizes of the problem: points that differ in one of them are cases, of which none is the best.
_SIZES = (
    *("workload", "scaling", "batch", "world_size", "slow_ratio", "slow_count", "operation"),
    *("grad_accumulation", "size_bytes", "m", "n", "k", "preset", "phase", "seq_len", "mode"),
    "scope",
)
SIZE = "size_bytes"
# Between starts, the median point of the committed runs on GPUs scatters by 0.4 % (116 points with
# rounds): two points of one start each are not told apart below 1 %.
_BETWEEN_STARTS = 0.005
_TIMES = ("step_ms_p50", "step_ms_mean")
_RATES = ("achieved_tflops_per_device", "mfu_pct", "mfu_6n_pct", "gemm_share_pct", "throughput")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point as one of those that may be the best.

    name: the settings that are compared, in short. low, high: the 95 % interval of the value over
    the rounds of the run; None where it is not known. between_starts: by which share of it the
    value of one start may differ from that of another, to either side.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    between_starts: float
    row: ScaledRow

    @property
    def half_width(self) -> float | None:
        """Return half of the interval over the value; None where it is not known."""
        if self.low is None or self.high is None or not self.value:
            return None
        return (self.high - self.low) / 2 / self.value

    @property
    def ends(self) -> tuple[float, float]:
        """Return the ends of the interval; of one start, as far as starts of one point differ."""
        if self.low is None or self.high is None:
            return self.value * (1 - self.between_starts), self.value * (1 + self.between_starts)
        return self.low, self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Points that are alike but for the settings that are compared, the best first.

    name: the settings that make the case, in words; empty where there is one case only.
    """

    name: str
    ranked: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """Return the point with the best value."""
        return self.ranked[0]

    @property
    def rivals(self) -> tuple[Candidate, ...]:
        """Return the other points that may be as good: equal ones, and by their intervals."""
        low, high = self.best.ends
        return tuple(o for o in self.ranked[1:] if o.ends[0] <= high and low <= o.ends[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch per device that fits, found by a search.

    settings: those that tell its series from the others. ran_out: the smallest batch size that
    does not fit. peak_mem_allocated_bytes: of the largest batch that fits, on the rank that needs
    most; None on a CPU.
    """

    settings: Mapping[str, Any]
    batch_size: int
    ran_out: int
    peak_mem_allocated_bytes: int | None


def find_metric(rows: Iterable[ScaledRow], name: str) -> Metric | None:
    """Return the metric of this name; None where no ok point has a value of it."""
    measured = [row for row in rows if row.status == "ok"]
    own = {metric.name: metric for metric in workload_metrics(measured)}
    found = own.get(name) or BY_NAME.get(name)
    has_value = found is not None and any(value_of(row, found) is not None for row in measured)
    return found if has_value else None


def usable_answer(rows: Sequence[ScaledRow], asked: Answer) -> Answer:
    """Return the answer by a metric that can rank points.

    That is the one that was asked for where it was measured and is no ratio to a baseline, else
    what the points reach by themselves.
    """
    usual = ("throughput", "busbw_gb_s", "memory_gb_s", "achieved_tflops_per_device")
    if asked.metric not in RATIOS and find_metric(rows, asked.metric) is not None:
        return asked
    for name in usual:
        if find_metric(rows, name) is not None:
            return replace(asked, metric=name, best="max")
    return replace(asked, metric="step_ms_p50", best="min")


def settings_of_cases(rows: Sequence[ScaledRow], answer: Answer) -> list[str]:
    """Return the settings that make cases: sizes of the problem, and what is not compared.

    Where the job asks for sizes alone, all other settings are compared. Batch and accumulation are
    compared themselves where it asks for nothing else; so are numbers of ranks that share the same
    work by layouts.
    """
    names = distinguishing_settings(rows)
    asked = [name for name in names if name in answer.over]
    if asked and {"batch", "grad_accumulation"}.issuperset(asked):
        return [name for name in names if name not in asked]
    free = [name for name in names if name not in _SIZES]
    compared = [name for name in asked if name in free] or free
    if any(name in DEGREES for name in compared) and {row.scaling for row in rows} == {"strong"}:
        compared.append("world_size")
    return [name for name in names if name not in compared]


def rank_cases(rows: Sequence[ScaledRow], answer: Answer, ranks: str) -> list[Case]:
    """Return the cases in the order of their settings; empty where no point has the metric."""
    metric = find_metric(rows, answer.metric)
    if metric is None:
        return []
    of_cases, names = settings_of_cases(rows, answer), distinguishing_settings(rows)
    compared = [name for name in names if name not in of_cases]
    groups: dict[tuple[Any, ...], list[ScaledRow]] = {}
    for row in rows:
        if row.status == "ok" and value_of(row, metric) is not None:
            key = tuple(setting_order(setting(row, name)) for name in of_cases)
            groups.setdefault(key, []).append(row)
    return [
        Case(
            name=formatting.settings_words(groups[key][0], of_cases, ranks),
            ranked=tuple(
                sorted(
                    (_candidate(row, metric, compared, ranks) for row in groups[key]),
                    key=lambda one: one.value,
                    reverse=answer.best == "max",
                )
            ),
        )
        for key in sorted(groups)
    ]


def in_order_of_answer(rows: Sequence[ScaledRow], answer: Answer) -> list[ScaledRow]:
    """Return the points case by case; in each the best first, and those without a value last.

    Points whose answer is a ratio to their baseline stand in the order of their settings.
    """
    cases, metric = settings_of_cases(rows, answer), find_metric(rows, answer.metric)
    names = sorted(distinguishing_settings(rows), key=lambda name: name not in cases)
    if metric is None or answer.metric in RATIOS:
        return sorted(rows, key=lambda row: [setting_order(setting(row, name)) for name in names])
    sign = -1 if answer.best == "max" else 1

    def place(row: ScaledRow) -> tuple[object, ...]:
        value = value_of(row, metric) if row.status == "ok" else None
        case = [setting_order(setting(row, name)) for name in cases]
        return (case, value is None, sign * (value or 0.0))

    return sorted(rows, key=place)


def _candidate(row: ScaledRow, metric: Metric, names: Sequence[str], ranks: str) -> Candidate:
    value = float(value_of(row, metric))
    low, high = interval_of(row, metric, value)
    name = short_name(row, names, ranks) if names else ""
    # Memory is the same in each start.
    scatter = 0.0 if metric.format == "gib" else _BETWEEN_STARTS
    return Candidate(name=name, value=value, low=low, high=high, between_starts=scatter, row=row)


def interval_of(
    row: ScaledRow, metric: Metric, value: float
) -> tuple[float, float] | tuple[None, None]:
    """Return the 95 % interval over rounds of a metric that is a ratio, a time or a rate.

    Times and rates follow the step time.
    """
    low, high = (getattr(row, f"{metric.name}_{end}", None) for end in ("low", "high"))
    if low is not None and high is not None:
        return low, high
    step, low, high = row.step_ms_p50, row.step_ms_low, row.step_ms_high
    if not step or not low or not high:
        return None, None
    if is_time(metric):
        return value * low / step, value * high / step
    if metric.name in _RATES or "/s" in metric.title:
        return value * step / high, value * step / low
    return None, None


def size_of(row: ScaledRow) -> int:
    """Return the bytes of a message or an array; 0 where the workload has none."""
    text = str(row.params.get(SIZE, ""))
    return int(text) if text.isdecimal() else 0


def is_time(metric: Metric) -> bool:
    """Return whether a metric is proportional to the step time."""
    return metric.name in _TIMES or metric.title.startswith("ms/")


def rows_compared(rows: Iterable[ScaledRow]) -> list[ScaledRow]:
    """Return the points that have a speed-up, without the baseline points."""
    return [r for r in rows if r.speed_up is not None and not r.is_baseline]


def with_most_ranks(rows: Iterable[ScaledRow]) -> list[ScaledRow]:
    """Return the points that are compared on the largest number of ranks."""
    compared = rows_compared(rows)
    most = max((row.world_size for row in compared), default=0)
    return [row for row in compared if row.world_size == most]


def groups_compared(
    rows: Sequence[ScaledRow], baseline: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], list[ScaledRow]]]:
    """Yield the values of the baseline's settings, and the points that are compared with them."""
    groups: dict[tuple[Any, ...], list[ScaledRow]] = {}
    for row in rows:
        groups.setdefault(tuple(setting(row, name) for name in baseline), []).append(row)
    for values in sorted(groups, key=lambda values: [setting_order(one) for one in values]):
        yield dict(zip(baseline, values, strict=True)), groups[values]


def largest_batches(rows: Sequence[ScaledRow]) -> tuple[LargestBatch, ...]:
    """Return one for each series in which a batch ran out of memory just above one that is ok.

    A list of batch sizes in a job leaves a wider gap: there, the largest is not known.
    """
    series: dict[tuple[str, ...], list[tuple[int, ScaledRow]]] = {}
    names = varying(rows, ("scaling", "batch"), always=("precision", "world_size"))
    for row in rows:
        if row.scaling == "weak" and row.batch_size is not None:
            key = tuple(str(setting(row, name)) for name in names)
            series.setdefault(key, []).append((row.batch_size, row))
    found = []
    for members in series.values():
        ran_out = min((batch for batch, row in members if row.status == "oom"), default=0)
        fits = [one for one in members if one[1].status == "ok" and one[0] < ran_out]
        if not fits:
            continue
        largest, row = max(fits, key=lambda one: one[0])
        if is_found(largest, ran_out):
            found.append(
                LargestBatch(
                    settings={name: setting(row, name) for name in names},
                    batch_size=largest,
                    ran_out=ran_out,
                    peak_mem_allocated_bytes=row.peak_mem_allocated_bytes,
                )
            )
    return tuple(sorted(found, key=lambda one: [setting_order(v) for v in one.settings.values()]))
