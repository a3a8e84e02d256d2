"""The sections of a run's report, in order: tables, and listings beside the findings.

To add a section, add a function with `@section`: terminal, Markdown and page show it where it
applies. A table begins with the settings that tell the points apart, and its points stand case by
case, the best first. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from raybench.analysis import rows as metrics
from raybench.analysis.rounds import (
    MOST_RANKS,
    RankStep,
    ranks_of_step,
    telling_ranks,
)
from raybench.analysis.rows import ScaledRow, setting, value_of, workload_metrics
from raybench.analysis.uneven import Fleet, Gain, Scenario, gain_over
from raybench.job.point import EQUAL, FAST
from raybench.records import Metric
from raybench.report import formatting
from raybench.report.blocks import (
    MARKS_TITLE,
    Column,
    ColumnOf,
    Listing,
    Table,
    make_table,
    metric_column,
)
from raybench.report.messages import marks
from raybench.report.point_settings import DEGREES, point_names, setting_columns, short_name
from raybench.report.summary import HOW_TO_MAKE, count_within, find_metric, rows_compared
from raybench.results.breakdown import is_slowed_by_one_rank
from raybench.results.tables import PointRow

if TYPE_CHECKING:
    from raybench.report.summary import Summary
    from raybench.results.tables import RegionRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report of a run.

    anchor: its id in the page. title: its heading there.
    applies: whether the run has what the section is about; nothing else of it is called if not.
    blocks: its listings, which stand among the findings, and its tables.
    lead: the sentence that the report begins with, where this section answers the question of the
    job; empty where it does not. None: it never does.
    """

    anchor: str
    title: str
    applies: Callable[[Summary], bool]
    blocks: Callable[[Summary], Iterable[Listing | Table]]
    lead: Callable[[Summary], str] | None = None


# All sections, in the order in which they are declared.
SECTIONS: list[Section] = []


def section(
    anchor: str,
    title: str,
    applies: Callable[[Summary], bool],
    lead: Callable[[Summary], str] | None = None,
) -> Callable[[Callable[[Summary], Iterable[Listing | Table]]], None]:
    """Return a decorator that adds the blocks which a function yields to SECTIONS."""
    return lambda blocks: SECTIONS.append(
        Section(anchor=anchor, title=title, applies=applies, blocks=blocks, lead=lead)
    )


@section(
    "uneven",
    "Slow devices",
    applies=lambda report: bool(report.fleets),
    lead=lambda report: lead_of(report.fleets, report.ranks),
)
def _uneven(report: Summary) -> Iterator[Listing | Table]:
    """Yield a verdict for each fleet, then a table of the shares that were compared."""
    fleets = report.fleets
    verdicts = [(fleet_name(fleet, report.ranks), verdict(fleet)) for fleet in fleets]
    yield Listing(title="What to do with the slow devices", lines=verdicts)
    yield _scenario_table(fleets)


def lead_of(fleets: Sequence[Fleet], ranks: str) -> str:
    """Return which shares were best most often, and where they gained most.

    A case counts only where its intervals leave no other shares that may be as good.
    """
    decided = [fleet for fleet in fleets if not fleet.as_good()]
    cases = f"{len(fleets)} cases"
    if not decided:
        first = fleets[0]
        where = f" in any of {cases}; {fleet_name(first, ranks)}" if len(fleets) > 1 else ""
        more = _gain(_over_best_other(first.best, first))
        return (
            f"which shares are best is not decided{where}: {first.best.shares} does {more} over "
            "the best of the others"
        )
    shares, count = Counter(fleet.best.shares for fleet in decided).most_common(1)[0]
    won = [fleet for fleet in decided if fleet.best.shares == shares]
    gain, most = max(
        ((_over_best_other(one.best, one), one) for one in won), key=lambda pair: pair[0].gain
    )
    where = f"in {count} of {cases}" if len(fleets) > 1 else "here"
    open_cases = len(fleets) - len(decided)
    return (
        f"shares={shares} is best {where}, by up to {_gain(gain)} over the best of "
        f"the others ({fleet_name(most, ranks)})"
        + (f"; {open_cases} cannot be told apart" if open_cases else "")
    )


