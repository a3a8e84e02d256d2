"""What a run answers: the best point of each case, speed-ups, ties, and what is still open.

`decide` returns a `RunAnswer` of numbers, settings and verdicts; `raybench.report.words` has the
sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar

from raybench.analysis.doubts import MEMORY_DOUBTS, RATIO_DOUBTS, DoubtGroup
from raybench.analysis.ranking import (
    Candidate,
    NothingMeasured,
    RankedCase,
    Ranking,
    Values,
    make_cases,
    rank,
    relative_half_width,
    rounds_to_decide,
    with_declaration,
)
from raybench.analysis.references import has_impossible
from raybench.analysis.rows import (
    DEGREES,
    ScaledRow,
    batch_column,
    find_metric,
    known_settings,
    rows_compared,
    setting_of,
    setting_order,
    value_of,
    varying,
    with_most_ranks,
)
from raybench.analysis.run_data import RunData
from raybench.analysis.scaling import LOSSES, has_causes
from raybench.analysis.uneven import Gain, UnevenFleet, gain_over
from raybench.job.answer import Answer
from raybench.job.model import answer_of_run
from raybench.job.rounds import BETWEEN_ROUNDS_S, WORTHWHILE, is_largest_known
from raybench.records.doubts import DoubtKind, LossesUnknown, NotCompared
from raybench.records.metrics import Metric
from raybench.records.status import RunStatus, Status
from raybench.results.point_row import PointRow, is_slowed_by_one_rank

# Metrics that compare with a baseline instead of ranking the points.
RATIO_METRICS = ("speed_up", "efficiency")
# Largest number of series or gains that a sentence lists one by one.
MAX_LISTED = 4
# Losses below 1 % of the step are ignored.
MIN_LOSS = 0.01
# Sizes of the problem. Points that differ in a size do not compete: each size is a case.
_SIZE_SETTINGS = (
    *("workload", "scaling", "batch", "world_size", "slow_ratio", "slow_count", "operation"),
    *("grad_accumulation", "size_bytes", "m", "n", "k", "preset", "phase", "seq_len", "mode"),
    "scope",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUpRange:
    """The speed-up of a point, or the range of the speed-ups of several points."""

    low: float
    high: float
    # The settings that the points share.
    settings: Mapping[str, Any]
    # Half the width of the 95 % interval / the speed-up; the largest of several points. None if
    # the interval of a point is unknown.
    half_width: float | None
    rows: tuple[ScaledRow, ...]
    # Rounds that should decide whether the speed-up is above 1; None if that is known.
    rounds_to_decide: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch per device that fits, found by a search."""

    # Precision, world_size and other settings that differ between series.
    settings: Mapping[str, Any]
    batch_size: int
    # The smallest batch size that does not fit.
    ran_out: int
    # Peak memory of the rank with the largest peak; None on a CPU.
    peak_mem_allocated_bytes: int | None
    # The point of this batch.
    row: ScaledRow


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatches:
    """The largest batch of each series, the largest first."""

    kind: ClassVar = "largest_batches"
    asks_for_rounds: ClassVar = False
    has_interval: ClassVar = False
    batches: tuple[LargestBatch, ...]
    # The settings in which the series differ.
    differing_settings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MainLoss:
    """The cause that is the largest loss of most points."""

    # One of LOSSES; None if the causes of all points are unknown.
    cause: str | None
    # Number of points whose largest loss is `cause`.
    count: int
    # Number of points whose efficiency is below 1 for certain.
    losing: int
    # Number of all points.
    points: int
    # Smallest and largest share of `cause` in the loss of a point; 0 unless all losing points have
    # the same cause.
    shares: tuple[float, float] = (0.0, 0.0)
    # Losing points whose causes are unknown.
    unknown: tuple[ScaledRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUps:
    """Speed-ups on the most devices over a baseline on fewer devices."""

    kind: ClassVar = "speed_ups"
    asks_for_rounds: ClassVar = False
    world_size: int
    baseline: Mapping[str, Any]
    # A range for each value of the first setting in which points differ, or a single range.
    series: tuple[SpeedUpRange, ...]
    # The speed-up of perfect scaling; None if a point has no efficiency, or devices of several
    # models.
    ideal: float | None
    # Whether a point has devices of several models.
    has_several_models: bool
    # The smallest and largest efficiency, if a point has devices of several models.
    efficiencies: tuple[float, float] | None
    main_loss: MainLoss | None

    @property
    def has_interval(self) -> bool:
        """Whether a sentence on the speed-ups has an interval."""
        with_interval = [each for each in self.series if each.half_width is not None]
        has_point_with_interval = any(len(each.rows) == 1 for each in with_interval)
        # A range over several points has an interval only if all series have an interval.
        return has_point_with_interval or len(with_interval) == len(self.series)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Speed-ups over a baseline, by the settings that the baseline names; the largest first."""

    kind: ClassVar = "gains"
    baseline: Mapping[str, Any]
    gains: tuple[SpeedUpRange, ...]

    @property
    def described_gains(self) -> tuple[SpeedUpRange, ...]:
        """The gains that a sentence has room for."""
        return self.gains[:MAX_LISTED]

    @property
    def asks_for_rounds(self) -> bool:
        """Whether more rounds are needed to decide."""
        return any(gain.rounds_to_decide is not None for gain in self.described_gains)

    @property
    def has_interval(self) -> bool:
        """Whether a sentence on the gains has an interval."""
        return any(gain.half_width is not None for gain in self.described_gains)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestShares:
    """Which shares of work were best most often, and where they gained most."""

    kind: ClassVar = "best_shares"
    asks_for_rounds: ClassVar = False
    # The shares that were best in most fleets; None if no fleet has a winner.
    shares: str | None
    # Number of fleets in which `shares` were best.
    wins: int
    # Number of fleets without a winner.
    undecided: int
    # The fleet in which `shares` gained most; without a winner, the first fleet.
    fleet: UnevenFleet
    # Gain of the best shares of `fleet` over its second best shares.
    gain: Gain
    # Whether each scenario of the counted fleets has several rounds.
    is_sure: bool

    @property
    def has_interval(self) -> bool:
        """Whether a sentence on the shares has an interval."""
        return self.gain.half_width is not None


Conclusion = NothingMeasured | LargestBatches | SpeedUps | Gains | Ranking | Values | BestShares


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncompared:
    """The points without a speed-up, although the job asks for speed-ups."""

    # Number of points for each reason.
    reasons: Mapping[NotCompared, int]
    # Number of ok points that are not a baseline.
    points: int

    @property
    def count(self) -> int:
        """Number of points without a speed-up."""
        return sum(self.reasons.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreRounds:
    """How long it takes until a run has enough rounds."""

    # Wanted number of rounds.
    rounds: int
    # Expected time of the missing rounds.
    seconds: float
    # Number of rounds that the run has.
    done: int


class Next(StrEnum):
    """The most useful command after a run."""

    RETRY = "retry"
    RESUME = "resume"
    FULL_REPORT = "full_report"


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCommand:
    """The most useful command of raybench after a run."""

    kind: Next
    # The command line without `raybench`.
    words: tuple[str, ...]
    # Time that the added rounds take; None if it adds no rounds.
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunAnswer:
    """What a run answers, and what is still open."""

    data: RunData
    # The question of the job.
    asked: Answer
    # Points that agree in these settings are one case.
    case_settings: tuple[str, ...]
    # Settings in which the points of a case differ.
    compared_settings: tuple[str, ...]
    # The question by which the points of a case are ranked; its metric needs no baseline.
    ranked_by: Answer
    # The metric of `ranked_by`; None if it was not measured.
    metric: Metric | None
    # Sorted by `case_settings`.
    cases: tuple[RankedCase, ...]
    # All points, case by case, the best first.
    ordered: tuple[ScaledRow, ...]
    # Sorted by their settings.
    largest_batches: tuple[LargestBatch, ...]
    # The answer on uneven shares; None if the run has none.
    shares: BestShares | None
    # The answer if uneven shares are ignored.
    conclusion: Conclusion
    ranking: Ranking | Values | NothingMeasured
    uncompared: Uncompared | None
    # Number of ok points with a single round; 0 if they leave no interval of the answer unknown.
    single_starts: int
    # Number of points with impossible numbers.
    impossible: int
    more_rounds: MoreRounds | None
    next_command: NextCommand

    @property
    def leading(self) -> Conclusion:
        """The answer that a report begins with."""
        return self.shares or self.conclusion

    @cached_property
    def doubts(self) -> tuple[DoubtGroup, ...]:
        """The doubts about the run; the doubts that can change the answer come first."""
        concerning: list[DoubtGroup] = []
        other: list[DoubtGroup] = []
        for group in self.data.doubts:
            (concerning if self.concerns(group.worst.kind) else other).append(group)
        return (*concerning, *other)

    @property
    def is_of_memory(self) -> bool:
        """Whether the answer is about memory, and not about times or rates."""
        is_metric = self.metric is not None and self.metric.format == "gib"
        return is_metric or isinstance(self.leading, LargestBatches)

    def concerns(self, kind: DoubtKind) -> bool:
        """Return whether a doubt of this kind can change the answer."""
        if self.is_of_memory:
            return kind in MEMORY_DOUBTS
        if kind in RATIO_DOUBTS:
            return isinstance(self.leading, SpeedUps | Gains)
        # A slow rank is no doubt about shares, which are compared because a rank is slow.
        return not (kind is DoubtKind.SLOW_RANK and isinstance(self.leading, BestShares))

    @property
    def table_settings(self) -> list[str]:
        """The settings in which points differ, `case_settings` first."""
        return _cases_first(self.data.settings, self.case_settings)

    @property
    def contested(self) -> list[RankedCase]:
        """The cases with at least two points."""
        return [case for case in self.cases if len(case.ranked) > 1]


def decide(data: RunData) -> RunAnswer:
    """Return what a run answers."""
    question = _question_of_job(data)
    case_settings = _case_settings(data, question)
    compared = tuple(name for name in data.settings if name not in case_settings)
    ranked_by = _ranked_by(data, question)
    metric = with_declaration(find_metric(data.rows, ranked_by.metric), data.rows)
    cases = make_cases(data, metric, case_settings, compared, ranked_by.best == "max")
    batches = _largest_batches(data.rows)
    shares, ranking = best_shares(data.fleets), rank(metric, cases)
    conclusion = _choose_conclusion(data, question, batches, ranking)
    uncompared = None if batches else _uncompared(data, question)
    # Memory is the same in each round, so more rounds do not help.
    is_exact = bool(batches) or (metric is not None and metric.format == "gib")
    more_rounds = _more_rounds(data)
    return RunAnswer(
        data=data,
        asked=question,
        case_settings=case_settings,
        compared_settings=compared,
        ranked_by=ranked_by,
        metric=metric,
        cases=cases,
        ordered=_rows_best_first(data, question, case_settings),
        largest_batches=batches,
        shares=shares,
        conclusion=conclusion,
        ranking=ranking,
        uncompared=uncompared,
        single_starts=0 if is_exact else _single_starts(data, shares or conclusion),
        impossible=sum(map(has_impossible, data.rows)),
        more_rounds=more_rounds,
        next_command=_next_command(data, None if is_exact else more_rounds),
    )


def _question_of_job(data: RunData) -> Answer:
    """Return the question of the job, with the names of settings that rows have."""
    # The job file says batch_size or global_batch_size where rows say `batch`.
    batch_columns = [column for column in map(batch_column, data.rows) if column]
    name_in_job = batch_columns[0] if batch_columns else "batch"
    names = [name_in_job if name == "batch" else name for name in varying(data.rows)]
    on_cpu = bool(data.run.cpu_section)
    question = answer_of_run(data.run.job_text, data.overrides, names, on_cpu=on_cpu)
    # `over` has the settings whose values are compared.
    compared = tuple("batch" if name == name_in_job else name for name in question.over)
    return replace(question, over=compared)


def _case_settings(data: RunData, question: Answer) -> tuple[str, ...]:
    """Return the settings that are not compared; their values make the cases."""
    asked_settings = [name for name in data.settings if name in question.over]
    # Batch and accumulation are sizes, but a job that asks for nothing else compares them.
    if asked_settings and {"batch", "grad_accumulation"}.issuperset(asked_settings):
        return tuple(name for name in data.settings if name not in asked_settings)
    # Sizes of the problem are not compared, even if the job asks for them.
    not_sizes = [name for name in data.settings if name not in _SIZE_SETTINGS]
    # If the job asks for sizes alone, or for nothing, all other settings are compared.
    compared = [name for name in asked_settings if name in not_sizes] or not_sizes
    # In strong scaling the work does not depend on the number of ranks, so layouts with different
    # numbers of ranks compete.
    is_strong = {row.scaling for row in data.rows} == {"strong"}
    if is_strong and any(name in DEGREES for name in compared):
        compared.append("world_size")
    return tuple(name for name in data.settings if name not in compared)


def _cases_first(settings: Iterable[str], case_settings: Sequence[str]) -> list[str]:
    """Return the settings with `case_settings` first."""
    return sorted(settings, key=lambda name: name not in case_settings)


def _rows_best_first(
    data: RunData, question: Answer, case_settings: Sequence[str]
) -> tuple[ScaledRow, ...]:
    """Return the rows case by case, the best first; by settings if the metric cannot rank them."""
    # A ratio to the baseline does not rank points.
    metric = None if question.metric in RATIO_METRICS else find_metric(data.rows, question.metric)
    names = list(case_settings) if metric else _cases_first(data.settings, case_settings)

    def order(row: ScaledRow) -> tuple[object, ...]:
        case = [setting_order(setting_of(row, name)) for name in names]
        value = value_of(row, metric) if metric and row.status == "ok" else None
        sign = -1 if question.best == "max" else 1
        # Points without a value come last in their case.
        return case, value is None, sign * (value or 0.0)

    return tuple(sorted(data.rows, key=order))


def _ranked_by(data: RunData, question: Answer) -> Answer:
    """Return the question with a metric that was measured and needs no baseline."""
    can_rank = question.metric not in (*RATIO_METRICS, "batch_size")
    if can_rank and find_metric(data.rows, question.metric):
        return question
    for name in ("throughput", "busbw_gb_s", "memory_gb_s", "achieved_tflops_per_device"):
        if find_metric(data.rows, name) is not None:
            return replace(question, metric=name, best="max")
    return replace(question, metric="step_ms_p50", best="min")


def _largest_batches(rows: Iterable[ScaledRow]) -> tuple[LargestBatch, ...]:
    """Return the largest batch that fits, for each series whose search has ended."""
    rows = list(rows)
    # A series is all points in weak scaling that differ in the batch alone.
    series: dict[tuple[str, ...], list[ScaledRow]] = {}
    names = varying(rows, ("scaling", "batch"), always=("precision", "world_size"))
    for row in rows:
        if row.scaling == "weak" and row.batch_size is not None:
            key = tuple(str(setting_of(row, name)) for name in names)
            series.setdefault(key, []).append(row)
    batches = []
    for series_rows in series.values():
        too_large = [row.batch_size or 0 for row in series_rows if row.status is Status.OOM]
        # 0: the search has not reached a batch that does not fit.
        smallest_too_large = min(too_large, default=0)
        fitting = {row.batch_size or 0: row for row in series_rows if row.status is Status.OK}
        largest = max((size for size in fitting if size < smallest_too_large), default=None)
        if largest is None or not is_largest_known(largest, smallest_too_large):
            continue
        row = fitting[largest]
        batches.append(
            LargestBatch(
                settings={name: setting_of(row, name) for name in names},
                batch_size=largest,
                ran_out=smallest_too_large,
                peak_mem_allocated_bytes=row.peak_mem_allocated_bytes,
                row=row,
            )
        )

    def order(batch: LargestBatch) -> list[object]:
        return [setting_order(value) for value in batch.settings.values()]

    return tuple(sorted(batches, key=order))


def _choose_conclusion(
    data: RunData,
    question: Answer,
    batches: Sequence[LargestBatch],
    ranking: Ranking | Values | NothingMeasured,
) -> Conclusion:
    """Return the largest batches, or else the speed-ups, or else the ranking."""
    if batches:
        largest_first = sorted(batches, key=lambda batch: -batch.batch_size)
        differing = []
        for name in largest_first[0].settings:
            texts = {str(batch.settings[name]) for batch in largest_first}
            if len(texts) > 1:
                differing.append(name)
        return LargestBatches(batches=tuple(largest_first), differing_settings=tuple(differing))
    asks_for_ratio = question.metric in RATIO_METRICS
    has_speed_ups = bool(rows_compared(data.rows))
    if not asks_for_ratio or not has_speed_ups:
        return ranking
    return _speed_ups(data) if is_scaling(data) else _gains(data)


def is_scaling(data: RunData) -> bool:
    """Return whether points are compared with a baseline on fewer devices."""
    base_world_size = data.run.baseline.get("world_size")
    rows = with_most_ranks(data.rows)
    if base_world_size is None or not rows:
        return False
    return rows[0].world_size > int(base_world_size)


def speed_up_half_width(row: ScaledRow) -> float | None:
    """Return half the width of the 95 % interval of a speed-up / the speed-up; None if unknown."""
    return relative_half_width(row.speed_up_low, row.speed_up, row.speed_up_high)


def _speed_up_range(rows: Sequence[ScaledRow], settings: Mapping[str, Any]) -> SpeedUpRange:
    """Return the speed-up of one point, or the range over several points."""
    speed_ups = [row.speed_up or 0.0 for row in rows]
    # The best of many points is best partly by chance, so take the widest interval of all points.
    half_widths = [speed_up_half_width(row) for row in rows]
    return SpeedUpRange(
        low=min(speed_ups),
        high=max(speed_ups),
        settings=settings,
        half_width=None if None in half_widths else max(half or 0.0 for half in half_widths),
        rows=tuple(rows),
    )


def _speed_ups(data: RunData) -> SpeedUps:
    """Return the speed-ups of the points with the most ranks."""
    rows, baseline = with_most_ranks(data.rows), data.run.baseline
    # A series for each value of the first setting that varies, but for sizes of the problem. A
    # single series if there are too many values.
    sizes = ("batch", "world_size", "scaling", "workload")
    series_names = [name for name in varying(rows) if name not in sizes][:1]
    rows_by_series: dict[str, list[ScaledRow]] = {}
    for row in rows:
        rows_by_series.setdefault(str(known_settings(row, series_names)), []).append(row)
    if len(rows_by_series) > MAX_LISTED:
        rows_by_series, series_names = {"": rows}, []
    series = []
    for series_rows in rows_by_series.values():
        settings = known_settings(series_rows[0], series_names)
        series.append(_speed_up_range(series_rows, settings))
    # The ratio of ranks is the ideal only if all devices are equally fast.
    has_several_models = any(len(set(row.models_by_rank or ())) > 1 for row in rows)
    efficiencies = sorted(row.efficiency for row in rows if row.efficiency is not None)
    has_all_efficiencies = len(efficiencies) == len(rows)
    ideal = None
    if not has_several_models and has_all_efficiencies:
        ideal = rows[0].world_size / int(baseline["world_size"])
    has_range = has_several_models and bool(efficiencies)
    return SpeedUps(
        world_size=rows[0].world_size,
        baseline=baseline,
        series=tuple(series),
        ideal=ideal,
        has_several_models=has_several_models,
        efficiencies=(efficiencies[0], efficiencies[-1]) if has_range else None,
        main_loss=_main_loss(rows) if has_several_models or has_all_efficiencies else None,
    )


def _main_loss(rows: Sequence[ScaledRow]) -> MainLoss | None:
    """Return the cause that is the largest loss of most points; None if no point loses."""
    losing = []
    for row in rows:
        # A point whose interval reaches 1 may have lost nothing.
        may_lose_nothing = row.efficiency_high is not None and row.efficiency_high >= 1
        if row.efficiency is not None and row.efficiency < 1 - MIN_LOSS and not may_lose_nothing:
            losing.append(row)
    if not losing:
        return None
    unknown = tuple(row for row in losing if not has_causes(row))
    # Cause -> number of points of which the cause is the largest loss.
    point_counts: Counter[str] = Counter()
    for row in losing:
        if has_causes(row):
            # A slow rank is a cause only if it stands out.
            causes = [name for name in LOSSES if name != "lost_wait" or is_slowed_by_one_rank(row)]
            point_counts[max(causes, key=lambda name: getattr(row, name) or 0.0)] += 1
    cause = max(point_counts, key=lambda name: point_counts[name], default=None)
    count = 0 if cause is None else point_counts[cause]
    shares = [0.0]
    # If all losing points have the same main cause, give its share in the loss of each point.
    if cause is not None and count == len(losing):
        shares = [min(1.0, getattr(row, cause) / (1 - (row.efficiency or 0.0))) for row in losing]
    return MainLoss(
        cause=cause,
        count=count,
        losing=len(losing),
        points=len(rows),
        shares=(min(shares), max(shares)),
        unknown=unknown,
    )


def reasons_of_unknown_losses(rows: Iterable[ScaledRow]) -> dict[LossesUnknown, int]:
    """Return the number of points for each reason of unknown losses, the largest number first."""
    reasons = Counter(row.why_no_losses for row in rows if row.why_no_losses)
    return dict(reasons.most_common())


def _gains(data: RunData) -> Gains:
    """Return a speed-up for each combination of values of the settings that the baseline names."""
    baseline = data.run.baseline
    # Key: values of the settings that the baseline names, in its order.
    groups: dict[tuple[Any, ...], list[ScaledRow]] = {}
    for row in rows_compared(data.rows):
        groups.setdefault(tuple(setting_of(row, name) for name in baseline), []).append(row)
    gains = []
    for values in sorted(groups, key=lambda values: list(map(setting_order, values))):
        rows, settings = groups[values], dict(zip(baseline, values, strict=True))
        changed = {
            name: value for name, value in settings.items() if str(value) != str(baseline.get(name))
        }
        # Only the settings that differ from the baseline describe a gain.
        gain = _speed_up_range(rows, changed or settings)
        # A single point is undecided if the interval of its speed-up contains 1.
        low, high = rows[0].speed_up_low, rows[0].speed_up_high
        if len(rows) == 1 and low and high and low < 1 < high:
            gain = replace(gain, rounds_to_decide=rounds_to_decide(rows[0]))
        gains.append(gain)
    return Gains(baseline=baseline, gains=tuple(sorted(gains, key=lambda gain: -gain.high)))


def best_shares(fleets: Sequence[UnevenFleet]) -> BestShares | None:
    """Return which way to share a batch was best most often, and gained most; None for no fleets.

    `shares` is how the batch is divided among fast and slow devices. A fleet is all points of a run
    that differ in `shares` alone. A fleet is undecided if several ways are equally good. If any
    fleet has several rounds, fleets with a single round are undecided too.

    Args:
        fleets: all fleets of one run.
    """
    if not fleets:
        return None
    # If no fleet has several rounds, the fleets only show what was fastest in this run.
    sure = [fleet for fleet in fleets if fleet.is_sure]
    decided = [fleet for fleet in sure or fleets if not fleet.tied_shares()]
    undecided = len(fleets) - len(decided)
    if not decided:
        return BestShares(
            shares=None,
            wins=0,
            undecided=undecided,
            fleet=fleets[0],
            gain=_gain_of_best(fleets[0]),
            is_sure=bool(sure),
        )
    shares, wins = Counter(fleet.best.shares for fleet in decided).most_common(1)[0]
    won = [(_gain_of_best(fleet), fleet) for fleet in decided if fleet.best.shares == shares]
    gain, fleet = max(won, key=lambda pair: pair[0].gain)
    return BestShares(
        shares=shares, wins=wins, undecided=undecided, fleet=fleet, gain=gain, is_sure=bool(sure)
    )


def _gain_of_best(fleet: UnevenFleet) -> Gain:
    """Return the gain of the best shares over the second best shares."""
    others = [other for other in fleet.scenarios.values() if other is not fleet.best]
    return gain_over(fleet.best, max(others, key=lambda other: other.throughput))


def _uncompared(data: RunData, question: Answer) -> Uncompared | None:
    """Count points without a speed-up by reason; None if all have one, or the job asks for none."""
    if question.metric not in RATIO_METRICS:
        return None
    not_baseline = [row for row in data.ok_rows if not row.is_baseline]
    # `row.why` is the reason why a point has no speed-up.
    count_of_reason = Counter(row.why for row in not_baseline if row.why is not None)
    if not count_of_reason or not data.run.baseline:
        return None
    return Uncompared(reasons=dict(count_of_reason), points=len(not_baseline))


def _single_starts(data: RunData, conclusion: Conclusion) -> int:
    """Return the number of ok points with one round, if a report must say so; else 0."""
    # An answer that asks for rounds needs no further note.
    if conclusion.asks_for_rounds:
        return 0
    single_starts = sum(row.rounds == 1 for row in data.ok_rows)
    # If the answer has an interval and other points have several rounds, no note is needed.
    are_all_single = single_starts == len(data.ok_rows)
    return single_starts if are_all_single or not conclusion.has_interval else 0


def _more_rounds(data: RunData) -> MoreRounds | None:
    """Return how long more rounds take, up to 3; None if they are not useful, or not yet."""
    # Without an ok point, more rounds are of no use.
    done = max((row.rounds for row in data.ok_rows), default=WORTHWHILE)
    # A run that is running or interrupted must complete its own rounds first.
    if done >= WORTHWHILE or data.run.status in (RunStatus.RUNNING, RunStatus.INTERRUPTED):
        return None
    all_rounds_s = 0.0
    for row in data.ok_rows:
        all_rounds_s += sum(
            attempt.duration_s or 0.0 for attempt in data.trials.rounds(row).values()
        )
    one_round_s = all_rounds_s / done
    seconds = (WORTHWHILE - done) * (one_round_s + BETWEEN_ROUNDS_S)
    return MoreRounds(rounds=WORTHWHILE, seconds=seconds, done=done)


def _next_command(data: RunData, more_rounds: MoreRounds | None) -> NextCommand:
    """Return the command that runs failed or missing points, adds rounds, or shows all results."""
    # Running out of memory is a result, so such points are not run again.
    is_failed = any(row.status in (Status.ERROR, Status.TIMEOUT) for row in data.attempts)
    is_lost = any(row.status is Status.LOST for row in data.attempts)
    is_incomplete = is_failed or is_lost or data.run.status is RunStatus.INTERRUPTED
    run, folder = data.run, str(data.folder)
    is_default_folder = folder == "results"
    # The command of a script, after `--`, stays at the end.
    words = list(run.argv[1:])
    end = words.index("--") if "--" in words else len(words)
    options, script_words = words[:end], words[end:]
    if not (more_rounds or is_incomplete) or options[:1] != ["sweep"]:
        folder_option = [] if is_default_folder else ["--results", folder]
        report = ("report", run.run_id, "--full", *folder_option)
        return NextCommand(kind=Next.FULL_REPORT, words=report)
    # Drop options that are set below, or whose values the tables of the run have.
    dropped = {"-o", "--output", "--resume", "--set"}
    kept_options = []
    previous = ""
    for option in options:
        # The value of an option is in the next word, or in the same word: -oFOLDER, --set=VALUE.
        name, _, _ = option.partition("=")
        short_name = option[:2]
        if dropped.isdisjoint({previous, short_name, name}):
            kept_options.append(option)
        previous = option
    folder_option = [] if is_default_folder else ["-o", folder]
    # Complete the rounds that the run has before adding rounds.
    added_rounds = None if is_incomplete else more_rounds
    added_options = ["--retry-failed"] if is_failed else []
    if added_rounds:
        added_options = ["--set", f"measure.rounds={added_rounds.rounds}"]
    resume = (*kept_options, "--resume", run.run_id, *folder_option, *added_options, *script_words)
    return NextCommand(
        kind=Next.RETRY if is_failed else Next.RESUME,
        words=resume,
        seconds=added_rounds.seconds if added_rounds else None,
    )


def as_data(value: Any) -> Any:
    """Return a part of an answer as JSON values; a point becomes its id."""
    match value:
        case PointRow():
            return value.point_id
        case Metric():
            return value.name
        case UnevenFleet():
            return {name: as_data(scenario.row) for name, scenario in value.scenarios.items()}
        case RankedCase():
            ranked = list(map(as_data, value.ranked))
            return {"settings": value.settings, "verdict": value.verdict, "ranked": ranked}
        case Candidate():
            names = ("settings", "value", "low", "high")
            members = {name: getattr(value, name) for name in names}
            return {**members, "point_id": value.row.point_id}
    if is_dataclass(value):
        # `RunAnswer.cases` already has the points of a ranking.
        hidden = ("cases", "figures") if isinstance(value, Ranking | Values) else ()
        shown = [field.name for field in fields(value) if field.name not in hidden]
        # Name of a field -> its name in JSON.
        json_names = {
            "rows": "point_ids",
            "case_count": "cases",
            "unknown": "point_ids_without_causes",
            "highest_is_best": "is_most_best",
            "differing_settings": "apart",
        }
        return {json_names.get(name, name): as_data(getattr(value, name)) for name in shown}
    return list(map(as_data, value)) if isinstance(value, list | tuple) else value
