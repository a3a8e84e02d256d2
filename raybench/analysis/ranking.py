"""Which points are best: cases of points that compete, with a verdict on each case."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

from raybench.analysis.rows import (
    ScaledRow,
    is_column,
    known_settings,
    setting_of,
    setting_order,
    size_of,
    used_settings,
    value_of,
)
from raybench.analysis.run_data import RunData
from raybench.analysis.scaling import half_widths, samples_per_joule
from raybench.errors import UsageError
from raybench.job import registry
from raybench.job.declarations import declared_entries
from raybench.job.rounds import WORTHWHILE
from raybench.records.metrics import Metric
from raybench.results.metrics import memory_peak_gb_s
from raybench.results.point_row import PointRow

_STEP_TIMES = ("step_ms_p50", "step_ms_mean")
# Rates as shares of a peak.
_SHARES_OF_PEAK = ("mfu_pct", "mfu_6n_pct", "gemm_share_pct")


def follows_step_time(metric: Metric) -> bool:
    """Return whether a metric is a step time, or proportional to a step time."""
    return metric.name in _STEP_TIMES or metric.follows_step


def is_speed(metric: Metric) -> bool:
    """Return whether the best point by a metric is the fastest point."""
    return metric.is_rate or metric.name in _SHARES_OF_PEAK or follows_step_time(metric)


def relative_half_width(low: float | None, value: float | None, high: float | None) -> float | None:
    """Return half the width of an interval / the value.

    None if a number is missing, or the value is 0.
    """
    if low is None or high is None or not value:
        return None
    return (high - low) / 2 / value


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point that may be the best of its case."""

    # Compared settings that the point uses (`used_settings`).
    settings: Mapping[str, Any]
    # Value of the metric.
    value: float
    # 95 % interval of the value over the rounds of the run; None if unknown.
    low: float | None
    high: float | None
    # Whether the value is the same in each start, such as memory.
    is_exact: bool
    row: ScaledRow

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval / the value; None if unknown."""
        return relative_half_width(self.low, self.value, self.high)

    @property
    def is_sure(self) -> bool:
        """Whether the scatter of the value between starts is known."""
        return self.is_exact or self.low is not None

    def may_equal(self, other: Candidate) -> bool:
        """Return whether intervals overlap; without both intervals, whether values are equal."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            # If the scatter between starts is known for only one point, the points may be equal.
            return self.value == other.value or self.is_sure != other.is_sure
        return self.low <= other.high and other.low <= self.high


