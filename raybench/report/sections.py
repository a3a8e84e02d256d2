"""The sections of a run's report, in order: tables, and listings beside the findings.

To add a section, write a function and list it in SECTIONS: terminal, Markdown and page show it. A
table by `_table_of_points` begins with the settings that distinguish the points. Points are in the
order of `RunAnswer.ordered`, unless the section says otherwise. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from raybench.analysis import rows as metrics
from raybench.analysis.answer import LargestBatches, is_scaling, speed_up_half_width, why_not_known
from raybench.analysis.references import counted_standings
from raybench.analysis.rounds import MOST_RANKS, RankStep, ranks_of_step, ranks_to_show
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
    ColumnOf,
    Listing,
    ShownColumn,
    Table,
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
from raybench.report.words import run as of_run
from raybench.report.words import shares
from raybench.report.words.causes import causes_of
from raybench.report.words.reasons import losses_unknown_words
from raybench.report.words.references import HOW_TO_MAKE, standing_text, within_words
from raybench.results.point_row import (
    PointRow,
    is_of_first_round,
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

    # Its id in the page.
    anchor: str
    # Its heading in the page.
    title: str
    # Returns listings, which are shown among the findings, and tables; may return nothing.
    blocks: Callable[[RunAnswer], Iterable[Listing | Table]]


def _uneven(answer: RunAnswer) -> Iterator[Listing | Table]:
    """Yield a verdict for each fleet, then a table of the shares that were compared."""
    fleets, ranks = answer.data.fleets, answer.data.ranks
    verdicts = [
        (shares.fleet_name(fleet, ranks, fleets), shares.verdict(fleet)) for fleet in fleets
    ]
    if verdicts:
        yield Listing(title="What to do with the slow devices", lines=verdicts)
        yield _table_of_shares(answer)


def _table_of_shares(answer: RunAnswer) -> Table:
    """Return a row for each way to share the work of each fleet."""
    fleets, ranks = answer.data.fleets, answer.data.ranks
    apart = dict.fromkeys(chain.from_iterable(shares.apart(fleet, fleets) for fleet in fleets))
    settings = setting_columns([fleet.first for fleet in fleets], list(apart), ranks)

    def in_first(
        cell: Callable[[UnevenFleet], str],
    ) -> Callable[[tuple[UnevenFleet, Scenario]], str]:
        return lambda line: cell(line[0]) if line[1].row is line[0].first else ""

    def over_equal(line: tuple[UnevenFleet, Scenario]) -> str:
        equal = line[0].scenarios.get(EQUAL)
        return shares.gain(gain_over(line[1], equal)) if equal and line[1] is not equal else ""

    def predicted(line: tuple[UnevenFleet, Scenario]) -> str:
        step_ms = line[1].row.predicted_step_ms
        return "" if step_ms is None else f"{step_ms / line[1].step_ms - 1:+.1%}"

    slow = in_first(lambda fleet: f"{fleet.slow_count} of {fleet.first.world_size}")
    lines = [(fleet, scenario) for fleet in fleets for scenario in fleet.scenarios.values()]
    items = answer.asked.items
    columns: list[ColumnOf[tuple[UnevenFleet, Scenario]]] = [
        *(
            (head, in_first(lambda fleet, cell=cell: str(cell(fleet.first))))  # type: ignore[misc]
            for head, cell in settings
        ),
        column(
            "speed",
            in_first(lambda fleet: f"{fleet.probe_ratio:.0%}"),
            is_setting=True,
            meaning="speed of a slow device in % of a fast one, as measured by a probe",
        ),
        column(
            "slow",
            slow,
            is_setting=True,
            is_text=True,
            meaning=f"how many of the {answer.data.ranks} are slow",
        ),
        column(
            "shares",
            lambda line: line[1].shares,
            is_setting=True,
            is_text=True,
            meaning=shares.meaning(line[1].shares for line in lines),
        ),
        column(
            items,
            lambda line: "/".join(str(rank.items) for rank in line[1].ranks),
            is_text=True,
            meaning=f"{items} that each rank computes in a step, rank 0 first",
        ),
        column(
            "step ms",
            lambda line: formatting.step_in(formatting.MILLISECONDS, line[1].row),
            meaning=step_column_meaning(answer.data),
        ),
        column(
            "pred. error",
            predicted,
            drop=8,
            meaning="predicted step time divided by the measured one, minus 1",
        ),
        column(
            f"{items}/s",
            lambda line: formatting.number(line[1].throughput),
            drop=7,
            meaning=f"{items} per second of all {answer.data.ranks} together, by the mean step "
            "time",
        ),
        column("vs equal", over_equal, meaning=f"difference in {items}/s from equal shares"),
        column(
            "fast idle",
            lambda line: formatting.percent(line[1].idle_share_of_fast),
            meaning="% of the step in which the fast devices wait for the slow ones",
        ),
    ]
    return make_table(lines, columns, subject=fleets[0].first.workload, kind="slow devices")


def _slow_ranks(answer: RunAnswer) -> Iterator[Listing]:
    """Yield what other shares would gain where one rank is slow, for each number of ranks."""
    slowed: dict[int, ScaledRow] = {}
    for row in answer.data.ok_rows:
        if row.share_by_rank or not row.local_step_ms_by_rank or not is_slowed_by_one_rank(row):
            continue
        other = slowed.get(row.world_size)
        # The estimate is best for the largest batch, whose fixed costs are relatively small.
        if other is None or (row.global_batch_size or 0) > (other.global_batch_size or 0):
            slowed[row.world_size] = row
    lines = []
    for row in slowed.values():
        if text := shares.slow_rank(row, answer.data.ranks):
            lines.append((f"point {row.point_id}", text))
    if lines:
        yield Listing(title="What other shares of the work would gain", lines=lines)


def _largest_batches(answer: RunAnswer) -> Iterator[Listing]:
    """Yield the largest batch of each series."""
    largest = answer.found
    if isinstance(largest, LargestBatches):
        lines = []
        for batch in largest.batches:
            settings = words.batch_settings(batch, largest, answer.data.ranks)
            lines.append((settings, f"{batch.batch_size:,} {words.what_fits(batch)}"))
        yield Listing(title="Largest batches", lines=lines)


def _losses(answer: RunAnswer) -> Iterator[Listing]:
    """Yield what the steps on the most devices lose to what."""
    data = answer.data
    rows = with_most_ranks(data.rows)
    if not is_scaling(data):
        return
    lines = list(causes_of(rows))
    unknown = [row for row in rows if not has_causes(row)]
    for why, count in why_not_known(unknown).items():
        which = f"{count} of {counted(len(rows), 'point')}"
        lines.append((which, f"The causes are unknown, because {losses_unknown_words(why)}."))
    if lines:
        devices = formatting.ranks_words(rows[0].world_size, data.ranks)
        yield Listing(
            title=f"Why scaling is not ideal, % of the mean step of {devices}", lines=lines
        )


_PARTS_NOTE = (
    "The parts were measured on the slowest rank, in instrumented steps after the timed ones."
)
# The parts that add up to the step; waiting for data counts on a CPU only.
_SUMMED = ("compute_ms", "optimizer_ms", "host_gap_ms", "comm_exposed_ms", "unexplained_ms")
_FIRST_ROUND_NOTE = (
    "The column step is the step time of round 1, because only the first round measures the parts."
)
_MEMORY_NOTE = (
    "Measured by torch's allocator in one profiled step, on the device that needs the most memory."
)


def _table_of_points(
    answer: RunAnswer,
    lines: Sequence[tuple[ScaledRow, T]],
    columns: Iterable[ColumnOf[T]],
    *,
    kind: str,
    note: str = "",
) -> Table:
    """Return a table with a row for each line: the settings of its point, then `columns`.

    Settings are a single column `layout` if a degree of parallelism varies.

    Args:
        answer: of the run.
        lines: (point of the run, item that `columns` show).
        columns: of the items.
        kind: see `Table`.
        note: see `Table`.
    """
    names = answer.table_settings
    if any(name in DEGREES for name in names):
        layout = ShownColumn(title="layout", is_text=True, is_setting=True, min_chars=20)
        settings: list[ColumnOf[ScaledRow]] = [
            (layout, lambda row: short_name(row, names, answer.data.ranks))
        ]
    else:
        settings = setting_columns(answer.data.rows, names, answer.data.ranks)
    shown: list[ColumnOf[tuple[ScaledRow, T]]] = [
        *((column, lambda line, cell=cell: cell(line[0])) for column, cell in settings),
        *((column, lambda line, cell=cell: cell(line[1])) for column, cell in columns),
    ]
    subject = ", ".join(dict.fromkeys(row.workload for row in answer.data.rows))
    return make_table(lines, shown, subject=subject, kind=kind, note=note)


def step_column_meaning(data: RunData) -> str:
    """Return what a step time and its ± are, no full stop."""
    return ". ".join(filter(None, (of_run.step_meaning(data), of_run.plus_minus(data))))


def point_table(answer: RunAnswer) -> Table:
    """Return the table of the points with their steps, the metric of the answer, and other rates.

    A terminal that is too narrow leaves out the throughput last, and the answer never.
    """
    rows, unit = list(answer.ordered), formatting.unit_of(answer.data.rows)
    data = answer.data
    is_any_ok = any(row.status == "ok" for row in rows)
    explained = step_column_meaning(data) if is_any_ok else ""

    def step(row: ScaledRow) -> str:
        is_ok = row.status == "ok"
        return formatting.step_in(unit, row) if is_ok else formatting.STATUS_WORDS[row.status]

    columns: list[ColumnOf[ScaledRow]] = [
        column(f"step {unit.name}", step, meaning=explained),
        column(MARKS_TITLE, marks, meaning=of_run.marks_meaning(data), is_text=True),
    ]
    every, shows = data.rows, metrics.SCALING if data.has_throughput else metrics.RATES
    declared, first = workload_metrics(every), find_metric(every, answer.asked.metric)
    # The answer of a search is a setting, which has a column already.
    hidden = {"step_ms_p50", "batch_size", "global_batch_size"}
    # Speed-up and efficiency are hidden if only baseline points have them, which are 1.
    compared = rows_compared(every)
    hidden |= set() if compared else {"speed_up"}
    hidden |= set() if any(row.efficiency is not None for row in compared) else {"efficiency"}
    first_dropped = [
        *(metric for metric in shows.optional if metric.name != "throughput"),
        *reversed(declared),
        metrics.BY_NAME["throughput"],
    ]
    for metric in dict.fromkeys([*([first] if first else []), *shows.metrics, *declared]):
        is_kept = metric == first or metric not in first_dropped
        if metric.name not in hidden:
            drop = None if is_kept else first_dropped.index(metric)
            columns.append(_metric_column(answer, metric, drop))
    return _table_of_points(answer, [(row, row) for row in rows], columns, kind=of_run.alike(data))


def _metric_column(
    answer: RunAnswer, metric: Metric, drop: int | None = None
) -> ColumnOf[ScaledRow]:
    unit = formatting.unit_of(answer.data.rows)
    column = metric_column(metric, unit, of_run.of_columns(answer.data, answer.asked), drop)
    if declared := of_run.declared_meaning(answer.data, metric):
        column = replace(column, meaning=declared)
    if metric.name == "throughput" and of_run.has_steps_of_one_item(answer.data):
        column = replace(
            column, meaning=f"{column.meaning}. Each step counts as one, whatever its scope"
        )
    if metric.name == "speed_up" and any(map(speed_up_half_width, answer.data.ok_rows)):
        rounds = "± is half of the 95 % interval over the rounds"
        column = replace(column, meaning=f"{column.meaning}. {rounds}")
        return column, lambda row: _speed_up(row)
    return column, lambda row: formatting.metric(metric, value_of(row, metric), unit)


def _speed_up(row: ScaledRow) -> str:
    half = None if row.is_baseline else speed_up_half_width(row)
    text = formatting.ratio(row.speed_up)
    return text if half is None else f"{text} {formatting.half_width(half)}"


def _points(answer: RunAnswer) -> Iterator[Table]:
    """Yield the tables of all points: what was measured, where steps go, and their memory."""
    if answer.data.rows:
        yield point_table(answer)
    if not answer.data.rows or not answer.data.has_throughput:
        return
    unit = formatting.unit_of(answer.data.rows)
    names = ("compute_ms", "optimizer_ms", "comm_exposed_ms", "achieved_tflops_per_device")
    has_rounds = any(is_of_first_round(row) for row in answer.data.rows)
    apart = []
    for row in answer.ordered:
        has_parts = any(getattr(row, name) is not None for name in names)
        if row.why_no_breakdown or has_parts:
            apart.append(row)
    no_breakdown = DoubtKind.NO_BREAKDOWN.mark
    parts: list[ColumnOf[ScaledRow]] = [
        column(
            MARKS_TITLE,
            lambda row: no_breakdown if row.why_no_breakdown else "",
            is_text=True,
            meaning=of_run.meaning_of_marks(no_breakdown),
        ),
        column(
            "step",
            lambda row: formatting.time_in(unit, step_of_parts(row)),
            meaning="median time of one step" + (" in round 1" if has_rounds else ""),
        ),
    ]
    has_parts = any(row.local_step_ms is not None for row in apart)
    which = "step of round 1" if has_rounds else "step"
    kind = f"where the {which} goes, {unit.name}" if has_parts else "how well the device is used"
    notes = [_PARTS_NOTE] * has_parts + [_FIRST_ROUND_NOTE] * has_rounds
    watched = [row for row in answer.ordered if row.mem_parameters_bytes is not None]
    for title, rows, shows, first, note in (
        (kind, apart, metrics.PARTS, parts, " ".join(notes)),
        ("memory at its peak, GiB", watched, metrics.MEMORY, [], _MEMORY_NOTE),
    ):
        # A terminal that is too narrow leaves out the optional metrics first.
        order = list(dict.fromkeys([*shows.optional, *shows.metrics]))
        columns = [
            *first,
            *(_part_column(answer, metric, order.index(metric)) for metric in shows.metrics),
        ]
        if rows:
            lines = [(row, row) for row in rows]
            table = _table_of_points(answer, lines, columns, kind=title, note=note)
            is_of_parts = shows is metrics.PARTS and has_parts
            yield replace(table, summands=_summands(answer, table)) if is_of_parts else table


def _summands(answer: RunAnswer, table: Table) -> tuple[str, ...]:
    """Return the heads of the columns that add up to the step."""
    is_cpu = any(row.device_type == "cpu" for row in answer.data.ok_rows)
    names = (*_SUMMED, "data_ms") if is_cpu else _SUMMED
    heads = {_part_column(answer, metrics.BY_NAME[name], 0)[0].title for name in names}
    return tuple(title for title in table.titles if title in heads)


def _part_column(answer: RunAnswer, metric: Metric, drop: int) -> ColumnOf[ScaledRow]:
    """Return the column of a part of the step or of the memory."""
    column, cell = _metric_column(answer, metric, drop)
    rows = answer.data.rows
    # comm_ms is known only where DDP reduces the gradients.
    if metric.name == "compute_ms" and any(r.world_size > 1 and r.comm_ms for r in rows):
        meaning = f"{column.meaning}. With several {answer.data.ranks} it includes copying "
        column = replace(column, meaning=meaning + "the gradients for DDP")
    elif metric.name in _OF_ALL_ROUNDS and any(map(is_of_first_round, rows)):
        column = replace(column, meaning=f"{column.meaning}. It covers all rounds")
    return column, cell


# Beside the parts, which are of the first round.
_OF_ALL_ROUNDS = ("mfu_pct", "mfu_6n_pct", "gemm_share_pct", "achieved_tflops_per_device")
_RANKS_NOTE = "On each rank the parts add up to the step time."
_RANKS_OF_FIRST_NOTE = "Only the first round measures the parts."


def _rank_columns(unit: formatting.Unit) -> list[ColumnOf[RankStep]]:
    """Return the columns of a rank: its number, and the parts of its step in `unit`."""

    def time(name: str) -> ColumnOf[RankStep]:
        title, meaning = _PARTS_OF_RANK[name]
        return column(
            title, lambda step: formatting.part(getattr(step, f"{name}_ms"), unit), meaning=meaning
        )

    rank: ColumnOf[RankStep] = column(
        "rank", lambda step: _rank_name(step.rank), meaning=_RANK_MEANING
    )
    return [rank, *map(time, _PARTS_OF_RANK)]


_RANK_MEANING = "number of the rank; * marks rank 0, whose time most scripts report"
# What a rank does in a step -> the head of its column, and its meaning.
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
    """Yield a table of the points in which one rank slows the others, with a line for each rank."""
    rows = [] if answer.data.fleets else answer.ordered
    slowed = [row for row in rows if row.status == "ok" and is_slowed_by_one_rank(row)]
    if lines := [(row, rank) for row in slowed for rank in ranks_to_show(ranks_of_step(row))]:
        columns = _rank_columns(formatting.unit_of(answer.data.rows))
        kind = f"where ranks differ, {formatting.unit_of(answer.data.rows).name} of each rank"
        note = _ranks_note(any(is_of_first_round(row) for row in slowed))
        yield _table_of_points(answer, lines, columns, kind=kind, note=note)


def _ranks_note(is_of_first: bool) -> str:
    return f"{_RANKS_NOTE} {_RANKS_OF_FIRST_NOTE}" if is_of_first else _RANKS_NOTE


def ranks_of_point(row: PointRow, unit: formatting.Unit) -> Table | None:
    """Return a table with a row per rank of one point; None if there is nothing to show.

    Args:
        row: of the table `points`.
        unit: of the times.
    """
    steps = {step.rank: step for step in ranks_to_show(ranks_of_step(row))}
    unsynced, synced = row.wall_unsynced_ms_by_rank or (), row.wall_synced_ms_by_rank or ()
    clocks: dict[int, tuple[float, float]] = {}
    if unsynced and synced:
        working = [rank for rank, share in enumerate(row.share_by_rank or unsynced) if share]
        clocks = dict(zip(working, zip(unsynced, synced, strict=True), strict=True))
    shown = sorted(steps) or sorted(clocks)[:MOST_RANKS]
    if not shown:
        return None

    def of_step(shown: ColumnOf[RankStep]) -> ColumnOf[int]:
        return shown[0], lambda rank: shown[1](steps[rank]) if rank in steps else ""

    def of_clock(title: str, index: int, meaning: str) -> ColumnOf[int]:
        def cell(rank: int) -> str:
            return formatting.part(clocks.get(rank, (None, None))[index], unit)

        return column(title, cell, meaning=meaning)

    columns = [
        column("rank", _rank_name, meaning=_RANK_MEANING),
        *map(of_step, _rank_columns(unit)[1:]),
        of_clock("unsynced", 0, "what time.time() reports for a step without synchronizing"),
        of_clock("synced", 1, "what time.time() reports for a step with synchronizing"),
    ]
    kind = f"Each rank's step, {unit.name}, from steps after the timed ones"
    note = _ranks_note(is_of_first_round(row)) if steps else ""
    return make_table(shown, columns, kind=kind, note=note)


_SCOPES_TITLE = "Blocks, forward pass and whole loop"


def _scopes(answer: RunAnswer) -> Iterator[Table]:
    """Yield a table of the ok points of each workload whose parameter `scope` differs.

    `scope` says how much of the whole a step runs; the scope with the shortest step comes first.
    """
    workloads: dict[str, dict[str, list[ScaledRow]]] = {}
    for row in answer.ordered:
        if row.status == "ok" and "scope" in row.params:
            scopes = workloads.setdefault(row.workload, {})
            scopes.setdefault(row.params["scope"], []).append(row)
    bases = {row.series: row for row in answer.data.rows if row.is_baseline and row.status == "ok"}

    def cold_gain(row: ScaledRow) -> str:
        # A first step is a cold start only in new processes.
        base = bases.get(row.series)
        if base is None or not (row.new_processes and base.new_processes):
            return ""
        first, cold = base.first_step_ms, row.first_step_ms
        return "" if first is None or cold is None else formatting.ratio(first / cold)

    def share_of_step(name: str) -> Callable[[ScaledRow], str]:
        def cell(row: ScaledRow) -> str:
            part = getattr(row, name)
            return "" if part is None else formatting.percent(part / (step_of_parts(row) or 1.0))

        return cell

    baseline = of_run.of_columns(answer.data, answer.asked)["baseline"]
    has_rounds = any(row.rounds > 1 for row in answer.data.rows)
    peak = metrics.BY_NAME["peak_mem_allocated_bytes"]
    columns: list[ColumnOf[ScaledRow]] = [
        column(
            "cold",
            lambda row: formatting.number(row.first_step_ms),
            meaning="time of the first step after the workload was built"
            + (", median of the rounds" * has_rounds),
        ),
        column(
            "warm",
            lambda row: formatting.number(row.step_ms_p50),
            meaning="median time of one step",
        ),
        column(MARKS_TITLE, marks, is_text=True, meaning=of_run.marks_meaning(answer.data)),
        column(
            "cold speed-up",
            cold_gain,
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
    for scopes in workloads.values():
        ordered = sorted(scopes.values(), key=_shortest_step_ms)
        lines = [(row, row) for rows in ordered for row in rows]
        if len(scopes) > 1:
            yield _table_of_points(answer, lines, columns, kind=kind)


def _shortest_step_ms(rows: Sequence[ScaledRow]) -> float:
    return min(row.step_ms_p50 or 0.0 for row in rows)


def region_columns(unit: formatting.Unit) -> list[ColumnOf[RegionRow]]:
    """Return the columns of a region: name, calls a step, bare time in `unit`, share of step."""
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
        yield _table_of_points(answer, lines, columns, kind=kind)


_REFERENCE_TITLE = "Compared with reference values of this device model"
# Up to so many values are all shown; of more values, only the slowest outside their reference.
_MOST_SHOWN = 4
# The summary names up to so many points.
_MOST_NAMED = 6


def _references(answer: RunAnswer) -> Iterator[Listing]:
    """Yield how the figures of the run stand against the references of its devices."""
    if lines := list(reference_lines(answer.data)):
        yield Listing(title=_REFERENCE_TITLE, lines=lines)


def reference_lines(data: RunData) -> Iterator[tuple[str, str]]:
    """Yield (name, text): how many values are within their reference, then single values.

    `! ` before a name marks a value outside its reference. Without references the text says how to
    make them. Nothing if no GPU point is ok.
    """
    if not any(row.status == "ok" and row.device_type == "cuda" for row in data.rows):
        return
    standings = sorted(data.standings, key=lambda standing: standing.share)
    if not standings:
        yield "none", HOW_TO_MAKE
        return
    settings = distinguishing_settings(data.rows)
    names = {}
    for row in data.rows:
        names[row.point_id] = short_name(row, settings, data.ranks) or row.point_id
    if len(standings) > 1:
        yield "summary", _summary_of_references(standings, names)
    outside = [standing for standing in standings if not standing.is_within]
    shown = standings if len(standings) <= _MOST_SHOWN else outside
    for standing in shown[:_MOST_SHOWN]:
        mark = "" if standing.is_within else "! "
        text = standing_text(standing, says_own=len(standings) == 1)
        yield f"{mark}{names[standing.measured.point_id]}: {standing.entry.unit}", text
    if (more := len(shown) - _MOST_SHOWN) > 0:
        yield "more", f"{counted(more, 'other value')} outside; `--format json` has all."


def _summary_of_references(standings: Sequence[Standing], names: Mapping[str, str]) -> str:
    """Return how many values are within their reference, with the names of few points."""
    text = within_words(standings)
    # A reference that was made from this run says nothing about the run.
    if not any(standing.is_own for standing in standings):
        shares = [standing.share for standing in counted_standings(standings) or standings]
        text += f" Their median is {formatting.share_words(median(shares))} of it."
    points = list(dict.fromkeys(names[standing.measured.point_id] for standing in standings))
    if _MOST_SHOWN < len(points) <= _MOST_NAMED:
        text += f" The points: {'; '.join(points)}."
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
