"""Ranks that differ have a table; what a wall clock says of a step has a line."""

from __future__ import annotations

import pandas as pd
from builders import make_measure, make_measurement, make_point, make_record, make_run

from raybench.analysis.rounds import records
from raybench.records import Breakdown, Record, WallTimes
from raybench.report.formatting import MILLISECONDS
from raybench.report.rank_steps import ranks_of_point
from raybench.report.summary import Summary, summarize
from raybench.report.text.markdown import format_report as as_markdown
from raybench.report.text.terminal import format_report
from raybench.results.rows import point_row
from raybench.results.schema import TABLES


def ran(*own_ms: float, step_ms: float = 25.0, wall: bool = False, batch: int = 64) -> Record:
    """A point whose ranks take so long for their own step, of which the host loses 0.5 ms."""
    clocks = WallTimes(unsynced_ms=step_ms / 10, synced_ms=step_ms * 1.2)
    ranks = tuple(
        make_measurement(
            rank,
            [[round(step_ms * 1e6)] * 6],
            breakdown=Breakdown(
                local_ms=((own,) * 4, (own,) * 4),
                device_ms=own - 0.5,
                wall=clocks if wall else None,
            ),
        )
        for rank, own in enumerate(own_ms)
    )
    return make_record(make_point(world_size=len(own_ms), batch_size=batch), measurements=ranks)


def points(*found: Record) -> pd.DataFrame:
    content = [point_row("run-a", one, make_measure()) for one in found]
    return pd.DataFrame(content, columns=[column.name for column in TABLES["points"]])


def report(*found: Record) -> Summary:
    return summarize(
        make_run("run-a", baseline={"world_size": 1}), pd.DataFrame([]), points(*found)
    )


def test_a_point_with_a_slow_rank_shows_what_each_rank_does():
    [table] = report(ran(10.0, 20.0)).rank_tables
    assert table.kind == "where ranks differ, ms of each"
    assert table.columns[-5:] == ("rank", "computes", "idle", "waits", "exchange")
    assert [row[-5:] for row in table.rows] == [
        ("0*", "9.50", "0.500", "10.0", "5.00"),
        ("1", "19.5", "0.500", "0", "5.00"),
    ]


def test_terminal_and_markdown_have_the_table_and_say_what_it_means():
    summary = report(ran(10.0, 20.0))
    for text in (format_report(summary), as_markdown(summary)):
        assert "where ranks differ, ms of each" in text
        assert "add up to the step on each" in " ".join(text.split())
    assert max(map(len, format_report(summary, width=80).splitlines())) <= 80


def test_points_whose_ranks_are_alike_are_not_listed_by_rank():
    summary = report(ran(20.0, 20.0), ran(20.0))
    assert summary.rank_tables == ()
    assert "computes, idle, waits" not in format_report(summary)


def test_what_a_wall_clock_says_is_a_range_over_the_points():
    summary = report(ran(20.0, wall=True), ran(20.0, wall=True, batch=128), ran(20.0, batch=32))
    lines = dict(summary.wall_clock)
    assert lines["not waited for"].startswith("0.10x (batch 64, 1 GPU)")
    assert lines["waited for in each step"].startswith("1.20x (batch")
    assert "What time.time() on rank 0 says of a step" in format_report(summary)
    assert report(ran(20.0)).wall_clock == ()


def test_the_ranks_of_a_point_have_their_clocks_beside_their_parts():
    [row] = records(points(ran(10.0, 20.0, wall=True)))
    heads, lines, legend = ranks_of_point(row, MILLISECONDS)
    assert heads[-2:] == ["not waited", "waited"]
    assert [line[-2:] for line in lines] == [["2.50", "30.0"], ["2.50", "30.0"]]
    assert len(legend) == 2


def test_a_single_rank_has_its_clock_alone():
    [row] = records(points(ran(20.0, wall=True)))
    heads, lines, _ = ranks_of_point(row, MILLISECONDS)
    assert heads == ["rank", "not waited", "waited"]
    assert lines == [["0*", "2.50", "30.0"]]