def fleet_name(fleet: Fleet, ranks: str) -> str:
    """Return `1 of 2 GPUs at 0.48`, the speed that the probes found."""
    there_are = formatting.ranks_words(int(fleet.first.world_size), ranks)
    if not fleet.slow_count:
        return f"{there_are}, none slow"
    return f"{fleet.slow_count} of {there_are} at {fleet.probe_ratio:.2f} of the speed"


def verdict(fleet: Fleet) -> str:
    """Return which shares are best, by how much, and below which batch they are not."""
    best = fleet.best
    gains = [
        f"{_gain(gain_over(best, fleet.scenarios[name]))} over {name}"
        for name in (EQUAL, FAST)
        if name in fleet.scenarios and name != best.shares
    ]
    text = f"{best.shares}: {', '.join(gains)}" if gains else best.shares
    rivals = fleet.as_good()
    if rivals:
        text += f"; {' and '.join(rivals)} may be as good"
    called = fleet.predicted_best
    if called and called is not best and called.shares not in rivals:
        text += f"; {called.shares} was predicted to be"
    batch = fleet.crossover_batch
    if batch is not None and best.shares not in (EQUAL, FAST):
        is_ever = batch >= 1
        text += (
            f"; below a global batch of {batch:,.0f} fast should be faster"
            if is_ever
            else "; fast should be slower at any batch"
        )
    return text


def _gain(gain: Gain) -> str:
    return f"{gain.gain:+.1%} {formatting.half_width(gain.half_width)}"


# A scenario, its fleet, and whether it is the first of its fleet.
_Line = tuple[Scenario, Fleet, bool]


def _scenario_table(fleets: Sequence[Fleet]) -> Table:
    """Return a line for each way to share the work; the speed stands in the first of a fleet."""
    lines = [
        (scenario, fleet, place == 0)
        for fleet in fleets
        for place, scenario in enumerate(fleet.scenarios.values())
    ]

    def setting(title: str, cell: Callable[[_Line], str], *, is_text: bool) -> ColumnOf[_Line]:
        return Column(title=title, is_text=is_text, is_setting=True), cell

    def column(
        title: str, cell: Callable[[Scenario, Fleet], str], drop: int | None = None
    ) -> ColumnOf[_Line]:
        return Column(title=title, drop=drop), lambda line: cell(line[0], line[1])

    columns = [
        setting("speed", lambda ln: f"{ln[1].probe_ratio:.2f}" if ln[2] else "", is_text=False),
        setting(
            "slow",
            lambda ln: f"{ln[1].slow_count} of {ln[1].first.world_size}" if ln[2] else "",
            is_text=True,
        ),
        setting("shares", lambda ln: ln[0].shares, is_text=True),
        (
            Column(title="samples", is_text=True),
            lambda ln: "/".join(str(rank.items) for rank in ln[0].ranks),
        ),
        column("step ms", lambda one, _: formatting.step_in(formatting.MILLISECONDS, one.row)),
        column("predicted", lambda one, _: _percent(one.prediction_error, signed=True), 8),
        column("samples/s", lambda one, _: formatting.number(one.throughput), 7),
        column("over equal", _over_equal),
        column("fast idle", lambda one, _: _percent(one.idle_share_of_fast)),
    ]
    subject = str(fleets[0].first.workload)
    return make_table(lines, columns, subject=subject, kind="slow devices")


def _over_equal(scenario: Scenario, fleet: Fleet) -> str:
    equal = fleet.scenarios.get(EQUAL)
    return _gain(gain_over(scenario, equal)) if equal and scenario is not equal else ""


def _over_best_other(scenario: Scenario, fleet: Fleet) -> Gain:
    others = [other for other in fleet.scenarios.values() if other is not scenario]
    return gain_over(scenario, max(others, key=lambda other: other.throughput))


def _percent(share: float | None, *, signed: bool = False) -> str:
    """Return a share of 1 as `12.3%`, or `+12.3%` where signed; empty where it is None."""
    if share is None:
        return ""
    return f"{share:+.1%}" if signed else f"{share:.1%}"


T = TypeVar("T")

