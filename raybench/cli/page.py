"""What the page of `raybench report --format html` needs of the results folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raybench.report.charts.data import RankTimes, Row
    from raybench.report.summary import Summary


def format_page(root: Path, summary: Summary) -> str:
    """Format the page of the run that `summary` reports, which is in the results folder `root`."""
    from raybench.report.charts.data import ChartData, rows_of
    from raybench.report.charts.rank_times import heat_points
    from raybench.report.charts.telemetry import TELEMETRY_COLUMNS
    from raybench.report.html import page
    from raybench.results import reader

    run_id = summary.run.run_id
    telemetry = reader.read_table(root, "telemetry", run_id, TELEMETRY_COLUMNS)
    return page.format_page(
        ChartData(
            summary=summary,
            devices=reader.load(root, "devices", run_id),
            telemetry=telemetry.to_pandas(),
            rank_times=_rank_times(root, run_id, heat_points(rows_of(summary))),
        )
    )


def _rank_times(root: Path, run_id: str, rows: list[Row]) -> list[RankTimes]:
    """Read the samples of these points one after the other: a run's may not fit into memory."""
    from raybench.analysis.rounds import Trials
    from raybench.analysis.rows import point_rows
    from raybench.analysis.step_times import SAMPLE_COLUMNS, join_rounds, rank_by_iteration
    from raybench.report.charts.data import RankTimes
    from raybench.report.charts.rank_times import columns_of_a_map
    from raybench.results import reader

    trials = Trials(point_rows(reader.load(root, "points", run_id)))
    columns = columns_of_a_map(rows)
    rounds = [[*trials.rounds(row).values()] for row in rows]
    attempts = [(one.point_id, one.attempt) for made in rounds for one in made]
    read = reader.rows_of_attempts(root, "samples", run_id, attempts, SAMPLE_COLUMNS)
    return [
        RankTimes(row=row, times_ms=rank_by_iteration(join_rounds(samples), columns))
        for row, made in zip(rows, rounds, strict=True)
        if (samples := [next(read) for _ in made])
    ]
