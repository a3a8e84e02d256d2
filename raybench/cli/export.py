"""`raybench export`: the points of a run in the forms that other programs read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from raybench.cli.health_results import load_health
from raybench.cli.options import complete_run, format_asked, json_format_option, results_option
from raybench.cli.output import write_file, write_result
from raybench.errors import UsageError
from raybench.report import export

_FORMATS, _TRACKERS = export.format_names(), export.tracker_names()


@click.command("export")
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_run)
@results_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(_FORMATS),
    help="For spreadsheets, for other programs, for CI that shows tests, for the action that "
    "draws step times over commits, or as reference values, which take several RUNs.",
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
    runs: tuple[str, ...],
    results: Path,
    kind: str | None,
    as_json: bool,
    output: Path | None,
    tracker: str | None,
) -> None:
    """Give other programs the latest attempt at each point of RUN, with speed-up and efficiency.

    RUN is as for `raybench report`, and `latest` where none is given. With --format reference it
    may be a YAML file of references too: all are pooled.

    \b
    raybench export --format csv -o points.csv
    raybench export latest --format junit -o junit.xml
    raybench export gemm health --format reference -o our_h200.yaml
    MLFLOW_TRACKING_URI=http://mlflow:5000 raybench export RUN --to mlflow
    """
    kind = format_asked(kind, as_json)
    if (kind is None) == (tracker is None):
        raise UsageError(f"give --format {'|'.join(_FORMATS)}, or --to {'|'.join(_TRACKERS)}")
    if tracker and output:
        raise UsageError(f"-o: goes with --format only; --to {tracker} writes no file")
    text = _references(results, runs) if kind == "reference" else None
    if text is None:
        run, *others = runs or ("latest",)
        if others:
            raise UsageError(f"{others[0]}: only --format reference takes more than one run")
        text = _text(results, run, kind, tracker)
    if output is None:
        write_result(text)
    else:
        write_file(output, text.encode())


def _text(results: Path, run: str, kind: str | None, tracker: str | None) -> str:
    """Return a run in a format, or the line about what was written to a tracker."""
    from raybench.cli.results import load_summary

    if (check := load_health(results, run)) is not None:
        from raybench.health.document import export as export_check

        if kind in ("json", "csv", "junit"):
            return export_check(check, kind)
        raise UsageError("a health check is exported as csv, json or junit")
    summary = load_summary(results, run)
    return f"{export.upload(summary, tracker)}\n" if tracker else export.export(summary, str(kind))


def _references(results: Path, runs: Sequence[str]) -> str:
    """Return what runs, and files of references, support, pooled. Raises as `reference.write`."""
    from raybench.analysis.references import load_files
    from raybench.cli.health_results import references_of_check
    from raybench.cli.results import load_summary
    from raybench.report.export.formats import reference

    files = []
    for run in runs or ("latest",):
        if run.endswith((".yaml", ".yml")):
            files += load_files(Path(run))
            continue
        found = references_of_check(results, run)
        files += reference.files(load_summary(results, run)) if found is None else found
    return reference.write(" and ".join(runs) or "latest", files)
