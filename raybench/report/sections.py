"""The sections of a run's report: tables, and listings among the findings. Pure.

To add a section, write a function that yields them and list it in SECTIONS: terminal, Markdown and
page show it. Tables have the points in the order of `RunAnswer.ordered`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from raybench.analysis import rows as metrics
from raybench.analysis.answer import (
    LargestBatches,
    is_scaling,
    reasons_of_unknown_losses,
    speed_up_half_width,
)
from raybench.analysis.references import counted_standings
from raybench.analysis.rounds import RankStep, ranks_of_step, ranks_to_show
from raybench.analysis.rows import (
    DEGREES,
    ScaledRow,
    distinguishing_settings,
    find_metric,
    rows_compared,
    value_of,
    with_most_ranks,
    workload_metrics,
)
from raybench.analysis.scaling import has_causes
from raybench.analysis.uneven import Scenario, UnevenFleet, gain_over
from raybench.job.point import EQUAL
from raybench.records.doubts import DoubtKind
from raybench.records.metrics import Metric
from raybench.report import formatting
from raybench.report.documents import (
    MARKS_TITLE,
    Cell,
    ColumnOf,
    Listing,
    ShownColumn,
    Table,
    adapt_column,
    column,
    make_table,
    metric_column,
)
from raybench.report.formatting import counted
from raybench.report.messages import marks
from raybench.report.point_settings import (
    setting_columns,
    short_name,
)
from raybench.report.words import answer as words
from raybench.report.words import run as run_words
from raybench.report.words import shares
from raybench.report.words.causes import causes_of
from raybench.report.words.reasons import losses_unknown_words
from raybench.report.words.references import HOW_TO_MAKE, standing_text, within_words
from raybench.results.point_row import (
    PointRow,
    are_parts_of_first_round,
    is_slowed_by_one_rank,
    step_of_parts,
)

if TYPE_CHECKING:
    from raybench.analysis.answer import RunAnswer
    from raybench.analysis.references import Standing
    from raybench.analysis.run_data import RunData
    from raybench.results.tables import RegionRow


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report of a run."""

    # The id of the section in the page.
    anchor: str
    # The heading of the section in the page.
    title: str
    # Returns the listings and tables that apply to a run.
    blocks: Callable[[RunAnswer], Iterable[Listing | Table]]


def _uneven(answer: RunAnswer) -> Iterator[Listing | Table]:
    """Yield a verdict for each fleet with slow devices, then a table of all shares of work."""
    fleets, ranks_noun = answer.data.fleets, answer.data.ranks
    verdicts = [
        (shares.fleet_name(fleet, ranks_noun, fleets), shares.verdict(fleet)) for fleet in fleets
    ]
    if verdicts:
        yield Listing(title="What to do with the slow devices", lines=verdicts)
        yield _table_of_shares(answer)


@dataclass(frozen=True, slots=True)
class _SharesLine:
    """A line of the table of shares: one way to share the work of a fleet."""

    # Points that differ only in the shares of work.
    fleet: UnevenFleet
    # A point of the fleet.
    scenario: Scenario

    @property
    def is_first(self) -> bool:
        """Return whether this is the first line of the fleet."""
        return self.scenario.row is self.fleet.first


