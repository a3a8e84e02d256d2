"""The sections of a run's report, in order: tables, and listings beside the findings.

To add a section, add a function with `@_section`: terminal, Markdown and page show it where it
applies. A table by `_table_of_points` begins with the settings that tell the points apart; points
stand as in `RunAnswer.ordered`, unless the section says otherwise. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from raybench.analysis import rows as metrics
from raybench.analysis.answer import MIN_LOSS, LargestBatches, is_scaling, why_not_known
from raybench.analysis.references import counted_standings
from raybench.analysis.rounds import MOST_RANKS, RankStep, ranks_of_step, ranks_to_show
from raybench.analysis.rows import (
    DEGREES,
    ScaledRow,
    find_metric,
    rows_compared,
    value_of,
    with_most_ranks,
    workload_metrics,
)
from raybench.analysis.scaling import CAUSES, LOSSES, has_causes
from raybench.analysis.uneven import Fleet, Scenario, gain_over
from raybench.job.point import EQUAL
from raybench.records import Metric
from raybench.report import formatting
from raybench.report.documents import (
    MARKS_TITLE,
    Column,
    ColumnOf,
    Listing,
    Table,
    column,
    make_table,
    metric_column,
)
from raybench.report.messages import marks
from raybench.report.point_settings import (
    point_names,
    setting_columns,
    short_name,
)
from raybench.report.words import answer as words
from raybench.report.words import run as of_run
from raybench.report.words import shares
from raybench.report.words.reasons import losses_unknown_words
from raybench.report.words.references import HOW_TO_MAKE, count_within, standing_text
from raybench.results.tables import (
    PointRow,
    is_of_first_round,
    is_slowed_by_one_rank,
    step_of_parts,
)

if TYPE_CHECKING:
    from raybench.analysis.answer import RunAnswer
    from raybench.analysis.run_data import RunData
    from raybench.results.tables import RegionRow


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report of a run.

    anchor: its id in the page. title: its heading there. blocks: its listings, which stand among
    the findings, and its tables; none where it does not apply.
    """

    anchor: str
    title: str
    blocks: Callable[[RunAnswer], Iterable[Listing | Table]]


# All sections, in the order in which they are declared.
SECTIONS: list[Section] = []


def _section(
    anchor: str, title: str
) -> Callable[[Callable[[RunAnswer], Iterable[Listing | Table]]], None]:
    """Return a decorator: it adds a function that yields blocks to SECTIONS, and returns None."""
    return lambda blocks: SECTIONS.append(Section(anchor=anchor, title=title, blocks=blocks))


@_section("uneven", "Slow devices")
def _uneven(answer: RunAnswer) -> Iterator[Listing | Table]:
    """Yield a verdict for each fleet, then a table of the shares that were compared."""
    if not answer.data.fleets:
        return
    found, ranks = answer.data.fleets, answer.data.ranks
    verdicts = [(shares.fleet_name(one, ranks, found), shares.verdict(one)) for one in found]
    yield Listing(title="What to do with the slow devices", lines=verdicts)
    apart = dict.fromkeys(name for fleet in found for name in shares.apart(fleet, found))
    settings = setting_columns([fleet.first for fleet in found], list(apart), ranks)

    def in_first(cell: Callable[[Fleet], str]) -> Callable[[tuple[Fleet, Scenario]], str]:
        return lambda line: cell(line[0]) if line[1].row is line[0].first else ""

    def over_equal(line: tuple[Fleet, Scenario]) -> str:
        equal = line[0].scenarios.get(EQUAL)
        return shares.gain(gain_over(line[1], equal)) if equal and line[1] is not equal else ""

    def predicted(line: tuple[Fleet, Scenario]) -> str:
        step_ms = line[1].row.predicted_step_ms
        return "" if step_ms is None else f"{step_ms / line[1].step_ms - 1:+.1%}"

    slow = in_first(lambda fleet: f"{fleet.slow_count} of {fleet.first.world_size}")
    columns: list[ColumnOf[tuple[Fleet, Scenario]]] = [
        *((one, in_first(lambda f, of=cell: str(of(f.first)))) for one, cell in settings),  # type: ignore[misc]
        column("speed", in_first(lambda fleet: f"{fleet.probe_ratio:.2f}"), is_setting=True),
        column("slow", slow, is_setting=True, is_text=True),
        column("shares", lambda line: line[1].shares, is_setting=True, is_text=True),
        column("samples", lambda line: "/".join(str(r.items) for r in line[1].ranks), is_text=True),
        column("step ms", lambda line: formatting.step_in(formatting.MILLISECONDS, line[1].row)),
        column("predicted", predicted, drop=8),
        column("samples/s", lambda line: formatting.number(line[1].throughput), drop=7),
        column("over equal", over_equal),
        column("fast idle", lambda line: formatting.percent(line[1].idle_share_of_fast)),
    ]
    lines = [(fleet, one) for fleet in found for one in fleet.scenarios.values()]
    yield make_table(lines, columns, subject=found[0].first.workload, kind="slow devices")


