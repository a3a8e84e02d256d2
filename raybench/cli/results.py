"""`raybench report`, `list` and `show`: read the results folder and print."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raybench.cli.health_results import draw_health, format_health, load_health
from raybench.cli.options import (
    complete_point,
    complete_run,
    format_asked,
    json_format_option,
    references_option,
    results_option,
)
from raybench.cli.output import (
    append_to_github_summary,
    color,
    width,
    write_document,
    write_file,
    write_output,
    write_result,
)
from raybench.errors import ResultsError, UsageError
from raybench.report import formatting

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from raybench.analysis.references import References
    from raybench.report.point_details import PointDetails, PointList
    from raybench.report.summary import Summary
    from raybench.results.point_row import PointRow
    from raybench.results.run import Run

# What `list` shows unless it is asked for more: to read 10,000 runs takes seconds.
_LISTED = 50
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command("report")
@click.argument("run", default="latest", shell_complete=complete_run)
@results_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(["terminal", "md", "html", "json"]),
    show_default="terminal",
    help="For a terminal, a pull request, a browser (one page, with charts) or another program.",
)
@json_format_option
@click.option("--full", is_flag=True, help="On a terminal: all tables, findings and legends.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write it to this file.")
@click.option(
    "--chart",
    type=click.Path(path_type=Path),
    metavar="FILE.svg|.png",
    help="Also draw the picture that the page begins with, as speed-up against ideal.",
)
@references_option
@click.option(
    "--github",
    is_flag=True,
    help="With --format md: append it to $GITHUB_STEP_SUMMARY instead of printing it.",
)
def report_command(
    run: str,
    results: Path,
    kind: str | None,
    as_json: bool,
    full: bool,
    output: Path | None,
    chart: Path | None,
    references: References,
    github: bool,
) -> None:
    """How RUN scales: step time, speed-up and efficiency against the baseline.

    RUN is a run id, a unique prefix of one, the name of a job (its newest run), `latest`, one of
    these in a folder of results inside the results (examples/gemm), or the path of a run.
    """
    kind = format_asked(kind, as_json) or "terminal"
    if chart is not None and chart.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"--chart: must end in .svg or .png, got {chart}")
    if github and kind != "md":
        raise UsageError(f"--github: goes with --format md only, got --format {kind}")
    colored = output is None and color()
    if (health := load_health(results, run, references)) is not None:
        text = format_health(results, health, kind, colored=colored)
        draw = partial(draw_health, health)
    else:
        summary = load_summary(results, run, references)
        is_short = kind == "terminal" and not full
        text = _format(results, run, summary, kind, colored=colored, is_short=is_short)
        draw = partial(_draw, results, run, summary)
    if github:
        append_to_github_summary(text)
    if output is not None or not github:
        write_output(text, output, kind)
    # Last: the report must not be lost with a picture that cannot be drawn or written.
    if chart is not None:
        draw(chart)


def print_report(results: Path, run_id: str, kind: str) -> None:
    """Print the report of one run, as `raybench report --format KIND` would."""
    from raybench.report.run_report import RunReport

    report = RunReport(summary=load_summary(results, run_id), is_short=kind == "terminal")
    write_document(report, kind)


def load_summary(results: Path, run: str, references: References | None = None) -> Summary:
    """Return the summary of the run that `run` means. Raises ResultsError when there is none.

    references: None: those of raybench.
    """
    from raybench.analysis.references import SHIPPED
    from raybench.analysis.rows import point_rows
    from raybench.report.summary import Summary
    from raybench.results import reader

    root, run_id = reader.find_run(results, run)
    found = reader.read_run(root, run_id)
    devices, points, regions = (
        reader.load(root, table, run_id) for table in ("devices", "points", "regions")
    )
    return Summary(
        run=found,
        devices=devices,
        points=point_rows(points),
        region_rows=regions,
        references=references or SHIPPED,
    )


def _format(
    results: Path,
    run: str,
    summary: Summary,
    kind: str,
    *,
    colored: bool,
    is_short: bool,
) -> str:
    from raybench.report.documents import format_document
    from raybench.report.run_report import RunReport

    if kind == "html":
        return _page(results, run, summary)
    report = RunReport(summary=summary, is_short=is_short)
    return format_document(report, kind, width=width(), color=colored)


def _page(results: Path, run: str, summary: Summary) -> str:
    from raybench.cli.page import format_page
    from raybench.results import reader

    root, _ = reader.find_run(results, run)
    return format_page(root, summary)


def _draw(results: Path, run: str, summary: Summary, path: Path) -> None:
    from raybench.report.charts.data import ChartData
    from raybench.report.charts.registry import draw_main_figure, why_no_figure
    from raybench.results import reader

    root, run_id = reader.find_run(results, run)
    data = ChartData(summary=summary, devices=reader.load(root, "devices", run_id))
    drawn = draw_main_figure(data, path.suffix.lower().removeprefix("."))
    if drawn is None:
        raise UsageError(f"--chart: there is nothing to draw: {why_no_figure(summary)}")
    write_file(path, drawn)


@click.command("list")
@results_option
@click.option(
    "-n",
    "--last",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"The newest N runs; {_LISTED} unless --all or --json.",
)
@click.option("--all", "is_all", is_flag=True, help="All runs.")
@click.option("-l", "--long", "is_long", is_flag=True, help="Machine, tags and findings too.")
@_json_option
def list_command(
    results: Path, last: int | None, is_all: bool, is_long: bool, as_json: bool
) -> None:
    """List the runs in the results, the newest last."""
    from raybench.report.run_list import RunList
    from raybench.results import reader
    from raybench.results.folder import no_runs, run_ids
    from raybench.sweep.messages import name_program

    if last and is_all:
        raise UsageError("--last and --all: give one of them")
    newest = last or (None if is_all or as_json else _LISTED)
    runs = reader.read_runs(results, newest)
    if not runs and not as_json:
        click.echo(name_program(no_runs(results)), err=True)
        return
    machines = {} if as_json else {run.run_id: _machine(results, run) for run in runs}
    leads = _leads(results, runs) if is_long and not as_json else None
    document = RunList(runs=runs, machines=machines, leads=leads)
    write_document(document, "json" if as_json else "terminal")
    older = 0 if last or is_all or as_json else len(run_ids(results)) - _LISTED
    if older > 0:
        click.echo(f"{older} older runs are not shown: --all", err=True)


def _leads(results: Path, runs: Sequence[Run]) -> dict[str, str]:
    from raybench.cli.output import make_console

    with make_console().status(f"reading the points of {len(runs)} runs"):
        return {run.run_id: _lead(results, run.run_id) for run in runs}


def _machine(results: Path, run: Run) -> str:
    """Tell what a run was measured on, read without pandas."""
    from raybench.results import reader

    try:
        columns = ["kind", "name", "node_id", "host", "address", "cpu_count"]
        devices = reader.read_table(results, "devices", run.run_id, columns).to_pylist()
    except ResultsError:
        return run.cluster
    return formatting.machine(devices) if devices else run.cluster


def _lead(results: Path, run_id: str) -> str:
    """Tell what a run found, or why that cannot be told where its tables are damaged."""
    from raybench.report.run_report import RunReport

    try:
        if health := load_health(results, run_id):
            return health.headline
        return RunReport(summary=load_summary(results, run_id)).lead
    except ResultsError as error:
        return str(error)


@click.command("show")
@click.argument("run", shell_complete=complete_run)
@click.argument("point", required=False, shell_complete=complete_point)
@results_option
@references_option
@click.option("--logs", "as_logs", is_flag=True, help="Print what the ranks wrote instead.")
@_json_option
def show_command(
    run: str,
    point: str | None,
    results: Path,
    references: References,
    as_logs: bool,
    as_json: bool,
) -> None:
    """Show the points of RUN, or everything about one POINT (its id or a unique prefix).

    RUN is as for `raybench report`.
    """
    from raybench.results import reader

    root, run_id = reader.find_run(results, run)
    if as_logs:
        write_result(_logs(root, run_id, point, as_json))
        return
    if point is None:
        write_document(_points(root, run_id), "json" if as_json else "terminal")
        return
    document = _details(root, run_id, point, references)
    write_document(document, "json" if as_json else "terminal")


def _logs(results: Path, run_id: str, prefix: str | None, as_json: bool) -> str:
    """Return what ranks wrote, as text or JSON.

    Raises ResultsError where they wrote nothing and text is asked for.
    """
    from raybench.report.run_list import format_logs
    from raybench.results import reader

    what, point_id = f"run {run_id}", "*"
    if prefix is not None:
        ids = list(dict.fromkeys(key.point_id for key in reader.latest(results, run_id)))
        point_id = reader.pick(prefix, ids, kind="point", where=f"{results}: {run_id}")
        what = f"point {point_id}"
    logs = reader.logs(results, run_id, point_id)
    if as_json:
        from dataclasses import asdict

        from raybench.report.json_text import format_object

        return format_object(run_id=run_id, logs=[asdict(log) for log in logs])
    if not logs:
        raise ResultsError(f"{what}: its ranks wrote nothing that is kept")
    return format_logs(logs)


def _points(results: Path, run_id: str) -> PointList:
    from raybench.analysis.rounds import latest_trials
    from raybench.analysis.rows import point_rows
    from raybench.report.point_details import PointList
    from raybench.results import reader

    points = latest_trials(point_rows(reader.load(results, "points", run_id)))
    return PointList(run_id=run_id, points=points, busy_pct=_busy(results, run_id, points))


def _busy(results: Path, run_id: str, rows: Sequence[PointRow]) -> list[float | None]:
    """Find how busy the devices were, point by point: all samples may not fit into memory."""
    from raybench.analysis.step_times import BUSY_COLUMNS, busy_pct
    from raybench.results import reader

    telemetry = reader.load(results, "telemetry", run_id)
    if telemetry.empty:
        return [None] * len(rows)
    attempts = [(row.point_id, row.attempt) for row in rows]
    samples = reader.rows_of_attempts(results, "samples", run_id, attempts, BUSY_COLUMNS)
    return [busy_pct(telemetry, of_point, row) for of_point, row in zip(samples, rows, strict=True)]


def _details(results: Path, run_id: str, prefix: str, references: References) -> PointDetails:
    from dataclasses import replace

    from raybench.analysis.rounds import Trials, mean_of_rounds
    from raybench.analysis.rows import typed_rows
    from raybench.analysis.step_times import (
        device_states,
        join_rounds,
        rank_steps,
        slowest_modules,
        slowest_regions,
        step_times,
    )
    from raybench.report.point_details import PointDetails
    from raybench.results import reader
    from raybench.results.tables import RegionRow, units

    summary = load_summary(results, run_id, references)
    ids = list(dict.fromkeys(row.point_id for row in summary.points))
    point_id = reader.pick(prefix, ids, kind="point", where=f"{results}: {run_id}")
    attempts = sorted(
        (row for row in summary.points if row.point_id == point_id), key=lambda row: row.attempt
    )
    [row] = mean_of_rounds(attempts) or attempts[-1:]
    [scaled] = [one for one in summary.rows if one.point_id == point_id]
    # With those of figures that cannot be.
    row = replace(row, warnings=scaled.warnings)
    measured = list(Trials(attempts).rounds(row).values()) or [row]

    def read(table: str) -> list[pd.DataFrame]:
        """Read the rows of each round; those of rounds without any come last."""
        made = [(point_id, one.attempt) for one in measured]
        found = reader.rows_of_attempts(results, table, run_id, made)
        return sorted(found, key=lambda frame: frame.empty)

    # The first round that was profiled, or taken apart, stands for all.
    modules, regions = read("modules")[0], read("regions")[0]
    samples = join_rounds(read("samples"))
    telemetry = reader.load(results, "telemetry", run_id)
    return PointDetails(
        row=row,
        rounds=len(measured),
        step_ms_interval=(scaled.step_ms_low, scaled.step_ms_high),
        ranks=rank_steps(samples),
        modules=slowest_modules(modules),
        regions=slowest_regions(typed_rows(regions, RegionRow)),
        states=device_states(telemetry, row.started_at, row.duration_s),
        wrote_logs=bool(reader.logs(results, run_id, point_id)),
        traces=[
            str(path)
            for one in measured
            for path in reader.traces(results, run_id, point_id, one.attempt)
        ],
        attempts=attempts,
        steps_ms=step_times(samples),
        units=units("points"),
        standings=[one for one in summary.standings if one.measured.point_id == point_id],
    )
