"""`raybench compare`, `history` and `predict`: commands on several runs or several points."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from raybench.api.sides import check_apart, compare_health, compare_sides, find_side
from raybench.cli.shared import (
    chart_option,
    complete_any_point,
    complete_run,
    file_option,
    format_options,
    json_option,
    read_share,
    results_option,
    threshold_option,
    write_document,
    write_file,
)
from raybench.errors import ResultsError, UsageError

if TYPE_CHECKING:
    from raybench.analysis.compare import Change, HistoryRow
    from raybench.job.point import Point
    from raybench.records.devices import Finding
    from raybench.results.point_row import PointRow

REGRESSION, UNCLEAR = "regression", "unclear"
_IS_REGRESSION, _IS_UNCLEAR = 1, 5  # exit codes


@click.command("compare")
@click.argument("base", shell_complete=complete_run)
@click.argument("new", shell_complete=complete_run)
@results_option
@threshold_option(
    help="Smallest change that counts, of samples/s (or of steps/s if a step has no samples)."
)
@click.option("--full", is_flag=True, help="On a terminal: all points, differences and legends.")
@click.option(
    "--fail-on",
    type=click.Choice([REGRESSION, UNCLEAR]),
    help="regression: exit with 1 if a point is slower, or fails in more of its rounds; else with "
    "5 if a side has one run, or if a point may be slower by more than --blind. unclear: exit with "
    "1 as above, else with 5 if a point is undecided.",
)
@click.option(
    "--blind",
    callback=read_share,
    default="10%",
    show_default=True,
    help="With --fail-on regression: the largest slowdown that may stay undetected at a point.",
)
@format_options(
    ["terminal", "md", "html", "json"],
    "For a terminal, a pull request, a browser (one page, with bars) or another program.",
)
@file_option
def compare_command(
    base: str,
    new: str,
    results: Path,
    threshold: float,
    full: bool,
    fail_on: str | None,
    blind: float,
    kind: str,
    output: Path | None,
) -> int:
    """Tell what changed from BASE to NEW, and whether the change is more than chance.

    Each side is one or more runs: RUN as for `raybench report`, several RUNs separated by commas,
    or a tag such as driver=580. A tag stands for its newest run and for earlier runs with the tag
    (among 300) that have the same job, software, settings, device models and counts of devices and
    nodes. A verdict needs two runs on each side; three are better. --fail-on exits with 2 if device
    models or node counts differ, or if no point is ok on both sides and no point that is ok in BASE
    fails in NEW.

    For health checks, the newest check of each side is compared: each figure by the limit of its
    test, or by --threshold if that is larger. --fail-on exits with 1 if a figure is slower or a
    subject is no longer healthy, otherwise with 2 if no figure was read in both checks. There is no
    html of health checks.
    """
    source = click.get_current_context().get_parameter_source("blind")
    if source is not ParameterSource.DEFAULT and fail_on != REGRESSION:
        raise UsageError("--blind: goes with --fail-on regression only")
    sides = find_side(results, base), find_side(results, new)
    # No run may be on both sides.
    check_apart(*sides)
    # None unless both sides are health checks.
    if checks := compare_health(sides, threshold):
        if kind == "html":
            raise UsageError("--format html: health checks are compared as terminal, md or json")
        write_document(checks, kind, output)
        if fail_on and checks.is_regression:
            return _IS_REGRESSION
        if fail_on and not checks.figures:
            raise ResultsError(f"--fail-on {fail_on}: no figure was read in both checks")
        return 0
    comparison = replace(
        compare_sides(sides, threshold),
        is_short=kind == "terminal" and not full,
        options=_options_to_repeat(results, threshold),
    )

    def make_page() -> str:
        from raybench.report.page import format_comparison

        return format_comparison(comparison)

    write_document(comparison, kind, output, make_page)
    if fail_on is None:
        return 0
    if not comparison.compared and not comparison.failing_more_often:
        raise ResultsError(f"--fail-on {fail_on}: no point was measured in both runs")
    if comparison.obstacles:
        from raybench.report.words.compare import not_decided

        why = "; ".join(map(not_decided, comparison.obstacles))
        raise ResultsError(f"--fail-on {fail_on}: not comparable: {why}")
    if comparison.is_regression:
        return _IS_REGRESSION
    if fail_on == UNCLEAR:
        return _IS_UNCLEAR if comparison.verdicts[UNCLEAR] else 0
    return _IS_UNCLEAR if comparison.is_blind(blind) else 0


def _options_to_repeat(results: Path, threshold: float) -> list[str]:
    """Return --results and --threshold as words of a command, if the user gave them."""
    context = click.get_current_context()
    words = []
    for name, text in (("results", str(results)), ("threshold", f"{100 * threshold:g}%")):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            words += [f"--{name}", text]
    return words


@click.command("history")
@click.option(
    "--point",
    metavar="POINT_ID",
    shell_complete=complete_any_point,
    help="This point alone; a unique prefix will do.",
)
@click.option("--filter", "expression", metavar="EXPR", help="Only points for which this is true.")
@results_option
@threshold_option(help="Smallest change of the level that counts.")
@chart_option(help="Also draw the step time over time.")
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
    """Show the step time of each point over all runs, and where its level changed.

    Runs on different device models or numbers of nodes are separate series. A new level has at
    least three runs. Health checks are left out; see --health. --filter is as for `raybench sweep`;
    points that lack one of its settings are left out.
    """
    from raybench.analysis.compare import history
    from raybench.health.comparison import HealthHistory, trace_figures
    from raybench.health.references import read_findings
    from raybench.report.charts.grammar import draw_figure
    from raybench.report.history import History, history_figure
    from raybench.results import reader

    if is_health:
        if point or expression or chart:
            raise UsageError("--health: goes without --point, --filter and --chart")
        findings_by_run: dict[str, list[Finding]] = {}
        for run_id, finding in read_findings(results):
            findings_by_run.setdefault(run_id, []).append(finding)
        # `read_runs` sorts the runs by their start.
        all_ids = [run.run_id for run in reader.read_runs(results)]
        run_ids = [run_id for run_id in all_ids if run_id in findings_by_run]
        if not run_ids:
            raise ResultsError(f"{results}: no health check to read; `raybench health` makes one")
        findings = (findings_by_run[run_id] for run_id in run_ids)
        figures = trace_figures(findings, 1 + threshold)
        document = HealthHistory(figures=figures, run_ids=run_ids)
        write_document(document, "json" if as_json else "terminal")
        return
    rows = history(_selected_points(results, point, expression), threshold=threshold)
    if not rows:
        raise ResultsError(f"{results}: no run has measured such a point")
    if chart is not None:
        figure = history_figure(rows)
        write_file(chart, draw_figure(figure, chart.suffix.lower().removeprefix(".")))
    # JSON has no causes.
    causes = {} if as_json else _changes_at_new_levels(rows, results)
    write_document(History(rows=rows, causes=causes), "json" if as_json else "terminal")


def _selected_points(results: Path, prefix: str | None, expression: str | None) -> list[PointRow]:
    """Return the rows of the points that have this prefix of an id and fulfil the expression."""
    from raybench.analysis.compare import HISTORY_COLUMNS
    from raybench.analysis.rows import point_rows
    from raybench.results import reader

    table = reader.read_table(results, "points", None, HISTORY_COLUMNS)
    # Leave out health checks (`raybench health`): their points are short, and other sweeps may
    # share their devices.
    runs = reader.read_table(results, "runs", None, ["run_id", "argv"]).to_pylist()
    sweeps = {run["run_id"] for run in runs if (run["argv"] or [])[1:2] != ["health"]}
    rows = point_rows(table.to_pandas(maps_as_pydicts="strict"))
    points = [row for row in rows if row.run_id in sweeps]
    if not points:
        raise ResultsError(f"{results}: no points to read; `raybench sweep JOB` measures some")
    if prefix is not None:
        ids = list(dict.fromkeys(row.point_id for row in points))
        point_id = reader.pick(prefix, ids, kind="point", where=str(results))
        points = [row for row in points if row.point_id == point_id]
    return points if expression is None else _filter_rows(points, expression)


def _filter_rows(rows: list[PointRow], expression: str) -> list[PointRow]:
    """Return the rows for which the expression is true; drop rows that lack its settings."""
    from raybench.analysis.scaling import typed_value
    from raybench.job.plan import select_points
    from raybench.job.point import EXECUTION, RUN_SETTINGS, Point

    # `select_points` refuses an expression with a setting that a point lacks. So filter the points
    # in groups with the same settings: names of the settings -> point_id -> point.
    groups: dict[tuple[str, ...], dict[str, Point]] = {}
    for row in rows:
        typed = {name: typed_value(text) for name, text in row.params.items()}
        point = Point(
            workload=row.workload,
            params={name: value for name, value in typed.items() if name not in row.env},
            env=row.env,
            world_size=row.world_size,
            **{name: RUN_SETTINGS[name].restore(getattr(row, name)) for name in EXECUTION},
            batch_size=row.batch_size,
            global_batch_size=row.global_batch_size,
            scaling=row.scaling,
        )
        groups.setdefault(tuple(point.settings), {})[row.point_id] = point
    selected_ids: set[str] = set()
    errors: list[UsageError] = []
    for group in groups.values():
        try:
            selected = select_points([*group.values()], expression)
        except UsageError as error:
            errors.append(error)
            continue
        # Compare objects: a stored point_id may differ from the id that this version computes.
        objects = {id(point) for point in selected}
        selected_ids |= {point_id for point_id, point in group.items() if id(point) in objects}
    if not selected_ids:
        # Then each group has raised an error.
        raise errors[0]
    return [row for row in rows if row.point_id in selected_ids]


def _changes_at_new_levels(
    rows: Sequence[HistoryRow], results: Path
) -> dict[tuple[str, str], Sequence[Change]]:
    """Return (point_id, run_id) of each new level -> hardware and software that has changed."""
    from raybench.analysis.compare import changes, facts
    from raybench.results import reader

    # (point_id, machine) -> id of the latest run so far.
    latest_runs: dict[tuple[str, int], str] = {}
    # The first row of each new level, and the id of the run before.
    new_levels: list[tuple[HistoryRow, str]] = []
    for row in rows:
        previous_id = latest_runs.get((row.point_id, row.machine), "")
        if row.level_change is not None:
            new_levels.append((row, previous_id))
        latest_runs[row.point_id, row.machine] = row.run_id
    if not new_levels:
        return {}
    run_ids = {run_id for row, previous_id in new_levels for run_id in (row.run_id, previous_id)}
    # run_id -> hardware and software of the run.
    facts_of = {}
    for run in reader.read_runs(results):
        if run.run_id in run_ids:
            facts_of[run.run_id] = facts(run, reader.load_table(results, "devices", run.run_id))
    return {
        (row.point_id, row.run_id): changes(facts_of[previous_id], facts_of[row.run_id])
        for row, previous_id in new_levels
        if previous_id in facts_of and row.run_id in facts_of
    }


def _read_world_sizes(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    """Return the numbers that --world-size lists, in ascending order."""
    words = [word.strip() for word in text.split(",")]
    if all(re.fullmatch(r"\d{1,7}", word) and 2 <= int(word) <= 1_000_000 for word in words):
        return tuple(sorted(set(map(int, words))))
    rule = "must be numbers from 2 up to 1,000,000, as in 8,64,512"
    raise UsageError(f"--world-size: {rule}, got {text!r}")


@click.command("predict")
@click.argument("run", default="latest", shell_complete=complete_run)
@click.option(
    "--world-size",
    "world_sizes",
    callback=_read_world_sizes,
    required=True,
    metavar="N,N,…",
    help="Numbers of devices, each more than the run measured.",
)
@results_option
@format_options(
    ["terminal", "md", "json"], "For a terminal, for a pull request, or for another program."
)
def predict_command(run: str, world_sizes: tuple[int, ...], results: Path, kind: str) -> None:
    """Predict the data-parallel steps of RUN on more devices than it measured, with intervals.

    RUN is as for `raybench report`. It must have ok points on two numbers of devices of one node,
    with the same batch_size (weak scaling) and 95 % intervals of the step times of at most ±10 %. N
    is at most the number of devices of a node, because the cost of several nodes depends on their
    network and on NCCL's algorithm. The largest N decides whether a point is predicted at all.
    Needs no cluster.
    """
    from raybench.analysis.prediction import is_on_one_node, predict
    from raybench.analysis.rows import point_rows
    from raybench.report.prediction import Forecast
    from raybench.report.words.prediction import not_predicted
    from raybench.results import reader

    root, run_id = reader.find_run(results, run)
    points = point_rows(reader.load_table(root, "points", run_id))
    measured = [row.world_size for row in points if row.status == "ok" and is_on_one_node(row)]
    largest = max(measured, default=0)
    if world_sizes[0] <= largest:
        raise UsageError(
            f"--world-size {world_sizes[0]}: must be more than the {largest} that {run_id} measured"
        )
    nodes = reader.read_table(root, "devices", run_id, ("node_id",))["node_id"].to_pylist()
    devices_per_node = max(Counter(nodes).values(), default=1)
    predictions, left_out = predict(points, world_sizes, devices_per_node)
    if not predictions:
        why = not_predicted(left_out[0]) if left_out else "it has no points"
        raise ResultsError(f"{run_id}: cannot predict: {why}")
    forecast = Forecast(
        run=reader.read_run(root, run_id),
        predictions=predictions,
        devices_per_node=devices_per_node,
        left_out=left_out,
    )
    write_document(forecast, kind)