# A short report shows so many points.
MOST_ROWS = 16
STEP_MEANING = (
    "the median over the iterations; of ranks in lockstep their median, else the slowest one's"
)
_PARTS_NOTE = (
    "The parts are those of the slowest rank, from instrumented steps after the timed ones, so "
    "their sum may differ from the step."
)
_MEMORY_NOTE = (
    "Memory: by torch's allocator in a step that was watched, on the device that needs most."
)


def table_of_points(
    summary: Summary,
    lines: Sequence[tuple[ScaledRow, T]],
    columns: Iterable[ColumnOf[T]],
    *,
    kind: str,
    note: str = "",
) -> Table:
    """Return a table with a row for each line: the settings of its point, then `columns`.

    lines: points with what `columns` write. kind: what the table shows, and the unit of its times.
    """
    names = summary.table_settings
    if any(name in DEGREES for name in names):
        words = Column(title="layout", is_text=True, is_setting=True, min_chars=20)
        settings: list[ColumnOf[ScaledRow]] = [
            (words, lambda row: short_name(row, names, summary.ranks))
        ]
    else:
        settings = setting_columns(summary.rows, names, summary.ranks)
    shown: list[ColumnOf[tuple[ScaledRow, T]]] = [
        *((column, lambda line, cell=cell: cell(line[0])) for column, cell in settings),
        *((column, lambda line, cell=cell: cell(line[1])) for column, cell in columns),
    ]
    subject = ", ".join(dict.fromkeys(row.workload for row in summary.rows))
    return make_table(lines, shown, subject=subject, kind=kind, note=note)


def answer_table(summary: Summary, limit: int | None = None) -> Table:
    """Return the table of the points with their steps, the answer of the run, and other rates.

    limit: of more points, only so many of those that finished on the most devices: the best of each
    case, then the second of each, and so on.
    """
    rows, unit = summary.ordered, summary.unit
    if limit is not None and len(rows) > limit:
        finished = [row for row in rows if row.status == "ok"] or rows
        most = max(row.world_size for row in finished)
        rows = _first_of_each_case(
            [row for row in finished if row.world_size == most], summary.case_settings, limit
        )
    meaning = f"{STEP_MEANING}. Rates follow the mean of the iterations. {summary.plus_minus}"
    explained = meaning.rstrip(". ") if any(row.status == "ok" for row in rows) else ""
    columns: list[ColumnOf[ScaledRow]] = [
        (
            Column(title=f"step {unit.name}", unit=unit.name, meaning=explained),
            lambda row: step_cell(row, unit),
        ),
        (Column(title=MARKS_TITLE, meaning=summary.marks_meaning, is_text=True), marks),
        *_rate_columns(summary),
    ]
    return table_of_points(summary, [(row, row) for row in rows], columns, kind=summary.alike)


def _first_of_each_case(
    rows: Sequence[ScaledRow], cases: Sequence[str], limit: int
) -> list[ScaledRow]:
    """Return `limit` of the rows in their order: the first of each case before any second one."""
    met: Counter[tuple[str, ...]] = Counter()
    places = []
    for index, row in enumerate(rows):
        case = tuple(str(setting(row, name)) for name in cases)
        places.append((met[case], index))
        met[case] += 1
    return [rows[index] for index in sorted(index for _, index in sorted(places)[:limit])]


def step_cell(row: ScaledRow, unit: formatting.Unit) -> str:
    """Write the step time with its ±, or how a point without one ended."""
    is_ok = row.status == "ok"
    return formatting.step_in(unit, row) if is_ok else formatting.STATUS_WORDS[row.status]


