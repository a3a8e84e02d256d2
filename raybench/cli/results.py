"""`raybench report`, `list`, `show` and `compact`: read stored results."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raybench.api.stored_runs import load_health
from raybench.cli.shared import (
    append_to_github_summary,
    chart_option,
    complete_point,
    complete_run,
    file_option,
    format_options,
    json_option,
    make_console,
    references_option,
    results_option,
    width,
    write_document,
    write_file,
    write_result,
    write_text,
)
from raybench.conversion import MIB
from raybench.errors import ResultsError, UsageError
from raybench.report import formatting

if TYPE_CHECKING:
    import pandas as pd

    from raybench.analysis.references import References
    from raybench.analysis.run_data import RunData
    from raybench.health.report import HealthReport
    from raybench.report.documents import Document
    from raybench.report.show import PointDetails
    from raybench.results.tables import Run


# Default number of runs in `list`, because reading 10,000 runs takes seconds.
_LISTED = 50


@click.command("report")
@click.argument("run", default="latest", shell_complete=complete_run)
@results_option
@format_options(
    ["terminal", "md", "html", "json", "issue"],
    "For a terminal, a pull request, a browser (one page, with charts), another program, or an "
    "issue thread (ten lines).",
)
@click.option("--full", is_flag=True, help="On a terminal: all tables, findings and legends.")
@file_option
@chart_option(help="Also draw the first chart of the page, such as speed-up against ideal.")
@references_option
@click.option(
    "--github",
    is_flag=True,
    help="With --format md: append the report to $GITHUB_STEP_SUMMARY instead of printing it.",
)
def report_command(
    run: str,
    results: Path,
    kind: str,
    full: bool,
    output: Path | None,
    chart: Path | None,
    references: References,
    github: bool,
) -> None:
    """Report what RUN found: what its job asks, or the verdicts of a health check.

    RUN is a run id or a unique prefix, the name of a job (its newest run), or `latest`; each also
    in another folder of results (examples/gemm, or by path). RUN may also be the path of a run.
    """
    from raybench.analysis.answer import decide
    from raybench.analysis.run_data import load_run_data
    from raybench.api.pictures import draw_chart, page_of
    from raybench.report.documents import format_document
    from raybench.report.issue import format_issue
    from raybench.report.run_report import RunReport
    from raybench.results import reader

    if github and kind != "md":
        raise UsageError(f"--github: goes with --format md only, got --format {kind}")
    root, run_id = reader.find_run(results, run)
    document: Document
    data: RunData | HealthReport
    if (check := load_health(root, run_id, references)) is not None:
        if kind == "issue":
            raise UsageError("--format issue: a health check has no answer; use --format md")
        data = document = check
    else:
        data = load_run_data(root, run_id, references)
        report = RunReport(answer=decide(data), is_short=kind == "terminal" and not full)
        document = report
    if github:
        append_to_github_summary(format_document(document, kind, width=width()))
    if kind == "issue":
        write_text(format_issue(report), output)
    elif output is not None or not github:
        write_document(document, kind, output, lambda: page_of(root, data))
    # The chart comes last: the report must not be lost if drawing or writing the chart fails.
    if chart is not None:
        write_file(chart, draw_chart(root, data, chart.suffix.lower().removeprefix(".")))


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
@json_option
def list_command(
    results: Path, last: int | None, is_all: bool, is_long: bool, as_json: bool
) -> None:
    """List the runs in the results, the newest last; --long is for the table, not for JSON."""
    from raybench.report.show import RunList
    from raybench.results import reader

    if last and is_all:
        raise UsageError("--last and --all: give one of them")
    newest = last or (None if is_all or as_json else _LISTED)
    runs = reader.read_runs(results, newest)
    if not runs and not as_json:
        click.echo(formatting.name_program(reader.no_runs_message(results)), err=True)
        return
    # The table has columns that JSON lacks: the machine, and with --long a sentence on the result.
    machines = {} if as_json else {run.run_id: _machine(results, run) for run in runs}
    leads = None
    if is_long and not as_json:
        with make_console().status(f"reading the points of {len(runs)} runs"):
            leads = {run.run_id: _lead(results, run.run_id) for run in runs}
    document = RunList(runs=runs, machines=machines, leads=leads)
    write_document(document, "json" if as_json else "terminal")
    older = 0 if last or is_all or as_json else len(reader.run_ids(results)) - _LISTED
    if older > 0:
        click.echo(f"not shown: {formatting.counted(older, 'older run')}; --all", err=True)


def _machine(results: Path, run: Run) -> str:
    """Return the devices of a run in words; if unknown, its cluster. This loads no pandas."""
    from raybench.results import reader

    try:
        columns = ["kind", "name", "node_id", "host", "address", "cpu_count"]
        devices = reader.read_table(results, "devices", run.run_id, columns).to_pylist()
    except ResultsError:
        return run.cluster
    return formatting.machine(devices) if devices else run.cluster


def _lead(results: Path, run_id: str) -> str:
    """Return the result of a run in a sentence; for damaged tables, the text of the error."""
    from raybench.analysis.answer import decide
    from raybench.analysis.run_data import load_run_data
    from raybench.report.words.answer import lead

    try:
        if health := load_health(results, run_id):
            return health.headline
        return lead(decide(load_run_data(results, run_id)))
    except ResultsError as error:
        return str(error)


@click.command("show")
@click.argument("run", shell_complete=complete_run)
@click.argument("point", required=False, shell_complete=complete_point)
@results_option
@references_option
@click.option("--logs", "as_logs", is_flag=True, help="Print what the ranks wrote instead.")
@json_option
def show_command(
    run: str, point: str | None, results: Path, references: References, as_logs: bool, as_json: bool
) -> None:
    """Show the points of RUN, or everything about one POINT (its id or a unique prefix).

    RUN is as for `raybench report`.
    """
    from raybench.analysis.rounds import latest_trials
    from raybench.analysis.rows import point_rows
    from raybench.report.show import PointList
    from raybench.results import reader

    root, run_id = reader.find_run(results, run)
    if as_logs:
        write_result(_logs(root, run_id, point, as_json))
        return
    document: Document
    if point is None:
        # The latest attempt at each trial, in the order of the first attempts.
        points = latest_trials(point_rows(reader.load_table(root, "points", run_id)))
        document = PointList(run_id=run_id, points=points)
    else:
        document = _details(root, run_id, point, references)
    write_document(document, "json" if as_json else "terminal")


def _logs(results: Path, run_id: str, prefix: str | None, as_json: bool) -> str:
    """Return what the ranks of a run wrote, or of the point whose id begins with `prefix`."""
    from raybench.report.documents import format_object
    from raybench.report.show import format_logs
    from raybench.results import reader

    # "*" stands for all points.
    subject, point_id = f"run {run_id}", "*"
    if prefix is not None:
        ids = list(dict.fromkeys(key.point_id for key in reader.latest(results, run_id)))
        point_id = reader.pick(prefix, ids, kind="point", where=f"{results}: {run_id}")
        subject = f"point {point_id}"
    logs = reader.logs(results, run_id, point_id)
    if as_json:
        return format_object(run_id=run_id, logs=[asdict(log) for log in logs])
    if not logs:
        raise ResultsError(f"{subject}: its ranks wrote nothing that is kept")
    return format_logs(logs)


def _details(results: Path, run_id: str, prefix: str, references: References) -> PointDetails:
    """Return everything about the point whose id begins with `prefix`, over all rounds."""
    from raybench.analysis.rounds import (
        Trials,
        join_rounds,
        mean_of_rounds,
        rank_steps,
        slowest_modules,
        slowest_regions,
    )
    from raybench.analysis.rows import typed_rows
    from raybench.analysis.run_data import load_run_data
    from raybench.report.show import PointDetails
    from raybench.results import reader
    from raybench.results.tables import RegionRow

    data = load_run_data(results, run_id, references)
    ids = list(dict.fromkeys(row.point_id for row in data.points))
    point_id = reader.pick(prefix, ids, kind="point", where=f"{results}: {run_id}")
    attempts = sorted(
        (row for row in data.points if row.point_id == point_id), key=lambda row: row.attempt
    )
    # The mean of the rounds, without controls (repeats that show a drift of the machine). A point
    # that ran only as a control has no mean, so show its last attempt.
    [row] = mean_of_rounds(attempts) or attempts[-1:]
    # None for a point that ran only as a control.
    scaled_row = next((row for row in data.rows if row.point_id == point_id), None)
    step_ms_interval: tuple[float | None, float | None] = (None, None)
    throughput_interval: tuple[float | None, float | None] = (None, None)
    if scaled_row is not None:
        # Take the doubts of the scaled row, which has more, such as impossible values.
        row = replace(row, doubts=scaled_row.doubts)
        step_ms_interval = (scaled_row.step_ms_low, scaled_row.step_ms_high)
        throughput_interval = (scaled_row.throughput_low, scaled_row.throughput_high)
    # The ok attempt of each round; if no round is ok, the shown row.
    attempt_of_rounds = list(Trials(attempts).rounds(row).values()) or [row]

    def read(table: str) -> list[pd.DataFrame]:
        """Return the rows of each round; rounds without rows come last."""
        keys = [(point_id, attempt.attempt) for attempt in attempt_of_rounds]
        frames = reader.rows_of_attempts(results, table, run_id, keys)
        return sorted(frames, key=lambda frame: frame.empty)

    # Show the first round that has modules, and the first round that has regions.
    modules, regions = read("modules")[0], read("regions")[0]
    samples = join_rounds(read("samples"))
    traces: list[str] = []
    for attempt in attempt_of_rounds:
        paths = reader.traces(results, run_id, point_id, attempt.attempt)
        traces += [str(path) for path in paths]
    return PointDetails(
        row=row,
        rounds=len(attempt_of_rounds),
        step_ms_interval=step_ms_interval,
        throughput_interval=throughput_interval,
        is_precision_unknown=data.is_precision_unknown,
        ranks=rank_steps(samples),
        modules=slowest_modules(modules),
        regions=slowest_regions(typed_rows(regions, RegionRow)),
        wrote_logs=bool(reader.logs(results, run_id, point_id)),
        traces=traces,
        attempts=attempts,
        standings=[
            standing for standing in data.standings if standing.measured.point_id == point_id
        ],
    )


@click.command("compact")
@click.argument("run", shell_complete=complete_run)
@results_option
def compact_command(run: str, results: Path) -> None:
    """Put the parts of RUN together, one file a table: smaller, and faster to read.

    Rows stay as they are; but if a killed sweep has left attempts without a row in `points`, their
    rows are deleted, except telemetry. A run that is still measured is refused. Nobody may read the
    run meanwhile. RUN is as for `raybench report`.
    """
    from raybench.results.reader import find_run
    from raybench.results.writer import compact_run

    root, run_id = find_run(results, run)
    with make_console().status(f"putting the parts of {run_id} together"):
        sizes = compact_run(root, run_id)
    if sizes.parts_after == sizes.parts_before:
        write_result(f"{run_id}: {sizes.parts_before} parts, nothing to put together\n")
        return
    write_result(
        f"{run_id}: {sizes.parts_before} parts are now {sizes.parts_after}, "
        f"{sizes.bytes_before / MIB:.1f} MiB now {sizes.bytes_after / MIB:.1f}\n"
    )
