"""What a report says of slow devices among fast ones: scenarios, ranks, verdicts, decision map.

Pure, over the fleets of `raybench.analysis.uneven`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raybench.analysis.settings import SETTINGS, setting
from raybench.analysis.uneven import RULES, Fleet, Gain, RankOfStep, Scenario, gain_over
from raybench.job.point import EQUAL, FAST
from raybench.report import formatting
from raybench.report.document import Listing, Table

_MAP = "decision map: the best shares, and their gain over equal ones"
_SCENARIOS = "slow devices"
_RANKS = "slow devices, ms of each rank"


def uneven_tables(fleets: Sequence[Fleet]) -> tuple[Table, ...]:
    """Make the tables of scenarios, of their ranks, and the decision map."""
    if not fleets:
        return ()
    return (_scenario_table(fleets), _rank_table(fleets), *_decision_map(fleets))


def uneven_listings(fleets: Sequence[Fleet], ranks: str) -> list[Listing]:
    """List the verdict of each fleet, and which published rules hold."""
    if not fleets:
        return []
    lines = [(fleet_name(fleet, ranks), verdict(fleet)) for fleet in fleets]
    rules = list(_rules(fleets))
    return [
        Listing(title="What to do with the slow devices", lines=lines),
        *([Listing(title="Published rules", lines=rules)] if rules else []),
    ]


def uneven_lead(fleets: Sequence[Fleet], ranks: str) -> str:
    """Say which shares were best most often, and where they gained most; empty without fleets.

    Only where their interval leaves out that others are as good.
    """
    if not fleets:
        return ""
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
    others = [one for one in fleet.scenarios.values() if one is not fleet.best]
    return gain_over(fleet.best, max(others, key=lambda other: other.throughput))


def fleet_name(fleet: Fleet, ranks: str) -> str:
    """Write `1 of 2 GPUs at 0.48`, the speed that the probes found."""
    there_are = formatting.ranks_words(int(fleet.first["world_size"]), ranks)
    if not fleet.slow_count:
        return f"{there_are}, none slow"
    return f"{fleet.slow_count} of {there_are} at {fleet.probe_ratio:.2f} of the speed"


def verdict(fleet: Fleet) -> str:
    """Say which shares are best, by how much, and below which batch they are not."""
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


# Of the scenarios; those that are left out first, for room.
_COLUMNS = (
    *("speed", "slow", "shares", "used", "samples", "step ms", "predicted", "samples/s"),
    *("over equal", "in theory", "of own speeds", "over best other", "fast idle", "GiB"),
    *("samples/J", "gradients"),
)
_OPTIONAL = (
    *("GiB", "samples/J", "gradients", "over best other", "used", "in theory", "of own speeds"),
    *("samples/s", "predicted"),
)


def _scenario_table(fleets: Sequence[Fleet]) -> Table:
    rows = [
        (
            f"{fleet.probe_ratio:.2f}" if place == 0 else "",
            f"{fleet.slow_count} of {fleet.first['world_size']}" if place == 0 else "",
            *_scenario_row(scenario, fleet),
        )
        for fleet in fleets
        for place, scenario in enumerate(fleet.scenarios.values())
    ]
    return Table(
        workload=str(fleets[0].first["workload"]),
        kind=_SCENARIOS,
        columns=_COLUMNS,
        settings=3,
        rows=tuple(rows),
        optional=_OPTIONAL,
        texts=frozenset({"shares", "slow", "samples"}),
    )


def _scenario_row(scenario: Scenario, fleet: Fleet) -> tuple[str, ...]:
    """Write the cells of a scenario, from the column `shares` on."""
    row, equal = scenario.row, fleet.scenarios.get(EQUAL)
    others = [other for other in fleet.scenarios.values() if other is not scenario]
    best_other = max(others, key=lambda other: other.throughput)
    return (
        scenario.shares,
        str(scenario.devices_used),
        "/".join(str(rank.items) for rank in scenario.ranks),
        formatting.step_ms(row),
        _percent(scenario.prediction_error, signed=True),
        formatting.number(scenario.throughput),
        _gain(gain_over(scenario, equal)) if equal and scenario is not equal else "",
        _percent(fleet.gain_in_theory(scenario.shares), signed=True),
        _percent(scenario.efficiency),
        _gain(gain_over(scenario, best_other)),
        _percent(scenario.idle_share_of_fast),
        _cell(row["peak_mem_allocated_bytes"], formatting.gib),
        _cell(row["samples_per_joule"], formatting.number),
        _cell(row["gradient_error"], lambda value: f"{value:.0e}"),
    )


def _rank_table(fleets: Sequence[Fleet]) -> Table:
    rows = [
        (
            f"{fleet.probe_ratio:.2f}" if not scenario_place and not rank_place else "",
            scenario.shares if not rank_place else "",
            _rank_name(rank, is_mixed=len({one.model for one in scenario.ranks}) > 1),
            str(rank.items),
            _cell(rank.own_ms, formatting.number),
            _cell(rank.wait_ms, formatting.number),
            _cell(scenario.exchange_ms if rank.items else None, formatting.number),
        )
        for fleet in fleets
        for scenario_place, scenario in enumerate(fleet.scenarios.values())
        for rank_place, rank in enumerate(scenario.ranks)
    ]
    return Table(
        workload=str(fleets[0].first["workload"]),
        kind=_RANKS,
        columns=("speed", "shares", "rank", "samples", "own step", "waits", "exchange"),
        settings=3,
        rows=tuple(rows),
        texts=frozenset({"shares", "rank"}),
    )


def _rank_name(rank: RankOfStep, *, is_mixed: bool) -> str:
    if rank.slow_ratio is not None:
        return f"{rank.rank} (emulated)"
    return f"{rank.rank} ({rank.model})" if is_mixed else str(rank.rank)


def _decision_map(fleets: Sequence[Fleet]) -> Iterator[Table]:
    """Make a table of slow_ratio by slow_count for each number of devices and step."""
    groups: dict[tuple[Any, ...], list[Fleet]] = {}
    for fleet in fleets:
        groups.setdefault(_step_of(fleet), []).append(fleet)
    for members in groups.values():
        if len(members) < 2:
            continue
        world_size = int(members[0].first["world_size"])
        counts = sorted({fleet.slow_count for fleet in members})
        ratios = sorted({fleet.slow_ratio for fleet in members}, reverse=True)
        cells = {(fleet.slow_ratio, fleet.slow_count): _map_cell(fleet) for fleet in members}
        yield Table(
            workload=str(members[0].first["workload"]),
            kind=_MAP,
            columns=("asked speed", *(f"{count} of {world_size} slow" for count in counts)),
            settings=1,
            rows=tuple(
                (f"{ratio:g}", *(cells.get((ratio, count), "") for count in counts))
                for ratio in ratios
            ),
            texts=frozenset(f"{count} of {world_size} slow" for count in counts),
        )


def _step_of(fleet: Fleet) -> tuple[Any, ...]:
    """Collect what fleets of one map have in common: all but who is slow, and how slow."""
    first = fleet.first
    names = (name for name in SETTINGS if name not in ("shares", "slow_ratio", "slow_count"))
    params = sorted(first["params"].items())
    return (*(str(setting(first, name)) for name in names), *params)


def _map_cell(fleet: Fleet) -> str:
    best = fleet.best
    rivals = "".join(f" or {name}" for name in fleet.as_good())
    if EQUAL not in fleet.scenarios or best.shares == EQUAL:
        return f"{best.shares}{rivals}"
    return f"{best.shares}{rivals} {gain_over(best, fleet.scenarios[EQUAL]).gain:+.0%}"


def _rules(fleets: Sequence[Fleet]) -> Iterator[tuple[str, str]]:
    """Say of each published rule in how many fleets it holds, and where it does not."""
    for rule in RULES:
        asked = [fleet for fleet in fleets if rule.applies(fleet)]
        if not asked:
            continue
        answers = Counter(rule.holds(fleet) for fleet in asked)
        text = f"holds in {answers[True]} of {len(asked)}"
        if answers[None]:
            text += f"; cannot be told in {answers[None]}"
        failed = [fleet for fleet in asked if rule.holds(fleet) is False]
        if failed:
            where = ", ".join(f"{f.probe_ratio:.2f} ({f.best.shares})" for f in failed)
            text += f"; not at {where}"
        yield rule.text, text


def _percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return ""
    return f"{share:+.1%}" if signed else f"{share:.1%}"


def _cell(value: Any, write: Callable[[float], str]) -> str:
    return write(float(value)) if formatting.has_value(value) else ""