def _table_of_shares(answer: RunAnswer) -> Table:
    """Return a row for each way to share the work of each fleet."""
    fleets, ranks_noun = answer.data.fleets, answer.data.ranks
    items_noun = answer.asked.items  # such as `tokens`
    lines = []
    for fleet in fleets:
        lines += [_SharesLine(fleet, scenario) for scenario in fleet.scenarios.values()]

    def gain_over_equal(line: _SharesLine) -> str:
        equal = line.fleet.scenarios.get(EQUAL)
        if equal is None or line.scenario is equal:
            return ""
        return shares.gain_cell(gain_over(line.scenario, equal))

    def prediction_error(line: _SharesLine) -> str:
        step_ms = line.scenario.row.predicted_step_ms
        return "" if step_ms is None else f"{step_ms / line.scenario.step_ms - 1:+.1%}"

    # A table that is too wide loses the column with the lowest `drop` first.
    columns: list[ColumnOf[_SharesLine]] = [
        *_fleet_columns(answer),
        column(
            "shares",
            lambda line: line.scenario.shares,
            is_setting=True,
            is_text=True,
            meaning=shares.meaning(line.scenario.shares for line in lines),
        ),
        column(
            items_noun,
            lambda line: "/".join(str(rank.items) for rank in line.scenario.ranks),
            is_text=True,
            meaning=f"{items_noun} that each rank computes in a step, rank 0 first",
        ),
        column(
            "step ms",
            lambda line: formatting.step_in(formatting.MILLISECONDS, line.scenario.row),
            meaning=step_column_meaning(answer.data),
        ),
        column(
            "pred. error",
            prediction_error,
            drop=8,
            meaning="predicted step time divided by the measured one, minus 1",
        ),
        column(
            f"{items_noun}/s",
            lambda line: formatting.number(line.scenario.throughput),
            drop=7,
            meaning=f"{items_noun} per second of all {ranks_noun} together, by the mean step time",
        ),
        column(
            "vs equal",
            gain_over_equal,
            meaning=f"difference in {items_noun}/s from equal shares",
        ),
        column(
            "fast idle",
            lambda line: formatting.percent(line.scenario.idle_share_of_fast),
            meaning="% of the step in which the fast devices wait for the slow ones",
        ),
    ]
    return make_table(lines, columns, subject=fleets[0].first.workload, kind="slow devices")


def _fleet_columns(answer: RunAnswer) -> list[ColumnOf[_SharesLine]]:
    """Return the columns that identify a fleet; only the first line of a fleet has a text."""
    fleets, ranks_noun = answer.data.fleets, answer.data.ranks

    def in_first_line(
        cell_of_fleet: Callable[[UnevenFleet], str | Cell],
    ) -> Callable[[_SharesLine], str | Cell]:
        return lambda line: cell_of_fleet(line.fleet) if line.is_first else ""

    settings: dict[str, None] = {}  # names in order, each once
    for fleet in fleets:
        settings |= dict.fromkeys(shares.distinguishing_settings_of(fleet, fleets))
    # All points of a fleet have the settings of its first point.
    first_points = [fleet.first for fleet in fleets]
    columns: list[ColumnOf[_SharesLine]] = []
    for column_of_point in setting_columns(first_points, list(settings), ranks_noun):
        shown_column, cell_of_fleet = adapt_column(column_of_point, _first_point)
        columns.append((shown_column, in_first_line(cell_of_fleet)))
    speed = column(
        "speed",
        in_first_line(lambda fleet: f"{fleet.probe_ratio:.0%}"),
        is_setting=True,
        meaning="speed of a slow device in % of a fast one, as measured by a probe",
    )
    slow = column(
        "slow",
        in_first_line(lambda fleet: f"{fleet.slow_count} of {fleet.first.world_size}"),
        is_setting=True,
        is_text=True,
        meaning=f"how many of the {ranks_noun} are slow",
    )
    return [*columns, speed, slow]


def _first_point(fleet: UnevenFleet) -> ScaledRow:
    return fleet.first


def _slow_ranks(answer: RunAnswer) -> Iterator[Listing]:
    """Yield the gain of other shares for points with one slow rank, by number of ranks."""
    point_of_world_size: dict[int, ScaledRow] = {}
    for row in answer.data.ok_rows:
        # The estimate needs equal shares, and the step time of each rank alone.
        has_equal_shares = not row.share_by_rank
        if not (has_equal_shares and row.local_step_ms_by_rank and is_slowed_by_one_rank(row)):
            continue
        largest = point_of_world_size.get(row.world_size)
        # The estimate is best for the largest batch, whose fixed costs are relatively small.
        if largest is None or (row.global_batch_size or 0) > (largest.global_batch_size or 0):
            point_of_world_size[row.world_size] = row
    lines = []
    for row in point_of_world_size.values():
        if text := shares.slow_rank(row, answer.data.ranks):
            lines.append((f"point {row.point_id}", text))
    if lines:
        yield Listing(title="What other shares of the work would gain", lines=lines)


