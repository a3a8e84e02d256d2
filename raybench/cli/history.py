"""`raybench history`: the step time of points over many runs, and where it changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raybench.cli.compare import share
from raybench.cli.health_results import check_ids, load_health_history
from raybench.cli.options import complete_any_point, results_option
from raybench.cli.output import write_document, write_file
from raybench.errors import ResultsError, UsageError

if TYPE_CHECKING:
    import pandas as pd

    from raybench.analysis.environment_changes import Change
    from raybench.job.point import Point, Scalar


@click.command("history")
@click.option(
    "--point",
    metavar="POINT_ID",
    shell_complete=complete_any_point,
    help="This point alone; a unique prefix will do.",
)
@click.option("--filter", "expression", metavar="EXPR", help="Only points for which this is true.")
@results_option
@click.option(
    "--threshold",
    callback=share,
    default="1.5%",
    show_default=True,
    help="Changes of the level up to this count as none.",
)
@click.option(
    "--chart",
    type=click.Path(path_type=Path),
    metavar="FILE.svg|.png",
    help="Also draw the step time over time.",
)
@click.option(
    "--health",
    "is_health",
    is_flag=True,
    help="The figures of the health checks instead, each by the limit of its test.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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

    if chart is not None and chart.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"--chart: must end in .svg or .png, got {chart}")
    if is_health:
        if point or expression or chart:
            raise UsageError("--health: goes without --point, --filter and --chart")
        write_document(load_health_history(results, threshold), "json" if as_json else "terminal")
        return
    frame = history(_points(results, point, expression), threshold=threshold)
    if frame.empty:
        raise ResultsError(f"{results}: no run has measured such a point")
    if chart is not None:
        _draw(frame, chart)
    causes = {} if as_json else _causes(frame, results)
    write_document(History(frame=frame, causes=causes), "json" if as_json else "terminal")


def _points(results: Path, prefix: str | None, expression: str | None) -> pd.DataFrame:
    """Read the rows of `points` that are asked for."""
    from raybench.analysis.history import POINT_COLUMNS
    from raybench.results import reader

    table = reader.read_table(results, "points", None, POINT_COLUMNS)
    points: pd.DataFrame = table.to_pandas(maps_as_pydicts="strict")
    # Points of a check are short, and of devices that may be shared: their figures have limits.
    points = points[~points["run_id"].isin(check_ids(results))]
    if points.empty:
        raise ResultsError(f"{results}: no points yet; `raybench sweep JOB` measures some")
    if prefix is not None:
        ids = list(dict.fromkeys(points["point_id"]))
        point_id = reader.pick(prefix, ids, kind="point", where=str(results))
        points = points[points["point_id"] == point_id]
    return points if expression is None else _filter(points, expression)


def _filter(points: pd.DataFrame, expression: str) -> pd.DataFrame:
    """Keep the points for which the expression is true; those that lack one of its names are not.

    Raises UsageError when that leaves none.
    """
    from raybench.job.filter import select_points

    alike: dict[tuple[str, ...], dict[int, tuple[Point, str]]] = {}
    for row in points.drop_duplicates("point_id").to_dict("records"):
        point = _point(row)
        alike.setdefault(tuple(point.settings), {})[id(point)] = point, row["point_id"]
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
    return points[points["point_id"].isin(kept)]


def _point(row: Mapping[Any, Any]) -> Point:
    """Make the point of a row of `points`."""
    from raybench.job.point import EXECUTION, RUN_SETTINGS, Point

    return Point(
        workload=row["workload"],
        params={name: _scalar(value) for name, value in row["params"].items()},
        world_size=int(row["world_size"]),
        **{name: RUN_SETTINGS[name].restore(row[name]) for name in EXECUTION},
        batch_size=_whole(row["batch_size"]),
        global_batch_size=_whole(row["global_batch_size"]),
        scaling=row["scaling"],
    )


def _whole(value: float | None) -> int | None:
    return None if value is None or value != value else int(value)


def _scalar(text: str) -> Scalar:
    """Read a setting, of which the tables hold the text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _causes(frame: pd.DataFrame, results: Path) -> dict[tuple[str, str], Sequence[Change]]:
    """Return what changed since the run before, by (point_id, run_id) of each step."""
    from raybench.analysis.environment_changes import changes

    before = frame.groupby(["point_id", "machine"])["run_id"].shift()
    steps = frame.assign(before=before)[frame["step"].notna()]
    ids = set(steps["run_id"]) | set(steps["before"])
    known = _facts(results, ids) if ids else {}
    return {
        (row["point_id"], row["run_id"]): changes(known[row["before"]], known[row["run_id"]])
        for row in steps.to_dict("records")
        if row["before"] in known and row["run_id"] in known
    }


def _facts(results: Path, ids: Collection[str]) -> dict[str, dict[str, str]]:
    from raybench.analysis.environment_changes import facts
    from raybench.results import reader

    return {
        run.run_id: facts(run, reader.load(results, "devices", run.run_id))
        for run in reader.read_runs(results)
        if run.run_id in ids
    }


def _draw(frame: pd.DataFrame, path: Path) -> None:
    from raybench.report.charts.grammar import draw_figure
    from raybench.report.charts.history import history_figure

    write_file(path, draw_figure(history_figure(frame), path.suffix.lower().removeprefix(".")))
