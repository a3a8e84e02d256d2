"""`raybench export`: write a run for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from raybench.api.stored_runs import load_health
from raybench.cli.shared import (
    complete_run,
    file_option,
    format_options,
    read_reference_files,
    results_option,
    write_file,
    write_result,
)
from raybench.errors import ResultsError, UsageError
from raybench.report.export import FORMATS
from raybench.report.trackers import TRACKERS

_FORMATS = (*FORMATS, "reference")


@click.command("export")
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_run)
@results_option
@format_options(
    _FORMATS,
    "For spreadsheets, for other programs, for CI that shows tests, for the action that draws step "
    "times over commits, or as reference values, which take several RUNs.",
    default=None,
)
@file_option
@click.option(
    "--to",
    "tracker",
    type=click.Choice(tuple(TRACKERS)),
    help="Write to MLflow or Weights & Biases instead, where their own variables say "
    "(MLFLOW_TRACKING_URI, WANDB_MODE); needs the extra mlflow or wandb of raybench.",
)
def export_command(
    runs: tuple[str, ...], results: Path, kind: str | None, output: Path | None, tracker: str | None
) -> None:
    """Export the points of RUN, with one row for all rounds, or the findings of a health check.

    A health check is exported as csv, json, junit or reference. RUN is as for `raybench report`, by
    default `latest`. For --format reference, RUN may also be a YAML file of references; the values
    of all RUNs are pooled, and must come from GPUs of one model.

    \b
    raybench export --format csv -o points.csv
    raybench export latest --format junit -o junit.xml
    raybench export gemm health --format reference -o our_h200.yaml
    MLFLOW_TRACKING_URI=http://mlflow:5000 raybench export RUN --to mlflow
    """
    from raybench.analysis.run_data import load_run_data
    from raybench.health.report import export as export_check

    if tracker and output:
        raise UsageError(f"-o: goes with --format only; --to {tracker} writes no file")
    if (kind is None) == (tracker is None):
        raise UsageError(f"give --format {'|'.join(_FORMATS)}, or --to {'|'.join(TRACKERS)}")
    runs = runs or ("latest",)
    if len(runs) > 1 and kind != "reference":
        raise UsageError(f"{runs[1]}: only --format reference takes more than one run")
    check = load_health(results, runs[0]) if kind != "reference" else None
    if kind == "reference":
        text = _references(results, runs)
    elif tracker and check is None:
        text = f"{TRACKERS[tracker](load_run_data(results, runs[0]))}\n"
    elif check is None:
        text = FORMATS[str(kind)](load_run_data(results, runs[0]))
    elif kind in ("json", "csv", "junit"):
        text = export_check(check, kind)
    else:
        raise UsageError("a health check is exported as csv, json, junit or reference")
    if output is None:
        write_result(text)
    else:
        write_file(output, text.encode())


def _references(results: Path, runs: Sequence[str]) -> str:
    """Return the text of a reference file that pools the values of runs and of reference files."""
    from raybench.analysis.references import format_references, pool, reference_files
    from raybench.analysis.rounds import latest_trials, without_controls
    from raybench.analysis.run_data import load_run_data, measured_values
    from raybench.results import reader

    files = []
    for name in runs:
        if name.endswith((".yaml", ".yml")):
            files += read_reference_files(Path(name))
            continue
        root, run_id = reader.find_run(results, name)
        devices = reader.read_table(root, "devices", run_id).to_pylist(maps_as_pydicts="strict")
        if (check := load_health(results, name)) is not None:
            measured = check.measurements
        else:
            trials = without_controls(latest_trials(load_run_data(results, name).points))
            measured = list(measured_values(trials, [device["uuid"] for device in devices]))
        files += reference_files(reader.read_run(root, run_id), devices, measured)
    # One file for each model of GPU.
    pooled, names = pool(files), " and ".join(runs)
    if not any(file.quantities for file in pooled):
        raise ResultsError(
            f"{names}: no ok point on GPUs that nothing else used, so there is no reference"
        )
    if len(pooled) > 1:
        models = " and ".join(file.model for file in pooled)
        raise ResultsError(f"{names}: measured {models}; name runs of one model at a time")
    return format_references(pooled[0])