def _largest_batches(answer: RunAnswer) -> Iterator[Listing]:
    """Yield a list of the largest batches that fit, for each combination of the other settings."""
    conclusion = answer.conclusion
    if isinstance(conclusion, LargestBatches):
        lines = []
        for batch in conclusion.batches:
            settings = words.batch_settings(batch, conclusion, answer.data.ranks)
            lines.append((settings, f"{batch.batch_size:,} {words.what_fits(batch)}"))
        yield Listing(title="Largest batches", lines=lines)


def _losses(answer: RunAnswer) -> Iterator[Listing]:
    """Yield a list of the causes with their shares of the step, at the most devices."""
    data = answer.data
    if not is_scaling(data):
        return
    largest = with_most_ranks(data.rows)
    lines = list(causes_of(largest))
    without_causes = [row for row in largest if not has_causes(row)]
    for why, count in reasons_of_unknown_losses(without_causes).items():
        which = f"{count} of {counted(len(largest), 'point')}"
        lines.append((which, f"The causes are unknown, because {losses_unknown_words(why)}."))
    if lines:
        devices = formatting.ranks_words(largest[0].world_size, data.ranks)
        yield Listing(
            title=f"Why scaling is not ideal, % of the mean step of {devices}", lines=lines
        )


_PARTS_NOTE = (
    "The parts were measured on the slowest rank, in instrumented steps after the timed ones."
)
# The parts that add up to the step; on a CPU also `data_ms`.
_SUMMED = ("compute_ms", "optimizer_ms", "host_gap_ms", "comm_exposed_ms", "unexplained_ms")
# Metrics beside the parts that cover all rounds, whereas the parts cover the first round.
_OF_ALL_ROUNDS = ("mfu_pct", "mfu_6n_pct", "gemm_share_pct", "achieved_tflops_per_device")
_FIRST_ROUND_NOTE = (
    "The column step is the step time of round 1, because only the first round measures the parts."
)
_MEMORY_NOTE = (
    "Measured by torch's allocator in one profiled step, on the device that needs the most memory."
)


def _table_of_points(
    answer: RunAnswer,
    points: Sequence[ScaledRow],
    columns: Iterable[ColumnOf[ScaledRow]],
    *,
    kind: str,
    note: str = "",
) -> Table:
    """Return a table with a row for each point: its settings, then `columns`."""
    lines = [(point, point) for point in points]
    return _table_of_items(answer, lines, columns, kind=kind, note=note)


def _table_of_items(
    answer: RunAnswer,
    lines: Sequence[tuple[ScaledRow, T]],  # (point, item), such as a point and one of its ranks
    columns: Iterable[ColumnOf[T]],  # show the item
    *,
    kind: str,
    note: str = "",
) -> Table:
    """Return a table with a row for each line: settings of the point, then `columns`."""
    names = answer.table_settings
    if any(name in DEGREES for name in names):
        # Degrees of parallelism fit one column, as `FSDP 2, TP 2`.
        layout = ShownColumn(title="layout", is_text=True, is_setting=True, min_chars=20)
        settings: list[ColumnOf[ScaledRow]] = [
            (layout, lambda row: short_name(row, names, answer.data.ranks))
        ]
    else:
        settings = setting_columns(answer.data.rows, names, answer.data.ranks)

    def point_of(line: tuple[ScaledRow, T]) -> ScaledRow:
        return line[0]

    def item_of(line: tuple[ScaledRow, T]) -> T:
        return line[1]

    columns_of_line: list[ColumnOf[tuple[ScaledRow, T]]] = [
        *(adapt_column(setting, point_of) for setting in settings),
        *(adapt_column(column_of_item, item_of) for column_of_item in columns),
    ]
    subject = ", ".join(dict.fromkeys(row.workload for row in answer.data.rows))
    return make_table(lines, columns_of_line, subject=subject, kind=kind, note=note)


