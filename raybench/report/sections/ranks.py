"""The section of ranks: what each does in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from raybench.analysis.rounds import (
    MOST_RANKS,
    RankStep,
    ranks_of_step,
    telling_ranks,
)
from raybench.report import formatting
from raybench.report.blocks import Column, ColumnOf, Table, make_table
from raybench.report.sections import Section
from raybench.report.sections.points import table_of_points
from raybench.results.breakdown import is_slowed_by_one_rank
from raybench.results.tables import PointRow

if TYPE_CHECKING:
    from raybench.report.summary import Summary


NOTE = (
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


def _tables(report: Summary) -> Iterator[Table]:
    """Yield tables of the points in which one rank slows the others: a line for each rank."""
    if report.fleets:
        return  # Tables of uneven shares show the ranks themselves.
    slowed = [row for row in report.ordered if row.status == "ok" and is_slowed_by_one_rank(row)]
    if lines := [(row, rank) for row in slowed for rank in telling_ranks(ranks_of_step(row))]:
        kind = f"where ranks differ, {report.unit.name} of each"
        yield table_of_points(report, lines, _rank_columns(report.unit), kind=kind, note=NOTE)


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
    notes = [NOTE] * bool(steps) + [_CLOCK_NOTE] * bool(clocks)
    return make_table(
        shown,
        [(Column(title="rank"), _rank_name), *columns],
        kind=f"Each rank's step, {unit.name}, from steps after the timed ones",
        note=" ".join(notes),
    )


SECTION = Section(
    anchor="ranks",
    title="Ranks that differ",
    order=30,
    applies=lambda report: bool(report.rows),
    blocks=_tables,
)