def _rate_columns(summary: Summary) -> Iterator[ColumnOf[ScaledRow]]:
    """Yield the columns of the answer, of what steps reach, and of the workload's own metrics.

    The answer is never left out for room, and throughput last.
    """
    rows, shows = summary.rows, metrics.SCALING if summary.has_throughput else metrics.RATES
    own, answer = workload_metrics(rows), find_metric(rows, summary.answer.metric)
    # Baseline points alone have a speed-up of 1, which says nothing.
    hidden = {"step_ms_p50", *(() if rows_compared(rows) else ("speed_up", "efficiency"))}
    # A search is answered by a setting, which has its column already.
    hidden |= {"batch_size", "global_batch_size"}
    shown = [*([answer] if answer else []), *shows.metrics, *own]
    first_dropped = [
        *(one for one in shows.optional if one.name != "throughput"),
        *reversed(own),
        metrics.BY_NAME["throughput"],
    ]
    for metric in dict.fromkeys(one for one in shown if one.name not in hidden):
        is_kept = metric == answer or metric not in first_dropped
        yield _metric_column(summary, metric, None if is_kept else first_dropped.index(metric))


def _metric_column(
    summary: Summary, metric: Metric, drop: int | None = None
) -> ColumnOf[ScaledRow]:
    unit = summary.unit
    return (
        metric_column(metric, unit, summary.words, drop),
        lambda row: formatting.metric(metric, value_of(row, metric), unit),
    )


_BROKEN_DOWN = ("compute_ms", "optimizer_ms", "comm_exposed_ms", "achieved_tflops_per_device")


@section("points", "All points", applies=lambda report: bool(report.rows))
def point_tables(summary: Summary) -> Iterator[Table]:
    """Yield the tables of all points: what was measured, where steps go, and their memory."""
    yield answer_table(summary)
    if not summary.has_throughput:
        return
    unit = summary.unit
    apart = [
        row
        for row in summary.ordered
        if row.why_no_breakdown or any(getattr(row, name) is not None for name in _BROKEN_DOWN)
    ]
    parts: list[ColumnOf[ScaledRow]] = [
        (
            Column(title=MARKS_TITLE, is_text=True),
            lambda row: "b" if row.why_no_breakdown else "",
        ),
        (Column(title="step"), lambda row: formatting.time_in(unit, row.step_ms_p50)),
    ]
    watched = [row for row in summary.ordered if row.mem_parameters_bytes is not None]
    for kind, rows, shows, first, note in (
        (f"where the step goes, {unit.name}", apart, metrics.PARTS, parts, _PARTS_NOTE),
        ("memory at its peak, GiB", watched, metrics.MEMORY, [], _MEMORY_NOTE),
    ):
        # Where there is no room, the optional ones are left out first.
        order = list(dict.fromkeys([*shows.optional, *shows.metrics]))
        columns = [
            *first,
            *(_metric_column(summary, metric, order.index(metric)) for metric in shows.metrics),
        ]
        if rows:
            lines = [(row, row) for row in rows]
            yield table_of_points(summary, lines, columns, kind=kind, note=note)


_RANKS_NOTE = (
    "Ranks: computes, idle, waits and exchange add up to the step on each. Waits: for the slowest "
    "rank. Exchange: the step beyond the slowest rank's own. *: the rank whose clock scripts "
    "usually read."
)
_CLOCK_NOTE = (
    "Not waited, waited: what time.time() says of one step that begins on an idle device, until it "
    "is issued, and until the device is done."
)


def _rank_columns(unit: formatting.Unit) -> list[ColumnOf[RankStep]]:
    def time(name: str) -> Callable[[RankStep], str]:
        return lambda one: "" if (ms := getattr(one, name)) is None else formatting.part(ms, unit)

    return [
        (Column(title="rank"), lambda one: _rank_name(one.rank)),
        *(
            (Column(title=name), time(f"{name}_ms"))
            for name in ("computes", "idle", "waits", "exchange")
        ),
    ]


def _rank_name(rank: int) -> str:
    """Return the number of a rank; that of rank 0 has a mark, since scripts time by its clock."""
    return str(rank) if rank else "0*"


@section("ranks", "Ranks that differ", applies=lambda report: bool(report.rows))
def _ranks(report: Summary) -> Iterator[Table]:
    """Yield tables of the points in which one rank slows the others: a line for each rank."""
    if report.fleets:
        return  # Tables of uneven shares show the ranks themselves.
    slowed = [row for row in report.ordered if row.status == "ok" and is_slowed_by_one_rank(row)]
    if lines := [(row, rank) for row in slowed for rank in telling_ranks(ranks_of_step(row))]:
        kind = f"where ranks differ, {report.unit.name} of each"
        yield table_of_points(
            report, lines, _rank_columns(report.unit), kind=kind, note=_RANKS_NOTE
        )


