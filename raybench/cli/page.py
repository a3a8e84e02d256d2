"""What the page of `raybench report --format html` needs of the results folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raybench.report.charts.series import Row
    from raybench.report.charts.steps import PointSteps
    from raybench.report.summary import Summary


def format_page(root: Path, summary: Summary, against: Summary | None = None) -> str:
    """Format the page of the run that `summary` reports, which is in the results folder `root`.

    against: the run that it is laid over.
    """
    from raybench.report.charts.figures import rows_of
    from raybench.report.charts.steps import heat_points, spread_points
    from raybench.report.charts.telemetry import TELEMETRY_COLUMNS
    from raybench.report.html import page
    from raybench.results import reader

    run_id = summary.run.run_id
    rows = rows_of(summary)
    telemetry = reader.read_table(root, "telemetry", run_id, TELEMETRY_COLUMNS)
    return page.format_page(
        page.PageData(
            summary=summary,
            devices=reader.load(root, "devices", run_id),
            telemetry=telemetry.to_pandas(),
            steps=_steps(root, run_id, spread_points(rows), heat_points(rows)),
            against=against,
        )
    )


def _steps(
    root: Path, run_id: str, spread: Sequence[Row], by_rank: Sequence[Row]
) -> list[PointSteps]:
    """Read the samples of these points one after the other: a run's may not fit into memory."""
    from raybench.analysis.rounds import Trials
    from raybench.analysis.rows import point_rows
    from raybench.analysis.step_times import SAMPLE_COLUMNS
    from raybench.report.charts.steps import PointSteps, columns_of_a_map
    from raybench.results import reader

    mapped = {row["point_id"] for row in by_rank}
    rows = list({row["point_id"]: row for row in (*spread, *by_rank)}.values())
    trials, columns = (
        Trials(point_rows(reader.load(root, "points", run_id))),
        columns_of_a_map(by_rank),
    )
    rounds = [[*trials.rounds(row).values()] for row in rows]
    attempts = [(one.point_id, one.attempt) for made in rounds for one in made]
    read = reader.samples_of_each(root, run_id, attempts, SAMPLE_COLUMNS)
    return [
        PointSteps.of_rounds(
            row, [next(read) for _ in made], columns if row["point_id"] in mapped else None
        )
        for row, made in zip(rows, rounds, strict=True)
    ]