@_section("largest", "Largest batches")
def _largest_batches(answer: RunAnswer) -> Iterator[Listing]:
    """Yield the largest batch of each series."""
    if isinstance(found := answer.found, LargestBatches):
        lines = [
            (
                words.batch_settings(one, found, answer.data.ranks),
                f"{one.batch_size:,} {words.what_fits(one)}",
            )
            for one in found.batches
        ]
        yield Listing(title="Largest batches", lines=lines)


@_section("losses", "What is lost")
def _losses(answer: RunAnswer) -> Iterator[Listing]:
    """Yield what the steps on the most devices lose to what."""
    data = answer.data
    rows = with_most_ranks(data.rows)
    if not is_scaling(data):
        return
    causes = []
    # Without a breakdown all of a loss is unexplained, which says nothing.
    for name in LOSSES if any(map(has_causes, rows)) else ():
        lost = sorted(value for row in rows if (value := getattr(row, name)) is not None)
        if lost and max(abs(lost[0]), abs(lost[-1])) >= MIN_LOSS:
            ends = map(formatting.percent, (lost[0], lost[-1]))
            causes.append(f"{formatting.span(*ends)} {CAUSES[name]}")
    devices = formatting.ranks_words(rows[0].world_size, data.ranks)
    lines = [(devices, ", ".join(causes))] if causes else []
    unknown = [row for row in rows if not has_causes(row)]
    for why, count in why_not_known(unknown).items():
        which = f"{count} of {formatting.counted(len(rows), 'point')}"
        lines.append((which, f"not known: {losses_unknown_words(why)}"))
    if lines:
        over = formatting.settings(data.run.baseline)
        yield Listing(title=f"Share of the step that is lost, against {over}", lines=lines)