def ranks_of_point(row: PointRow, unit: formatting.Unit) -> Table | None:
    """Return a table of the ranks of one point; None where nothing of them is known.

    row: of the table `points`.
    """
    steps = {one.rank: one for one in telling_ranks(ranks_of_step(row))}
    known = (row.wall_unsynced_ms_by_rank or (), row.wall_synced_ms_by_rank or ())
    clocks = dict(enumerate(zip(*known, strict=True))) if all(known) else {}
    columns: list[ColumnOf[int]] = [
        (column, lambda rank, cell=cell: cell(steps[rank]) if rank in steps else "")  # type: ignore[misc]
        for column, cell in _rank_columns(unit)[1:]
    ]
    columns += [
        (
            Column(title=title),
            lambda rank, place=place: formatting.part(clocks[rank][place], unit) if clocks else "",  # type: ignore[misc]
        )
        for place, title in enumerate(("not waited", "waited"))
    ]
    shown = sorted(steps) or sorted(clocks)[:MOST_RANKS]
    if not shown:
        return None
    notes = [_RANKS_NOTE] * bool(steps) + [_CLOCK_NOTE] * bool(clocks)
    return make_table(
        shown,
        [(Column(title="rank"), _rank_name), *columns],
        kind=f"Each rank's step, {unit.name}, from steps after the timed ones",
        note=" ".join(notes),
    )


SCOPE = "scope"
_SCOPES_TITLE = "Module beside end to end"
_SCOPES_NOTE = (
    "Cold: the first step after the workload was built, on the slowest rank; of several rounds the "
    "median. Warm: the step. Gains: how many times as fast as the baseline; cold only where the "
    "processes of both points were new, which measure.fresh_workers makes them: in others "
    "something is loaded already. Exposed comm, host gap: communication that nothing "
    "hides, and what the device is idle because the host is late, as shares of the step."
)


@section("scopes", _SCOPES_TITLE, applies=lambda report: bool(_workloads(report.rows)))
def _scope_tables(report: Summary) -> Iterator[Table]:
    """Yield a table for each workload that was measured in several scopes."""
    for group in _workloads(report.rows):
        yield _table(group, report)


def _workloads(rows: Sequence[ScaledRow]) -> list[list[ScaledRow]]:
    """Return the points of each workload that was measured in several scopes."""
    groups: dict[str, list[ScaledRow]] = {}
    for row in rows:
        if SCOPE in row.params:
            groups.setdefault(row.workload, []).append(row)
    return [group for group in groups.values() if len(_scopes(group)) > 1]


def _scopes(rows: Sequence[ScaledRow]) -> list[str]:
    """Return the scopes that were measured, that with the shortest step first."""
    steps: dict[str, list[float]] = {}
    for row in rows:
        if row.step_ms_p50 is not None:
            steps.setdefault(row.params[SCOPE], []).append(row.step_ms_p50)
    return sorted(steps, key=lambda scope: min(steps[scope]))


def _table(rows: Sequence[ScaledRow], report: Summary) -> Table:
    """Return a line for each ok point of a workload, the scope with the shortest step first."""
    scopes = _scopes(rows)
    lines = sorted(
        ((row, row) for row in report.ordered if row in rows and row.status == "ok"),
        key=lambda line: scopes.index(line[0].params[SCOPE]),
    )
    bases = {row.series: row for row in rows if row.is_baseline and row.status == "ok"}
    unit = formatting.MILLISECONDS
    columns: list[ColumnOf[ScaledRow]] = [
        (Column(title="cold"), lambda row: formatting.time_in(unit, row.first_step_ms)),
        (Column(title="warm"), lambda row: formatting.time_in(unit, row.step_ms_p50)),
        (Column(title=MARKS_TITLE, is_text=True), marks),
        (Column(title="cold gain"), lambda row: formatting.ratio(_cold_gain(row, bases))),
        (Column(title="warm gain"), lambda row: formatting.ratio(row.speed_up)),
        (Column(title="exposed comm"), lambda row: _share_of_step(row, "comm_exposed_ms")),
        (Column(title="host gap", drop=1), lambda row: _share_of_step(row, "host_gap_ms")),
        (
            Column(title="GiB", drop=0),
            lambda row: formatting.gib(row.peak_mem_allocated_bytes),
        ),
    ]
    kind = f"{_SCOPES_TITLE.lower()}, ms"
    return table_of_points(report, lines, columns, kind=kind, note=_SCOPES_NOTE)