class RankingVerdict(StrEnum):
    """What is known of the best point of a case."""

    # No other point competes.
    ALONE = "alone"
    # Other points may be as good.
    UNDECIDED = "undecided"
    # Points have a single start each, so the next run may have another order.
    FIRST_IN_THIS_RUN = "first_in_this_run"
    BEST = "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCase:
    """Points that differ in the compared settings alone, the best first."""

    # The settings that make the case.
    settings: Mapping[str, Any]
    ranked: tuple[Candidate, ...]
    # Whether the highest value is the best, as for rates; else the lowest, as for times.
    highest_is_best: bool

    @property
    def best(self) -> Candidate:
        """The point with the best value."""
        return self.ranked[0]

    @property
    def rivals(self) -> tuple[Candidate, ...]:
        """Points that may be as good as the best point."""
        return tuple(other for other in self.ranked[1:] if self.best.may_equal(other))

    @property
    def verdict(self) -> RankingVerdict:
        """What is known of the best point."""
        if len(self.ranked) == 1:
            return RankingVerdict.ALONE
        if self.rivals:
            return RankingVerdict.UNDECIDED
        return RankingVerdict.BEST if self.best.is_sure else RankingVerdict.FIRST_IN_THIS_RUN

    @property
    def gain(self) -> float:
        """How many times as good the best point is as the second best.

        Infinite if the worse value is 0.
        """
        best, second = self.ranked[0].value, self.ranked[1].value
        if best == second:
            return 1.0
        larger, smaller = (best, second) if self.highest_is_best else (second, best)
        return larger / smaller if smaller else math.inf

    @property
    def has_interval(self) -> bool:
        """Whether a sentence on the case has an interval."""
        # A sentence names the best point and at most two rivals.
        named = (self.best, *self.rivals[:2])
        return any(candidate.half_width is not None for candidate in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingMeasured:
    """No ok point has a number that points can be ranked by."""

    kind: ClassVar = "nothing_measured"
    asks_for_rounds: ClassVar = False
    has_interval: ClassVar = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OverCases:
    """Which settings win most cases."""

    # A case whose best point has these settings.
    case: RankedCase
    # Number of cases that these settings win; 0 if no case is decided.
    wins: int
    # Number of cases with several points.
    case_count: int
    # Number of cases with several points, but without a clear winner.
    undecided: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The points of each case, ranked by a metric."""

    kind: ClassVar = "ranking"
    metric: Metric
    highest_is_best: bool
    cases: tuple[RankedCase, ...]
    # None unless several cases have several points.
    over_cases: OverCases | None
    # Points whose values the report shows as large figures, the best value first.
    figures: tuple[tuple[RankedCase, Candidate], ...]

    @property
    def described_cases(self) -> tuple[RankedCase, ...]:
        """The cases that the sentences are about."""
        if self.over_cases:
            # One of the cases whose best settings are the best in most cases.
            return (self.over_cases.case,)
        return tuple(case for case in self.cases if len(case.ranked) > 1)

    @property
    def asks_for_rounds(self) -> bool:
        """Whether more rounds are needed to decide."""
        # A winner of most cases is an answer, although some cases are undecided.
        if self.over_cases and self.over_cases.wins:
            return False
        return any(case.verdict is RankingVerdict.UNDECIDED for case in self.described_cases)

    @property
    def has_interval(self) -> bool:
        """Whether a sentence on the ranking has an interval."""
        return any(case.has_interval for case in self.described_cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Values of points that do not compete.

    `figures`, `least` and `most` cover only the largest messages or arrays, and only all_reduce if
    the run has this collective.
    """

    kind: ClassVar = "values"
    asks_for_rounds: ClassVar = False
    metric: Metric
    highest_is_best: bool
    # All cases, with one point each.
    cases: tuple[RankedCase, ...]
    # Points whose values the report shows as large figures, the best value first.
    figures: tuple[tuple[RankedCase, Candidate], ...]
    # The case with the lowest value.
    least: RankedCase
    # The case with the highest value.
    most: RankedCase
    # All sizes of messages or arrays in bytes, ascending.
    sizes: tuple[int, ...]
    # Whether the run has other collectives besides all_reduce.
    is_all_reduce_of_several: bool
    # Step of the smallest message, with the world size of `most`; None unless bus bandwidths of
    # several sizes were measured.
    smallest_step_ms: float | None

    @property
    def has_interval(self) -> bool:
        """Whether a sentence on the values has an interval."""
        # If the lowest value is the best, a sentence on several cases gives a range.
        has_range = len(self.cases) > 1 and not self.highest_is_best
        described = (self.most, self.least) if has_range else (self.most,)
        return any(case.best.half_width is not None for case in described)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfDatasheet:
    """The share of the datasheet's peak that a point reaches."""

    # Peak memory bandwidth; None if the share is of the peak TFLOP/s.
    memory_peak_gb_s: float | None
    share: float


def with_declaration(metric: Metric | None, rows: Iterable[ScaledRow]) -> Metric | None:
    """Return a metric with the unit, `over_step` and format that its workload declares.

    The tables do not store these, so the class of the workload is read. A column of raybench is
    returned unchanged.
    """
    if metric is None or is_column(metric):
        return metric
    for workload in dict.fromkeys(row.workload for row in rows):
        declarations: Iterable[Any] = ()
        # A workload that cannot be imported here declares nothing.
        with suppress(KeyError, UsageError):
            workload_class = registry.load_workload(workload)
            declarations = declared_entries(workload_class, "metrics", "name", "unit")
        for declaration in declarations:
            if declaration.name == metric.name:
                return replace(
                    metric,
                    unit=declaration.unit,
                    over_step=getattr(declaration, "over_step", None),
                    format=getattr(declaration, "format", metric.format),
                )
    return metric


def make_cases(
    data: RunData,
    metric: Metric | None,
    case_settings: Sequence[str],
    compared: Sequence[str],
    highest_is_best: bool,
) -> tuple[RankedCase, ...]:
    """Return the cases of ok points that have the metric, sorted by their settings.

    Args:
        case_settings: points that agree in these settings are one case.
        compared: the settings in which the points of a case may differ.
    """
    if metric is None:
        return ()
    # Memory is the same in each start, so it needs no interval.
    is_exact = metric.format == "gib"
    log_half_widths = {} if is_exact else _log_half_widths(data, metric)
    candidates_by_case: dict[tuple[Any, ...], list[Candidate]] = {}
    for row in data.ok_rows:
        if (value := value_of(row, metric)) is None:
            continue
        half_width = log_half_widths.get(row.point_id)
        candidate = Candidate(
            settings=used_settings(row, compared),
            value=float(value),
            low=None if half_width is None else value * math.exp(-half_width),
            high=None if half_width is None else value * math.exp(half_width),
            is_exact=is_exact,
            row=row,
        )
        case = tuple(setting_order(setting_of(row, name)) for name in case_settings)
        candidates_by_case.setdefault(case, []).append(candidate)
    cases = []
    for case in sorted(candidates_by_case):
        candidates = candidates_by_case[case]
        ranked = sorted(candidates, key=lambda point: point.value, reverse=highest_is_best)
        settings = known_settings(candidates[0].row, case_settings)
        cases.append(
            RankedCase(settings=settings, ranked=tuple(ranked), highest_is_best=highest_is_best)
        )
    return tuple(cases)


def _log_half_widths(data: RunData, metric: Metric) -> dict[str, float]:
    """Return half the width of each point's 95 % interval over the rounds, as a logarithm."""

    def value_of_round(row: PointRow) -> float | None:
        # Rounds have no column for samples per joule, so it is computed here.
        if metric.name == "samples_per_joule":
            return samples_per_joule([row])
        value = value_of(row, metric)
        return float(value) if isinstance(value, int | float) else None

    logs_of_rows = [(row, data.trials.logs(row, value_of_round)) for row in data.rows]
    return {row.point_id: half_width for row, half_width in half_widths(logs_of_rows)}


def rounds_to_decide(row: ScaledRow) -> int:
    """Return how many rounds should decide: 3, or twice as many as the point has."""
    return WORTHWHILE if row.rounds < WORTHWHILE else 2 * row.rounds


def rank(
    metric: Metric | None, cases: tuple[RankedCase, ...]
) -> Ranking | Values | NothingMeasured:
    """Return the ranking of the cases, or only their values if no case has two points."""
    if metric is None or not cases:
        return NothingMeasured()
    contested = [case for case in cases if len(case.ranked) > 1]
    if not contested:
        return _values(metric, cases)
    # Show all points of a single case, or else the best point of each case.
    figures = [(case, case.best) for case in contested]
    if len(cases) == 1:
        figures = [(cases[0], candidate) for candidate in cases[0].ranked]
    return Ranking(
        metric=metric,
        highest_is_best=cases[0].highest_is_best,
        cases=cases,
        over_cases=_over_cases(contested) if len(contested) > 1 else None,
        figures=_best_first(figures),
    )


def _best_first(
    figures: Sequence[tuple[RankedCase, Candidate]],
) -> tuple[tuple[RankedCase, Candidate], ...]:
    """Sort points of cases, the best value first."""
    highest_is_best = figures[0][0].highest_is_best
    return tuple(sorted(figures, key=lambda figure: figure[1].value, reverse=highest_is_best))


def _values(metric: Metric, cases: tuple[RankedCase, ...]) -> Values:
    """Return the values of points that are not ranked: those at the largest size, and ranges.

    Args:
        cases: each has one point, which is its best.
    """
    # If the run has all_reduce, its values stand for all collectives.
    all_reduces = [case for case in cases if case.best.row.params.get("operation") == "all_reduce"]
    shown = all_reduces or list(cases)
    largest_size = max(size_of(case.best.row) for case in shown)
    largest = [case for case in shown if size_of(case.best.row) == largest_size]
    # Append the first case again, so that it becomes the last if all values are equal.
    ascending = sorted([*largest, largest[0]], key=lambda case: case.best.value)
    least, most = ascending[0], ascending[-1]
    # 0 stands for a point without a size.
    sizes = sorted({size_of(case.best.row) for case in cases} - {0})
    smallest_step_ms = 0.0
    if metric.name == "busbw_gb_s" and len(sizes) > 1:
        # The time of the smallest message is the latency of a collective.
        smallest = [case.best.row for case in shown if size_of(case.best.row) == sizes[0]]
        world_size = most.best.row.world_size
        steps_ms = [row.step_ms_p50 or 0.0 for row in smallest if row.world_size == world_size]
        smallest_step_ms = min(steps_ms, default=0.0)
    return Values(
        metric=metric,
        highest_is_best=cases[0].highest_is_best,
        cases=cases,
        figures=_best_first([(case, case.best) for case in largest]),
        least=least,
        most=most,
        sizes=tuple(sizes),
        is_all_reduce_of_several=len(shown) < len(cases),
        smallest_step_ms=smallest_step_ms or None,
    )


def _over_cases(contested: Sequence[RankedCase]) -> OverCases:
    """Return which settings win most cases, with one of these cases as an example."""
    # `is_sure` needs several starts. If every case has a single start, all cases count.
    sure = [case for case in contested if case.best.is_sure]
    decided = [case for case in sure or contested if not case.rivals]
    undecided = len(contested) - len(decided)
    if not decided:
        case = max(contested, key=lambda case: case.gain)
        return OverCases(case=case, wins=0, case_count=len(contested), undecided=undecided)

    def best_settings(case: RankedCase) -> str:
        return str(case.best.settings)

    wins_by_settings = Counter(map(best_settings, decided))

    def wins_of(case: RankedCase) -> tuple[int, float]:
        # Tie-breaker: the highest value; if the lowest value is the best, the largest gain.
        tie_breaker = case.best.value if case.highest_is_best else case.gain
        return wins_by_settings[best_settings(case)], tie_breaker

    case = max(decided, key=wins_of)
    return OverCases(
        case=case,
        wins=wins_by_settings[best_settings(case)],
        case_count=len(contested),
        undecided=undecided,
    )


def share_of_datasheet(metric: Metric, row: ScaledRow) -> OfDatasheet | None:
    """Return the share of the datasheet's peak; None if the peak or the value is unknown.

    Only TFLOP/s and memory bandwidth have a peak.
    """
    if metric.name == "memory_gb_s":
        peak_gb_s = memory_peak_gb_s(str(row.device_name))
        if peak_gb_s is None or row.memory_gb_s is None:
            return None
        return OfDatasheet(memory_peak_gb_s=peak_gb_s, share=row.memory_gb_s / peak_gb_s)
    if metric.name != "achieved_tflops_per_device" or row.mfu_pct is None:
        return None
    return OfDatasheet(memory_peak_gb_s=None, share=row.mfu_pct / 100)
