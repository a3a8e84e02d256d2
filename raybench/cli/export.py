"""`raybench export`: the points of a run in the forms that other programs read."""

from __future__ import annotations

from pathlib import Path

import click

from raybench.cli.health_results import export_health, load_health
from raybench.cli.options import complete_run, format_asked, json_format_option, results_option
from raybench.cli.output import write_file, write_result
from raybench.errors import UsageError
from raybench.report import export

_FORMATS, _TRACKERS = export.format_names(), export.tracker_names()


@click.command("export")
@click.argument("run", default="latest", shell_complete=complete_run)
@results_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(_FORMATS),
    help="For spreadsheets, for other programs, for CI that shows tests, or for the action that "
    "draws step times over commits.",
)
@json_format_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write it to this file.")
@click.option(
    "--to",
    "tracker",
    type=click.Choice(_TRACKERS),
    help="Write to MLflow or Weights & Biases instead, where their own variables say "
    "(MLFLOW_TRACKING_URI, WANDB_MODE); needs raybench[mlflow] or raybench[wandb].",
)
def export_command(
    run: str,
    results: Path,
    kind: str | None,
    as_json: bool,
    output: Path | None,
    tracker: str | None,
) -> None:
    """Give other programs the latest attempt at each point of RUN, with speed-up and efficiency.

    RUN is as for `raybench report`.

    \b
    raybench export --format csv -o points.csv
    raybench export latest --format junit -o junit.xml
    MLFLOW_TRACKING_URI=http://mlflow:5000 raybench export RUN --to mlflow
    """
    from raybench.cli.results import load_summary

    kind = format_asked(kind, as_json)
    if (kind is None) == (tracker is None):
        raise UsageError(f"give --format {'|'.join(_FORMATS)}, or --to {'|'.join(_TRACKERS)}")
    if tracker and output:
        raise UsageError(f"-o: goes with --format only; --to {tracker} writes no file")
    health = load_health(results, run)
    if health is not None:
        text = export_health(health, kind)
    else:
        summary = load_summary(results, run)
        if tracker:
            click.echo(export.upload(summary, tracker))
            return
        text = export.export(summary, str(kind))
    if output is None:
        write_result(text)
    else:
        write_file(output, text.encode())