def step_column_meaning(data: RunData) -> str:
    """Return the meaning of step times and of ±, as sentences without the last full stop."""
    return ". ".join(filter(None, (run_words.step_meaning(data), run_words.plus_minus(data))))


def point_table(answer: RunAnswer) -> Table:
    """Return the table of all points: step times, the metric of the answer, and other rates."""
    data, unit = answer.data, formatting.unit_of(answer.data.rows)
    is_any_ok = any(row.status == "ok" for row in data.rows)
    step_meaning = step_column_meaning(data) if is_any_ok else ""

    def step_or_status(row: ScaledRow) -> str:
        is_ok = row.status == "ok"
        return formatting.step_in(unit, row) if is_ok else formatting.STATUS_WORDS[row.status]

    columns: list[ColumnOf[ScaledRow]] = [
        column(f"step {unit.name}", step_or_status, meaning=step_meaning),
        column(MARKS_TITLE, marks, meaning=run_words.marks_meaning(data), is_text=True),
    ]
    group = metrics.SCALING if data.has_throughput else metrics.RATES
    declared = workload_metrics(data.rows)
    asked_metric = find_metric(data.rows, answer.asked.metric)
    # The step and the batch, which is a setting, have columns already.
    hidden_metrics = {"step_ms_p50", "batch_size", "global_batch_size"}
    # The speed-up and the efficiency of baseline points are 1 and say nothing.
    compared = rows_compared(data.rows)
    if not compared:
        hidden_metrics.add("speed_up")
    if all(row.efficiency is None for row in compared):
        hidden_metrics.add("efficiency")
    # What a narrow terminal leaves out, in this order. It never leaves out the answer.
    droppable = [
        *(metric for metric in group.optional if metric.name != "throughput"),
        *reversed(declared),
        metrics.METRICS_BY_NAME["throughput"],
    ]
    asked_first = [asked_metric] if asked_metric else []
    for metric in dict.fromkeys([*asked_first, *group.metrics, *declared]):
        if metric.name not in hidden_metrics:
            is_droppable = metric != asked_metric and metric in droppable
            drop = droppable.index(metric) if is_droppable else None
            columns.append(_metric_column(answer, metric, drop))
    return _table_of_points(answer, answer.ordered, columns, kind=run_words.common_settings(data))


def _metric_column(
    answer: RunAnswer, metric: Metric, drop: int | None = None
) -> ColumnOf[ScaledRow]:
    """Return the column of a metric of points, whose meaning fits the run.

    Args:
        drop: as in `ShownColumn`.
    """
    unit = formatting.unit_of(answer.data.rows)
    placeholders = run_words.placeholder_texts(answer.data, answer.asked)
    shown_column = metric_column(metric, unit, placeholders, drop)
    # A built-in workload explains its own metrics.
    meaning = run_words.declared_meaning(answer.data, metric) or shown_column.meaning
    if metric.name == "throughput" and run_words.has_steps_of_one_item(answer.data):
        meaning += ". Each step counts as one, whatever its scope"
    if metric.name == "speed_up" and any(map(speed_up_half_width, answer.data.ok_rows)):
        meaning += ". ± is half of the 95 % interval over the rounds"
        return replace(shown_column, meaning=meaning), _speed_up_text
    shown_column = replace(shown_column, meaning=meaning)
    return shown_column, lambda row: formatting.metric(metric, value_of(row, metric), unit)