def _cold_gain(row: ScaledRow, bases: Mapping[int, ScaledRow]) -> float | None:
    """Return the first step of the baseline over that of the point; None where one is not cold.

    A first step is cold where it found nothing of an earlier point in its processes.
    """
    base = bases.get(row.series)
    if base is None or not (row.new_processes and base.new_processes):
        return None
    if row.first_step_ms is None or base.first_step_ms is None:
        return None
    return base.first_step_ms / row.first_step_ms


def _share_of_step(row: ScaledRow, name: str) -> str:
    part, step = getattr(row, name), row.step_ms_p50
    return formatting.percent(part / step) if part is not None and step else ""


_REGION_CHARS = 20
_REGIONS_NOTE = (
    "Regions: parts that the step names itself, each on the rank where it takes longest, and their "
    "share of the instrumented step in which they were timed."
)


def region_columns(unit: formatting.Unit) -> list[ColumnOf[RegionRow]]:
    """Return the columns of a region: its name, its calls, its time in `unit`, and its share."""
    return [
        (Column(title="region", is_text=True, min_chars=_REGION_CHARS), lambda one: one.region),
        (Column(title="calls"), lambda one: "" if one.calls is None else str(one.calls)),
        (Column(title="time"), lambda one: formatting.part(one.region_ms, unit)),
        (
            Column(title="of step"),
            lambda one: "" if one.share_pct is None else formatting.percent(one.share_pct / 100),
        ),
    ]


@section("regions", "Regions of the step", applies=lambda report: bool(report.regions))
def _regions(report: Summary) -> Iterator[Table]:
    """Yield a table with a line for each region of a point."""
    lines = [
        (row, region) for row in report.ordered for region in report.regions.get(row.point_id, ())
    ]
    kind = f"regions of the step, {report.unit.name}"
    yield table_of_points(report, lines, region_columns(report.unit), kind=kind, note=_REGIONS_NOTE)


_REFERENCE_TITLE = "Against the reference"
# So few figures are all shown; of more those outside, and of these the slowest.
_MOST_SHOWN = 4


def has_gpus(summary: Summary) -> bool:
    """Return whether a point that is ok ran on GPUs, of which there may be references."""
    return any(row.status == "ok" and row.device_type == "cuda" for row in summary.rows)


@section("references", _REFERENCE_TITLE, applies=has_gpus)
def _references(report: Summary) -> Iterator[Listing]:
    """Yield how the figures of the run stand against the references of its devices."""
    yield Listing(title=_REFERENCE_TITLE, lines=list(reference_lines(report)))


def reference_lines(report: Summary) -> Iterator[tuple[str, str]]:
    """Yield how many figures are within their reference, then those outside, the slowest first."""
    found = sorted(report.standings, key=lambda one: one.share)
    if not found:
        yield "none", HOW_TO_MAKE
        return
    outside = [one for one in found if not one.is_within]
    if len(found) > 1:
        is_part = any(report.run.run_id in one.entry.measured for one in found)
        own = "; it was made from this run too" if is_part else ""
        middle = median(one.share for one in found)
        yield "all", f"{count_within(found)}, the median is {middle:.0%} of it{own}"
    names = dict(zip((row.point_id for row in report.rows), point_names(report.rows), strict=True))
    shown = found if len(found) <= _MOST_SHOWN else outside
    for one in shown[:_MOST_SHOWN]:
        mark = "" if one.is_within else "! "
        yield f"{mark}{names[one.measured.point_id]}, {one.entry.unit}", one.text
    if (more := len(shown) - _MOST_SHOWN) > 0:
        yield "more", f"{more} outside; `--format json` has all"
