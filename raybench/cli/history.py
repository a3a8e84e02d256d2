"""`raybench history`: the step time of points over many runs, and where it changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raybench.cli.health import check_ids, load_health_history
from raybench.cli.options import (
    chart_option,
    complete_any_point,
    json_option,
    results_option,
    threshold_option,
)
from raybench.cli.output import write_document, write_file
from raybench.errors import ResultsError, UsageError

if TYPE_CHECKING:
    from raybench.analysis.compare import Change
    from raybench.analysis.history import HistoryRow
    from raybench.job.point import Point, Scalar
    from raybench.results.tables import PointRow


@click.command("history")
@click.option(
    "--point",
    metavar="POINT_ID",
    shell_complete=complete_any_point,
    help="This point alone; a unique prefix will do.",
)
@click.option("--filter", "expression", metavar="EXPR", help="Only points for which this is true.")
@results_option
@threshold_option("Changes of the level up to this count as none.")
@chart_option("Also draw the step time over time.")
@click.option(
    "--health",
    "is_health",
    is_flag=True,
    help="The figures of the health checks instead, each by the limit of its test.",
)
@json_option
def history_command(
    point: str | None,
    expression: str | None,
    results: Path,
    threshold: float,
    chart: Path | None,
    is_health: bool,
    as_json: bool,
) -> None:
    """How the step time of each point went over all runs, and where it changed its level.

    Runs on other devices, or on another number of nodes, are apart from each other. A step that
    one run alone shows may be undone by the next one. Health checks are left out: --health.
    """
    from raybench.analysis.history import history
    from raybench.report.history import History

    if is_health:
        if point or expression or chart:
            raise UsageError("--health: goes without --point, --filter and --chart")
        write_document(load_health_history(results, threshold), "json" if as_json else "terminal")
        return
    rows = history(_points(results, point, expression), threshold=threshold)
    if not rows:
        raise ResultsError(f"{results}: no run has measured such a point")
    if chart is not None:
        _draw(rows, chart)
    causes = {} if as_json else _causes(rows, results)
    write_document(History(rows=rows, causes=causes), "json" if as_json else "terminal")


def _points(results: Path, prefix: str | None, expression: str | None) -> list[PointRow]:
    """Return the rows of `points` that the options select, without those of health checks.

    prefix: of a point id. Raises ResultsError where none is left, and UsageError for a wrong
    expression.
    """
    from raybench.analysis.history import POINT_COLUMNS
    from raybench.analysis.rows import point_rows
    from raybench.results import reader

    table = reader.read_table(results, "points", None, POINT_COLUMNS)
    # Points of a check are short, and of devices that may be shared: their figures have limits.
    checks = check_ids(results)
    found = point_rows(table.to_pandas(maps_as_pydicts="strict"))
    points = [row for row in found if row.run_id not in checks]
    if not points:
        raise ResultsError(f"{results}: no points yet; `raybench sweep JOB` measures some")
    if prefix is not None:
        ids = list(dict.fromkeys(row.point_id for row in points))
        point_id = reader.pick(prefix, ids, kind="point", where=str(results))
        points = [row for row in points if row.point_id == point_id]
    return points if expression is None else _filter(points, expression)


def _filter(points: list[PointRow], expression: str) -> list[PointRow]:
    """Return the points for which the expression is true; without those that lack a name of it.

    Raises UsageError where none is left.
    """
    from raybench.job.plan import select_points

    alike: dict[tuple[str, ...], dict[int, tuple[Point, str]]] = {}
    for row in {row.point_id: row for row in points}.values():
        point = _point(row)
        alike.setdefault(tuple(point.settings), {})[id(point)] = point, row.point_id
    kept: set[str] = set()
    errors: list[UsageError] = []
    for group in alike.values():
        try:
            chosen = select_points([point for point, _ in group.values()], expression)
        except UsageError as error:
            errors.append(error)
        else:
            kept.update(group[id(point)][1] for point in chosen)
    if not kept:
        raise errors[0]
    return [row for row in points if row.point_id in kept]


def _point(row: PointRow) -> Point:
    """Return the point of a row of `points`."""
    from raybench.job.point import EXECUTION, RUN_SETTINGS, Point

    return Point(
        workload=row.workload,
        params={name: _scalar(value) for name, value in row.params.items()},
        world_size=row.world_size,
        **{name: RUN_SETTINGS[name].restore(getattr(row, name)) for name in EXECUTION},
        batch_size=row.batch_size,
        global_batch_size=row.global_batch_size,
        scaling=row.scaling,
    )


def _scalar(text: str) -> Scalar:
    """Return the value of a setting, of which the tables hold the text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _causes(rows: Sequence[HistoryRow], results: Path) -> dict[tuple[str, str], Sequence[Change]]:
    """Return the changes since the run before, by (point_id, run_id) of each step."""
    from raybench.analysis.compare import changes

    last: dict[tuple[str, int], str] = {}
    steps: list[tuple[HistoryRow, str]] = []
    for row in rows:
        before = last.get((row.point_id, row.machine), "")
        if row.step is not None:
            steps.append((row, before))
        last[row.point_id, row.machine] = row.run_id
    ids = {run_id for row, before in steps for run_id in (row.run_id, before)}
    known = _facts(results, ids) if ids else {}
    return {
        (row.point_id, row.run_id): changes(known[before], known[row.run_id])
        for row, before in steps
        if before in known and row.run_id in known
    }


def _facts(results: Path, ids: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the facts of these runs that may change a measurement, by run id and name."""
    from raybench.analysis.compare import facts
    from raybench.results import reader

    return {
        run.run_id: facts(run, reader.load(results, "devices", run.run_id))
        for run in reader.read_runs(results)
        if run.run_id in ids
    }


def _draw(rows: Sequence[HistoryRow], path: Path) -> None:
    """Write the chart of the step time over time to an .svg or .png file."""
    from raybench.report.charts.grammar import draw_figure
    from raybench.report.history import history_figure

    write_file(path, draw_figure(history_figure(rows), path.suffix.lower().removeprefix(".")))
