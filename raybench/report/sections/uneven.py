"""The section of slow devices among fast ones: a verdict, and the ways to share the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from raybench.analysis.uneven import Fleet, Gain, Scenario, gain_over
from raybench.job.point import EQUAL, FAST
from raybench.report import formatting
from raybench.report.blocks import Column, ColumnOf, Listing, Table, make_table
from raybench.report.sections import Section

if TYPE_CHECKING:
    from raybench.report.summary import Summary


def _blocks(report: Summary) -> Iterator[Listing | Table]:
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


SECTION = Section(
    anchor="uneven",
    title="Slow devices",
    order=10,
    applies=lambda report: bool(report.fleets),
    blocks=_blocks,
    lead=lambda report: lead_of(report.fleets, report.ranks),
)
