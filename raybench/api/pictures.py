"""The page of a run and its first chart, read from the results folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raybench.errors import UsageError

if TYPE_CHECKING:
    from raybench.analysis.run_data import RunData
    from raybench.health.report import HealthReport
    from raybench.report.charts import RankTimes


def draw_chart(root: Path, data: RunData | HealthReport, kind: str) -> bytes:
    """Draw the first chart of the page of a run or a health check, as "svg" or "png".

    Raises:
        UsageError: there is nothing to draw.
    """
    from raybench.analysis.answer import decide
    from raybench.health.report import HealthReport, health_figures
    from raybench.report.charts import ChartData, draw_main_figure, why_no_figure
    from raybench.report.charts.grammar import draw_figure
    from raybench.results import reader

    if isinstance(data, HealthReport):
        figures = health_figures(data)
        drawn = draw_figure(figures[0], kind, below=data.machine) if figures else None
        why = "nothing was compared"
    else:
        devices = reader.load_table(root, "devices", data.run.run_id)
        drawn = draw_main_figure(ChartData(answer=decide(data), devices=devices), kind)
        why = why_no_figure(data)
    if drawn is None:
        raise UsageError(f"--chart: there is nothing to draw: {why}")
    return drawn


def page_of(root: Path, data: RunData | HealthReport) -> str:
    """Return the HTML page of a run or a health check in the results folder `root`."""
    from raybench.analysis.answer import decide
    from raybench.health.report import HealthReport
    from raybench.health.report import format_page as format_check
    from raybench.report import page
    from raybench.report.charts import ChartData
    from raybench.report.charts.devices import TELEMETRY_COLUMNS
    from raybench.results import reader

    run_id = data.run.run_id
    devices = reader.load_table(root, "devices", run_id)
    if isinstance(data, HealthReport):
        return format_check(data, devices)
    telemetry = reader.read_table(root, "telemetry", run_id, TELEMETRY_COLUMNS).to_pandas()
    chart_data = ChartData(
        answer=decide(data),
        devices=devices,
        telemetry=telemetry,
        rank_times=_rank_times(root, data),
    )
    return page.format_run_page(chart_data)


def _rank_times(root: Path, data: RunData) -> list[RankTimes]:
    """Read the step times of the points that are drawn as heat maps."""
    from raybench.analysis.rounds import SAMPLE_COLUMNS, Trials, join_rounds, rank_by_iteration
    from raybench.report.charts import RankTimes
    from raybench.report.charts.devices import columns_of_a_map, heat_points
    from raybench.results import reader

    rows = heat_points(data.rows)
    columns = columns_of_a_map(rows)
    trials = Trials(data.points)
    # For each row, its ok attempts: one of each round.
    attempts_of_rows = [list(trials.rounds(row).values()) for row in rows]
    attempt_keys = []
    for attempts in attempts_of_rows:
        attempt_keys += [(attempt.point_id, attempt.attempt) for attempt in attempts]
    run_id = data.run.run_id
    # A generator reads one attempt at a time: all samples may not fit into memory.
    frames = reader.rows_of_attempts(root, "samples", run_id, attempt_keys, SAMPLE_COLUMNS)
    rank_times = []
    for row, attempts in zip(rows, attempts_of_rows, strict=True):
        samples = [next(frames) for _ in attempts]
        if samples:
            times_ms, median_ms = rank_by_iteration(join_rounds(samples), columns)
            rank_times.append(RankTimes(row=row, times_ms=times_ms, median_ms=median_ms))
    return rank_times
