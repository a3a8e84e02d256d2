"""Ranks that differ have a table; what a wall clock says of a step has a line."""

from __future__ import annotations

from builders import (
    make_apart,
    make_point,
    make_rows,
    make_summary,
    tables_of,
)

from raybench.records import WallTimes
from raybench.report.formatting import MILLISECONDS
from raybench.report.sections.ranks import ranks_of_point


def ran(*own_ms, wall=False, batch=64):
    """A step of 25 ms of ranks that take so long for their own, of which the host loses 0.5 ms."""
    clocks = WallTimes(unsynced_ms=2.5, synced_ms=30.0) if wall else None
    point = make_point(world_size=len(own_ms), batch_size=batch)
    return make_apart(own_ms, 25.0, idle_ms=0.5, point=point, wall=clocks)


def test_a_point_with_a_slow_rank_shows_what_each_rank_does():
    [table] = tables_of(make_summary([ran(10.0, 20.0)]), "ranks")
    assert table.kind == "where ranks differ, ms of each"
    assert table.titles[-5:] == ("rank", "computes", "idle", "waits", "exchange")
    assert [row[-5:] for row in table.texts] == [
        ("0*", "9.50", "0.500", "10.0", "5.00"),
        ("1", "19.5", "0.500", "0", "5.00"),
    ]


def test_the_ranks_of_a_point_have_their_clocks_beside_their_parts():
    [row] = make_rows([ran(10.0, 20.0, wall=True)])
    table = ranks_of_point(row, MILLISECONDS)
    assert table.titles[-2:] == ("not waited", "waited")
    assert [line[-2:] for line in table.texts] == [("2.50", "30.0")] * 2
    assert "Exchange:" in table.note
    assert "time.time()" in table.note


def test_a_single_rank_has_its_clock_alone():
    [row] = make_rows([ran(20.0, wall=True)])
    table = ranks_of_point(row, MILLISECONDS)
    assert table.titles == ("rank", "not waited", "waited")
    assert table.texts == (("0*", "2.50", "30.0"),)