def _speed_up_text(row: ScaledRow) -> str:
    """Return `1.47 ±1.8%`; the speed-up of a baseline has no interval."""
    half_width = None if row.is_baseline else speed_up_half_width(row)
    text = formatting.ratio(row.speed_up)
    return text if half_width is None else f"{text} {formatting.half_width(half_width)}"


def _points(answer: RunAnswer) -> Iterator[Table]:
    """Yield the tables of all points: what was measured, where steps go, and their memory."""
    if answer.data.rows:
        yield point_table(answer)
    if not answer.data.rows or not answer.data.has_throughput:
        return
    yield from _table_of_parts(answer)
    with_memory = [row for row in answer.ordered if row.mem_parameters_bytes is not None]
    if with_memory:
        columns = _group_columns(answer, metrics.MEMORY)
        yield _table_of_points(
            answer, with_memory, columns, kind="memory at its peak, GiB", note=_MEMORY_NOTE
        )


def _table_of_parts(answer: RunAnswer) -> Iterator[Table]:
    """Yield the table of the parts of steps, or of the use of devices, if any was measured."""
    unit = formatting.unit_of(answer.data.rows)
    names = ("compute_ms", "optimizer_ms", "comm_exposed_ms", "achieved_tflops_per_device")
    has_rounds = any(are_parts_of_first_round(row) for row in answer.data.rows)
    points = []
    for row in answer.ordered:
        is_measured = any(getattr(row, name) is not None for name in names)
        if row.why_no_breakdown or is_measured:
            points.append(row)
    if not points:
        return
    no_breakdown = DoubtKind.NO_BREAKDOWN.mark
    columns: list[ColumnOf[ScaledRow]] = [
        column(
            MARKS_TITLE,
            lambda row: no_breakdown if row.why_no_breakdown else "",
            is_text=True,
            meaning=run_words.meaning_of_marks(no_breakdown),
        ),
        column(
            "step",
            lambda row: formatting.time_in(unit, step_of_parts(row)),
            meaning="median time of one step" + (" in round 1" if has_rounds else ""),
        ),
        *_group_columns(answer, metrics.PARTS),
    ]
    has_parts = any(row.local_step_ms is not None for row in points)
    notes = []
    kind = "how well the device is used"
    if has_parts:
        which = "step of round 1" if has_rounds else "step"
        kind = f"where the {which} goes, {unit.name}"
        notes.append(_PARTS_NOTE)
    if has_rounds:
        notes.append(_FIRST_ROUND_NOTE)
    table = _table_of_points(answer, points, columns, kind=kind, note=" ".join(notes))
    yield replace(table, summands=_summands(answer, table)) if has_parts else table


def _group_columns(answer: RunAnswer, group: metrics.Columns) -> list[ColumnOf[ScaledRow]]:
    """Return the columns of a group; narrow terminals leave out its optional metrics first."""
    drop_order = list(dict.fromkeys([*group.optional, *group.metrics]))
    return [_part_column(answer, metric, drop_order.index(metric)) for metric in group.metrics]


def _summands(answer: RunAnswer, table: Table) -> tuple[str, ...]:
    """Return the headings of the columns that add up to the step."""
    is_cpu = any(row.device_type == "cpu" for row in answer.data.ok_rows)
    # On a CPU, compute_ms does not contain the wait for data.
    summed_metrics = (*_SUMMED, "data_ms") if is_cpu else _SUMMED
    summed_titles = set()
    for name in summed_metrics:
        shown_column, _ = _part_column(answer, metrics.METRICS_BY_NAME[name], 0)
        summed_titles.add(shown_column.title)
    return tuple(title for title in table.titles if title in summed_titles)