STEP_MEANING = (
    "the median over the iterations; of ranks in lockstep their median, else the slowest one's"
)
_PARTS_NOTE = (
    "The parts are those of the slowest rank, from instrumented steps after the timed ones. With "
    "what is unexplained they add up to the step."
)
_FIRST_ROUND_NOTE = (
    "Steps are taken apart in the first round only, so the step beside the parts is that of the "
    "first round. MFU, %GEMM and TFLOP/s are those of all rounds."
)
_MEMORY_NOTE = (
    "Memory: by torch's allocator in a step that was watched, on the device that needs most."
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

    lines: (point of the run, item), the items being what `columns` show. kind, note: as of
    `Table`. Settings are one column `layout` if a degree of parallelism varies.
    """
    names = answer.table_settings
    if any(name in DEGREES for name in names):
        layout = Column(title="layout", is_text=True, is_setting=True, min_chars=20)
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


def point_table(answer: RunAnswer) -> Table:
    """Return the table of the points with their steps, the answer of the run, and other rates.

    Where it is too wide, the answer is never left out, and the throughput last.
    """
    rows, unit = list(answer.ordered), formatting.unit_of(answer.data.rows)
    data = answer.data
    meanings = (STEP_MEANING, "Rates follow the mean of the iterations", of_run.plus_minus(data))
    is_any_ok = any(row.status == "ok" for row in rows)
    explained = ". ".join(filter(None, meanings)) if is_any_ok else ""

    def step(row: ScaledRow) -> str:
        is_ok = row.status == "ok"
        return formatting.step_in(unit, row) if is_ok else formatting.STATUS_WORDS[row.status]

    columns: list[ColumnOf[ScaledRow]] = [
        column(f"step {unit.name}", step, unit=unit.name, meaning=explained),
        column(MARKS_TITLE, marks, meaning=of_run.marks_meaning(data), is_text=True),
    ]
    every, shows = data.rows, metrics.SCALING if data.has_throughput else metrics.RATES
    own, first = workload_metrics(every), find_metric(every, answer.asked.metric)
    # A search is answered by a setting, which has its column already.
    hidden = {"step_ms_p50", "batch_size", "global_batch_size"}
    # The speed-up and efficiency of 1 of a baseline point alone say nothing.
    compared = rows_compared(every)
    hidden |= set() if compared else {"speed_up"}
    hidden |= set() if any(row.efficiency is not None for row in compared) else {"efficiency"}
    first_dropped = [
        *(one for one in shows.optional if one.name != "throughput"),
        *reversed(own),
        metrics.BY_NAME["throughput"],
    ]
    for metric in dict.fromkeys([*([first] if first else []), *shows.metrics, *own]):
        is_kept = metric == first or metric not in first_dropped
        if metric.name not in hidden:
            drop = None if is_kept else first_dropped.index(metric)
            columns.append(_metric_column(answer, metric, drop))
    return _table_of_points(answer, [(row, row) for row in rows], columns, kind=of_run.alike(data))


def _metric_column(
    answer: RunAnswer, metric: Metric, drop: int | None = None
) -> ColumnOf[ScaledRow]:
    unit = formatting.unit_of(answer.data.rows)
    return (
        metric_column(metric, unit, of_run.of_columns(answer.data, answer.asked), drop),
        lambda row: formatting.metric(metric, value_of(row, metric), unit),
    )


@_section("points", "All points")
def _points(answer: RunAnswer) -> Iterator[Table]:
    """Yield the tables of all points: what was measured, where steps go, and their memory."""
    if answer.data.rows:
        yield point_table(answer)
    if not answer.data.rows or not answer.data.has_throughput:
        return
    unit = formatting.unit_of(answer.data.rows)
    names = ("compute_ms", "optimizer_ms", "comm_exposed_ms", "achieved_tflops_per_device")
    has_rounds = any(is_of_first_round(row) for row in answer.data.rows)
    apart = [
        row
        for row in answer.ordered
        if row.why_no_breakdown or any(getattr(row, name) is not None for name in names)
    ]
    parts: list[ColumnOf[ScaledRow]] = [
        column(MARKS_TITLE, lambda row: "b" if row.why_no_breakdown else "", is_text=True),
        column("step", lambda row: formatting.time_in(unit, step_of_parts(row))),
    ]
    which = "step of the first round" if has_rounds else "step"
    notes = [_PARTS_NOTE] + [_FIRST_ROUND_NOTE] * has_rounds
    notes += words.unknown_losses(answer.data.rows)
    watched = [row for row in answer.ordered if row.mem_parameters_bytes is not None]
    for kind, rows, shows, first, note in (
        (f"where the {which} goes, {unit.name}", apart, metrics.PARTS, parts, " ".join(notes)),
        ("memory at its peak, GiB", watched, metrics.MEMORY, [], _MEMORY_NOTE),
    ):
        # Where there is no room, the optional ones are left out first.
        order = list(dict.fromkeys([*shows.optional, *shows.metrics]))
        columns = [
            *first,
            *(_metric_column(answer, metric, order.index(metric)) for metric in shows.metrics),
        ]
        if rows:
            lines = [(row, row) for row in rows]
            yield _table_of_points(answer, lines, columns, kind=kind, note=note)


_RANKS_NOTE = (
    "Ranks: computes, idle, waits, exposed comm and unexplained add up to the step on each. Waits: "
    "for the slowest rank. *: the rank whose clock scripts usually read."
)
_RANKS_OF_FIRST_NOTE = "They are those of the first round, and so is that step."
_CLOCK_NOTE = (
    "Not waited, waited: what time.time() says of one step that begins on an idle device, until it "
    "is issued, and until the device is done."
)


def _rank_columns(unit: formatting.Unit) -> list[ColumnOf[RankStep]]:
    """Return the columns of a rank: its number, and the parts of its step in `unit`."""

    def time(name: str) -> ColumnOf[RankStep]:
        title = "exposed comm" if name == "exposed" else name
        return column(title, lambda one: formatting.part(getattr(one, f"{name}_ms"), unit))

    rank: ColumnOf[RankStep] = column("rank", lambda one: _rank_name(one.rank))
    return [rank, *map(time, ("computes", "idle", "waits", "exposed", "unexplained"))]


def _rank_name(rank: int) -> str:
    """Return the number of a rank; that of rank 0 has a mark, since scripts time by its clock."""
    return str(rank) if rank else "0*"


@_section("ranks", "Ranks that differ")
def _ranks(answer: RunAnswer) -> Iterator[Table]:
    """Yield a table of the points in which one rank slows the others: a line for each rank.

    Tables of uneven shares show the ranks themselves.
    """
    rows = [] if answer.data.fleets else answer.ordered
    slowed = [row for row in rows if row.status == "ok" and is_slowed_by_one_rank(row)]
    if lines := [(row, rank) for row in slowed for rank in ranks_to_show(ranks_of_step(row))]:
        columns = _rank_columns(formatting.unit_of(answer.data.rows))
        kind = f"where ranks differ, {formatting.unit_of(answer.data.rows).name} of each"
        note = _ranks_note(any(is_of_first_round(row) for row in slowed))
        yield _table_of_points(answer, lines, columns, kind=kind, note=note)


def _ranks_note(is_of_first: bool) -> str:
    return f"{_RANKS_NOTE} {_RANKS_OF_FIRST_NOTE}" if is_of_first else _RANKS_NOTE


def ranks_of_point(row: PointRow, unit: formatting.Unit) -> Table | None:
    """Return a table with a row per rank of one point; None if no part or clock can be shown.

    Of ranks with a share it has those of `ranks_to_show`; without `ranks_of_step` the first
    MOST_RANKS. Times are in `unit`. row: of the table `points`.
    """
    steps = {one.rank: one for one in ranks_to_show(ranks_of_step(row))}
    known = (row.wall_unsynced_ms_by_rank or (), row.wall_synced_ms_by_rank or ())
    working = (rank for rank, share in enumerate(row.share_by_rank or known[0]) if share)
    clocks = dict(zip(working, zip(*known, strict=True), strict=True)) if all(known) else {}
    shown = sorted(steps) or sorted(clocks)[:MOST_RANKS]
    if not shown:
        return None

    def of_step(shown: ColumnOf[RankStep]) -> ColumnOf[int]:
        return shown[0], lambda rank: shown[1](steps[rank]) if rank in steps else ""

    def of_clock(title: str, place: int) -> ColumnOf[int]:
        return column(title, lambda r: formatting.part(clocks.get(r, (None, None))[place], unit))

    columns = [
        column("rank", _rank_name),
        *map(of_step, _rank_columns(unit)[1:]),
        of_clock("not waited", 0),
        of_clock("waited", 1),
    ]
    kind = f"Each rank's step, {unit.name}, from steps after the timed ones"
    notes = [_ranks_note(is_of_first_round(row))] * bool(steps) + [_CLOCK_NOTE] * bool(clocks)
    return make_table(shown, columns, kind=kind, note=" ".join(notes))


_SCOPES_TITLE = "Module beside end to end"
_SCOPES_NOTE = (
    "Cold: the first step after the workload was built, on the slowest rank; of several rounds the "
    "median. Warm: the step. Gains: how many times as fast as the baseline; cold only where the "
    "processes of both points were new, which measure.fresh_workers makes them: in others "
    "something is loaded already. Exposed comm, host gap: communication that nothing "
    "hides, and what the device is idle because the host is late, as shares of the step of the "
    "first round."
)


@_section("scopes", _SCOPES_TITLE)
def _scopes(answer: RunAnswer) -> Iterator[Table]:
    """Yield a table of the ok points of each workload that differ in their parameter `scope`.

    It says how much of the whole a step runs; the scope with the shortest step comes first.
    """
    workloads: dict[str, dict[str, list[ScaledRow]]] = {}
    for row in answer.ordered:
        if row.status == "ok" and "scope" in row.params:
            scopes = workloads.setdefault(row.workload, {})
            scopes.setdefault(row.params["scope"], []).append(row)
    bases = {row.series: row for row in answer.data.rows if row.is_baseline and row.status == "ok"}

    def cold_gain(row: ScaledRow) -> str:
        # A first step is cold where it found nothing of an earlier point in its processes.
        base = bases.get(row.series)
        if base is None or not (row.new_processes and base.new_processes):
            return ""
        first, cold = base.first_step_ms, row.first_step_ms
        return "" if first is None or cold is None else formatting.ratio(first / cold)

    def share_of_step(name: str) -> Callable[[ScaledRow], str]:
        return lambda row: formatting.percent(
            None if (part := getattr(row, name)) is None else part / (step_of_parts(row) or 1.0)
        )

    columns: list[ColumnOf[ScaledRow]] = [
        column("cold", lambda row: formatting.number(row.first_step_ms)),
        column("warm", lambda row: formatting.number(row.step_ms_p50)),
        column(MARKS_TITLE, marks, is_text=True),
        column("cold gain", cold_gain),
        column("warm gain", lambda row: formatting.ratio(row.speed_up)),
        column("exposed comm", share_of_step("comm_exposed_ms")),
        column("host gap", share_of_step("host_gap_ms"), drop=1),
        column("GiB", lambda row: formatting.gib(row.peak_mem_allocated_bytes), drop=0),
    ]
    kind = f"{_SCOPES_TITLE.lower()}, ms"
    for scopes in workloads.values():
        ordered = sorted(scopes.values(), key=lambda rows: min(r.step_ms_p50 or 0.0 for r in rows))
        lines = [(row, row) for rows in ordered for row in rows]
        if len(scopes) > 1:
            yield _table_of_points(answer, lines, columns, kind=kind, note=_SCOPES_NOTE)


_REGIONS_NOTE = (
    "Regions: parts that the step names itself, each on the rank where it takes longest, and their "
    "share of the instrumented step in which they were timed."
)


def region_columns(unit: formatting.Unit) -> list[ColumnOf[RegionRow]]:
    """Return the columns of a region: name, calls a step, bare time in `unit`, share of step."""
    return [
        column("region", lambda one: one.region, is_text=True, min_chars=20),
        column("calls", lambda one: str(one.calls)),
        column("time", lambda one: formatting.part(one.region_ms, unit)),
        column("of step", lambda one: formatting.percent(one.share_pct / 100)),
    ]


@_section("regions", "Regions of the step")
def _regions(answer: RunAnswer) -> Iterator[Table]:
    """Yield a table with a line for each region of a point."""
    found, columns = answer.data.regions, region_columns(formatting.unit_of(answer.data.rows))
    if lines := [(row, one) for row in answer.ordered for one in found.get(row.point_id, ())]:
        kind = f"regions of the step, {formatting.unit_of(answer.data.rows).name}"
        yield _table_of_points(answer, lines, columns, kind=kind, note=_REGIONS_NOTE)


_REFERENCE_TITLE = "Against the reference"
# So few figures are all shown; of more those outside, and of these the slowest.
_MOST_SHOWN = 4


@_section("references", _REFERENCE_TITLE)
def _references(answer: RunAnswer) -> Iterator[Listing]:
    """Yield how the figures of the run stand against the references of its devices."""
    if lines := list(reference_lines(answer.data)):
        yield Listing(title=_REFERENCE_TITLE, lines=lines)


def reference_lines(data: RunData) -> Iterator[tuple[str, str]]:
    """Yield (name, text): how many figures are within their reference, then the slowest outside it.

    Up to four figures are all shown (`! ` before the name: outside), a single one without a count;
    of more, four of those outside, and how many others are outside. If no figure has a reference:
    how to make one. Nothing if no GPU point is ok.
    """
    if not any(row.status == "ok" and row.device_type == "cuda" for row in data.rows):
        return
    found = sorted(data.standings, key=lambda one: one.share)
    if not found:
        yield "none", HOW_TO_MAKE
        return
    if len(found) > 1:
        middle = median(one.share for one in counted_standings(found) or found)
        yield "all", f"{count_within(found)}; the median is {middle:.0%} of the reference"
    rows = data.rows
    names = dict(zip((row.point_id for row in rows), point_names(rows), strict=True))
    outside = [one for one in found if not one.is_within]
    shown = found if len(found) <= _MOST_SHOWN else outside
    for one in shown[:_MOST_SHOWN]:
        mark = "" if one.is_within else "! "
        yield f"{mark}{names[one.measured.point_id]}, {one.entry.unit}", standing_text(one)
    if (more := len(shown) - _MOST_SHOWN) > 0:
        yield "more", f"{more} outside; `--format json` has all"
