"""The section of slow devices among fast ones: scenarios, ranks, verdicts and the decision map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raybench.analysis.settings import SETTINGS, setting
from raybench.analysis.uneven import Fleet, Gain, RankOfStep, Scenario, gain_over
from raybench.job.point import EQUAL, FAST
from raybench.report import formatting
from raybench.report.blocks import Column, ColumnOf, Listing, Table, make_table
from raybench.report.sections import Section
from raybench.report.sections.ranks import NOTE as RANKS_NOTE

if TYPE_CHECKING:
    from raybench.report.summary import Summary


def _blocks(report: Summary) -> Iterator[Listing | Table]:
    fleets = report.fleets
    verdicts = [(fleet_name(fleet, report.ranks), verdict(fleet)) for fleet in fleets]
    yield Listing(title="What to do with the slow devices", lines=verdicts)
    yield _scenario_table(fleets)
    yield _rank_table(fleets)
    yield from _decision_map(fleets)


def lead_of(fleets: Sequence[Fleet], ranks: str) -> str:
    """Return which shares were best most often, and where they gained most.

    A case counts only where its intervals leave no other shares that may be as good.
    """
    decided = [fleet for fleet in fleets if not fleet.as_good()]
    cases = f"{len(fleets)} cases" if len(fleets) > 1 else "this case"
    if not decided:
        return f"which shares are best in {cases} is within the intervals"
    shares, count = Counter(fleet.best.shares for fleet in decided).most_common(1)[0]
    won = [fleet for fleet in decided if fleet.best.shares == shares]
    most = max(won, key=lambda fleet: _lead_of_best(fleet).gain)
    where = f"in {count} of {cases}" if len(fleets) > 1 else "here"
    open_cases = len(fleets) - len(decided)
    return (
        f"shares={shares} is best {where}, by up to {_gain(_lead_of_best(most))} over the best of "
        f"the others ({fleet_name(most, ranks)})"
        + (f"; {open_cases} cannot be told apart" if open_cases else "")
    )


def _lead_of_best(fleet: Fleet) -> Gain:
    return _over_best_other(fleet.best, fleet)


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
    return f"{gain.gain:+.1%} ±{gain.half_width:.1%}"


# A scenario, its fleet, and whether it is the first of its fleet.
_Line = tuple[Scenario, Fleet, bool]


def _scenario_table(fleets: Sequence[Fleet]) -> Table:
    lines = [
        (scenario, fleet, place == 0)
        for fleet in fleets
        for place, scenario in enumerate(fleet.scenarios.values())
    ]

    def column(
        title: str, cell: Callable[[Scenario, Fleet], str], drop: int | None = None
    ) -> ColumnOf[_Line]:
        return Column(title=title, drop=drop), lambda line: cell(line[0], line[1])

    columns: list[ColumnOf[_Line]] = [
        *_fleet_columns(lambda line: line[1], lambda line: line[2]),
        (_setting("shares"), lambda line: line[0].shares),
        (
            Column(title="samples", is_text=True),
            lambda line: "/".join(str(rank.items) for rank in line[0].ranks),
        ),
        column("step ms", lambda one, _: formatting.step_in(formatting.MILLISECONDS, one.row)),
        column("predicted", lambda one, _: _percent(one.prediction_error, signed=True), 8),
        column("samples/s", lambda one, _: formatting.number(one.throughput), 7),
        column("over equal", _over_equal),
        column("fast idle", lambda one, _: _percent(one.idle_share_of_fast)),
    ]
    return make_table(lines, columns, subject=_workload(fleets), kind="slow devices")


def _setting(title: str) -> Column:
    return Column(title=title, is_text=title != "speed", is_setting=True)


def _fleet_columns(
    fleet_of: Callable[[Any], Fleet], is_first: Callable[[Any], bool]
) -> list[ColumnOf[Any]]:
    """Return the columns of a fleet, which are blank but in its first line."""

    def first(write: Callable[[Fleet], str]) -> Callable[[Any], str]:
        return lambda line: write(fleet_of(line)) if is_first(line) else ""

    return [
        (_setting("speed"), first(lambda fleet: f"{fleet.probe_ratio:.2f}")),
        (
            _setting("slow"),
            first(lambda fleet: f"{fleet.slow_count} of {fleet.first.world_size}"),
        ),
    ]


def _over_equal(scenario: Scenario, fleet: Fleet) -> str:
    equal = fleet.scenarios.get(EQUAL)
    return _gain(gain_over(scenario, equal)) if equal and scenario is not equal else ""


def _over_best_other(scenario: Scenario, fleet: Fleet) -> Gain:
    others = [other for other in fleet.scenarios.values() if other is not scenario]
    return gain_over(scenario, max(others, key=lambda other: other.throughput))


def _workload(fleets: Sequence[Fleet]) -> str:
    return str(fleets[0].first.workload)


def _rank_table(fleets: Sequence[Fleet]) -> Table:
    lines = [
        (fleet, scenario, rank, (not scenario_place and not rank_place), not rank_place)
        for fleet in fleets
        for scenario_place, scenario in enumerate(fleet.scenarios.values())
        for rank_place, rank in enumerate(scenario.ranks)
    ]
    columns: list[ColumnOf[tuple[Fleet, Scenario, RankOfStep, bool, bool]]] = [
        _fleet_columns(lambda line: line[0], lambda line: line[3])[0],
        (_setting("shares"), lambda line: line[1].shares if line[4] else ""),
        (_setting("rank"), lambda line: _rank_name(line[2], line[1])),
        (Column(title="samples"), lambda line: str(line[2].items)),
        (Column(title="own step"), lambda line: _cell(line[2].own_ms, formatting.number)),
        (Column(title="waits"), lambda line: _cell(line[2].wait_ms, formatting.number)),
        (
            Column(title="exchange"),
            lambda line: _cell(line[1].exchange_ms if line[2].items else None, formatting.number),
        ),
    ]
    kind = "slow devices, ms of each rank"
    return make_table(lines, columns, subject=_workload(fleets), kind=kind, note=RANKS_NOTE)


def _rank_name(rank: RankOfStep, scenario: Scenario) -> str:
    if rank.slow_ratio is not None:
        return f"{rank.rank} (emulated)"
    is_mixed = len({one.model for one in scenario.ranks}) > 1
    return f"{rank.rank} ({rank.model})" if is_mixed else str(rank.rank)


def _decision_map(fleets: Sequence[Fleet]) -> Iterator[Table]:
    """Make a table of slow_ratio by slow_count for each number of devices and step."""
    groups: dict[tuple[Any, ...], list[Fleet]] = {}
    for fleet in fleets:
        groups.setdefault(_step_of(fleet), []).append(fleet)
    for members in groups.values():
        if len(members) < 2:
            continue
        world_size = int(members[0].first.world_size)
        cells = {(fleet.slow_ratio, fleet.slow_count): _map_cell(fleet) for fleet in members}

        def cell_of(count: int, cells: Mapping[Any, str] = cells) -> Callable[[float], str]:
            return lambda ratio: cells.get((ratio, count), "")

        yield make_table(
            sorted({fleet.slow_ratio for fleet in members}, reverse=True),
            [
                (Column(title="asked speed"), lambda ratio: f"{ratio:g}"),
                *(
                    (Column(title=f"{count} of {world_size} slow", is_text=True), cell_of(count))
                    for count in sorted({fleet.slow_count for fleet in members})
                ),
            ],
            subject=_workload(members),
            kind="decision map: the best shares, and their gain over equal ones",
        )


def _step_of(fleet: Fleet) -> tuple[Any, ...]:
    """Collect what fleets of one map have in common: all but who is slow, and how slow."""
    first = fleet.first
    names = (name for name in SETTINGS if name not in ("shares", "slow_ratio", "slow_count"))
    params = sorted(first.params.items())
    return (*(str(setting(first, name)) for name in names), *params)


def _map_cell(fleet: Fleet) -> str:
    best = fleet.best
    rivals = "".join(f" or {name}" for name in fleet.as_good())
    if EQUAL not in fleet.scenarios or best.shares == EQUAL:
        return f"{best.shares}{rivals}"
    return f"{best.shares}{rivals} {gain_over(best, fleet.scenarios[EQUAL]).gain:+.0%}"


def _percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return ""
    return f"{share:+.1%}" if signed else f"{share:.1%}"


def _cell(value: Any, write: Callable[[float], str]) -> str:
    return write(float(value)) if value is not None else ""


SECTION = Section(
    anchor="uneven",
    title="Slow devices",
    order=10,
    applies=lambda report: bool(report.fleets),
    blocks=_blocks,
    lead=lambda report: lead_of(report.fleets, report.ranks),
)