def _part_column(answer: RunAnswer, metric: Metric, drop: int) -> ColumnOf[ScaledRow]:
    """Return the column of a part of the step or of the memory; `drop` is as in `ShownColumn`."""
    shown_column, make_cell = _metric_column(answer, metric, drop)
    meaning, rows = shown_column.meaning, answer.data.rows
    # comm_ms is known only where DDP reduces the gradients.
    has_ddp = any(row.world_size > 1 and row.comm_ms for row in rows)
    if metric.name == "compute_ms" and has_ddp:
        meaning += f". With several {answer.data.ranks} it includes copying the gradients for DDP"
    elif metric.name in _OF_ALL_ROUNDS and any(map(are_parts_of_first_round, rows)):
        meaning += ". It covers all rounds"
    return replace(shown_column, meaning=meaning), make_cell


_RANKS_NOTE = "On each rank the parts add up to the step time."
_RANKS_OF_FIRST_NOTE = "Only the first round measures the parts."


def _rank_columns(unit: formatting.Unit) -> list[ColumnOf[RankStep]]:
    """Return the columns of a rank: its number, and the parts of its step in `unit`."""

    def part_column(part: str) -> ColumnOf[RankStep]:
        title, meaning = _PARTS_OF_RANK[part]
        return column(
            title, lambda step: formatting.part(getattr(step, f"{part}_ms"), unit), meaning=meaning
        )

    rank: ColumnOf[RankStep] = column(
        "rank", lambda step: _rank_name(step.rank), meaning=_RANK_MEANING
    )
    return [rank, *map(part_column, _PARTS_OF_RANK)]


_RANK_MEANING = "number of the rank; * marks rank 0, whose time most scripts report"
# Field of `RankStep` without `_ms` -> heading and meaning of its column.
_PARTS_OF_RANK = {
    "computes": ("compute", "the rank's own work on its device"),
    "idle": ("host gap", "the device waits for the host"),
    "waits": ("waits", "the rank waits for the slowest rank"),
    "exposed": ("exposed comm", "communication that computation does not hide"),
    "unexplained": ("unexplained", "the step minus the other parts"),
}


def _rank_name(rank: int) -> str:
    """Return the number of a rank; rank 0 has a mark, because scripts report its time."""
    return str(rank) if rank else "0*"


def _ranks(answer: RunAnswer) -> Iterator[Table]:
    """Yield a table of the points that one rank slows, with a line for each rank."""
    # Fleets of fast and slow devices have a table of their own.
    if answer.data.fleets:
        return
    slowed = [row for row in answer.ordered if row.status == "ok" and is_slowed_by_one_rank(row)]
    lines = []
    for row in slowed:
        lines += [(row, step) for step in ranks_to_show(ranks_of_step(row))]
    if lines:
        unit = formatting.unit_of(answer.data.rows)
        kind = f"where ranks differ, {unit.name} of each rank"
        note = _ranks_note(any(are_parts_of_first_round(row) for row in slowed))
        yield _table_of_items(answer, lines, _rank_columns(unit), kind=kind, note=note)


def _ranks_note(is_of_first_round: bool) -> str:
    return f"{_RANKS_NOTE} {_RANKS_OF_FIRST_NOTE}" if is_of_first_round else _RANKS_NOTE


def ranks_of_point(row: PointRow, unit: formatting.Unit) -> Table | None:
    """Return a table of the ranks of one point; None if no times of ranks were measured."""
    steps = ranks_to_show(ranks_of_step(row))
    if not steps:
        return None
    kind = f"Each rank's step, {unit.name}, from steps after the timed ones"
    note = _ranks_note(are_parts_of_first_round(row))
    return make_table(steps, _rank_columns(unit), kind=kind, note=note)


_SCOPES_TITLE = "Blocks, forward pass and whole loop"


def _scopes(answer: RunAnswer) -> Iterator[Table]:
    """Yield a table for each workload with several values of `scope`, the part that a step runs."""
    # workload -> scope -> points
    workloads: dict[str, dict[str, list[ScaledRow]]] = {}
    for row in answer.ordered:
        if row.status == "ok" and "scope" in row.params:
            points_of_scope = workloads.setdefault(row.workload, {})
            points_of_scope.setdefault(row.params["scope"], []).append(row)
    baseline_points = [row for row in answer.data.rows if row.is_baseline and row.status == "ok"]
    baseline_of_series = {row.series: row for row in baseline_points}

    def cold_speed_up(row: ScaledRow) -> str:
        # A first step is a cold start only in new processes.
        base = baseline_of_series.get(row.series)
        if base is None or not (row.new_processes and base.new_processes):
            return ""
        base_ms, cold_ms = base.first_step_ms, row.first_step_ms
        return "" if base_ms is None or cold_ms is None else formatting.ratio(base_ms / cold_ms)

    def share_of_step(part: str) -> Callable[[ScaledRow], str]:
        def share_text(row: ScaledRow) -> str:
            part_ms = getattr(row, part)
            if part_ms is None:
                return ""
            return formatting.percent(part_ms / (step_of_parts(row) or 1.0))

        return share_text

    baseline = run_words.placeholder_texts(answer.data, answer.asked)["baseline"]
    has_rounds = any(row.rounds > 1 for row in answer.data.rows)
    of_rounds = ", median of the rounds" if has_rounds else ""
    peak = metrics.METRICS_BY_NAME["peak_mem_allocated_bytes"]
    columns: list[ColumnOf[ScaledRow]] = [
        column(
            "cold",
            lambda row: formatting.number(row.first_step_ms),
            meaning=f"time of the first step after the workload was built{of_rounds}",
        ),
        column(
            "warm",
            lambda row: formatting.number(row.step_ms_p50),
            meaning="median time of one step",
        ),
        column(MARKS_TITLE, marks, is_text=True, meaning=run_words.marks_meaning(answer.data)),
        column(
            "cold speed-up",
            cold_speed_up,
            meaning=f"cold step of the baseline ({baseline}) divided by the cold step of this "
            "point, if both points began with new processes",
        ),
        column(
            "warm speed-up",
            lambda row: formatting.ratio(row.speed_up),
            meaning=f"warm step of the baseline ({baseline}) divided by the warm step of this "
            "point",
        ),
        column(
            "comm %",
            share_of_step("comm_exposed_ms"),
            meaning="exposed communication in % of the step",
        ),
        column(
            "host gap %", share_of_step("host_gap_ms"), drop=1, meaning="host gap in % of the step"
        ),
        column(
            "GiB",
            lambda row: formatting.gib(row.peak_mem_allocated_bytes),
            drop=0,
            meaning=peak.description,
        ),
    ]
    kind = f"{_SCOPES_TITLE.lower()}, ms"
    for points_of_scope in workloads.values():
        if len(points_of_scope) < 2:
            continue
        # The scope with the shortest step comes first.
        points_by_scope = sorted(points_of_scope.values(), key=_shortest_step_ms)
        points = list(chain.from_iterable(points_by_scope))
        yield _table_of_points(answer, points, columns, kind=kind)


def _shortest_step_ms(rows: Iterable[ScaledRow]) -> float:
    return min(row.step_ms_p50 or 0.0 for row in rows)


def region_columns(unit: formatting.Unit) -> list[ColumnOf[RegionRow]]:
    """Return the columns of a region: name, calls in a step, time in `unit`, share of the step."""
    return [
        column(
            "region",
            lambda region: region.region,
            is_text=True,
            min_chars=20,
            meaning="part of the model that the workload labels with context.region()",
        ),
        column(
            "calls", lambda region: str(region.calls), meaning="how often one step runs the region"
        ),
        column(
            "time",
            lambda region: formatting.part(region.region_ms, unit),
            meaning="time in one step, on the rank where the region takes longest",
        ),
        column(
            "% of step",
            lambda region: formatting.percent(region.share_pct / 100),
            meaning="time of the region in % of that slower step",
        ),
    ]


def _regions(answer: RunAnswer) -> Iterator[Table]:
    """Yield a table with a line for each region of a point."""
    unit = formatting.unit_of(answer.data.rows)
    columns = region_columns(unit)
    lines = []
    for row in answer.ordered:
        lines += [(row, region) for region in answer.data.regions.get(row.point_id, ())]
    if lines:
        kind = f"regions, {unit.name} (a separate step with timers, slower than the timed steps)"
        yield _table_of_items(answer, lines, columns, kind=kind)


_REFERENCE_TITLE = "Compared with reference values of this device model"
# Up to 4 values are all shown; of more values, the 4 slowest outside their reference.
_MOST_SHOWN = 4
# The summary names at most so many points.
_MOST_NAMED = 6


def _references(answer: RunAnswer) -> Iterator[Listing]:
    """Yield the values of the run compared with the references of its devices."""
    if lines := list(reference_lines(answer.data)):
        yield Listing(title=_REFERENCE_TITLE, lines=lines)


def reference_lines(data: RunData) -> Iterator[tuple[str, str]]:
    """Yield (name, text): how many values are within their reference, then single values.

    A name begins with `! ` if its value is outside its reference. No lines without ok GPU points.
    """
    if not any(row.status == "ok" and row.device_type == "cuda" for row in data.rows):
        return
    standings = sorted(data.standings, key=lambda standing: standing.share)
    if not standings:
        yield "none", HOW_TO_MAKE
        return
    settings = distinguishing_settings(data.rows)
    name_of_point = {}  # point_id -> name
    for row in data.rows:
        name_of_point[row.point_id] = short_name(row, settings, data.ranks) or row.point_id
    if len(standings) > 1:
        yield "summary", _summary_of_references(standings, name_of_point)
    outside = [standing for standing in standings if not standing.is_within]
    shown = standings if len(standings) <= _MOST_SHOWN else outside
    for standing in shown[:_MOST_SHOWN]:
        mark = "" if standing.is_within else "! "
        # With several values, the summary says whether references contain values of this run.
        text = standing_text(standing, says_own=len(standings) == 1)
        yield f"{mark}{name_of_point[standing.measured.point_id]}: {standing.entry.unit}", text
    if (more := len(shown) - _MOST_SHOWN) > 0:
        yield "more", f"{counted(more, 'other value')} outside; `--format json` has all."


def _summary_of_references(
    standings: Sequence[Standing],
    name_of_point: Mapping[str, str],  # point_id -> name
) -> str:
    """Return how many values are within their reference, with the names of few points."""
    text = within_words(standings)
    # A reference that was made from this run says nothing about the run.
    if not any(standing.is_own for standing in standings):
        # Values whose reference range is narrow; all values if there are none.
        judged = counted_standings(standings) or standings
        median_share = median(standing.share for standing in judged)
        text += f" Their median is {formatting.share_words(median_share)} of it."
    point_ids = dict.fromkeys(standing.measured.point_id for standing in standings)
    names = list(dict.fromkeys(name_of_point[point_id] for point_id in point_ids))
    # The lines of single values already name up to _MOST_SHOWN points.
    if _MOST_SHOWN < len(names) <= _MOST_NAMED:
        text += f" The points: {'; '.join(names)}."
    return text


# In the order of the report.
SECTIONS = (
    Section(anchor="uneven", title="Slow devices", blocks=_uneven),
    Section(anchor="slow-ranks", title="Slow ranks", blocks=_slow_ranks),
    Section(anchor="largest", title="Largest batches", blocks=_largest_batches),
    Section(anchor="losses", title="What is lost", blocks=_losses),
    Section(anchor="points", title="All points", blocks=_points),
    Section(anchor="ranks", title="Ranks that differ", blocks=_ranks),
    Section(anchor="scopes", title=_SCOPES_TITLE, blocks=_scopes),
    Section(anchor="regions", title="Regions of the step", blocks=_regions),
    Section(anchor="references", title=_REFERENCE_TITLE, blocks=_references),
)
