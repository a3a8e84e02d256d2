"""`raybench predict` and `advise`: more devices than were measured, and which ones to use."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raybench.cli.health import load_health
from raybench.cli.options import (
    complete_run,
    format_asked,
    json_format_option,
    json_option,
    results_option,
    text_format_option,
)
from raybench.cli.output import write_document
from raybench.cli.results import load_summary
from raybench.errors import ResultsError, UsageError

if TYPE_CHECKING:
    from raybench.report.prediction import Forecast


_MOST_DEVICES = 1_000_000


def read_world_sizes(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    """Return the numbers that --world-size lists, in ascending order. Raises UsageError."""
    names = [name.strip() for name in text.split(",")]
    if all(re.fullmatch(r"\d{1,7}", name) and 2 <= int(name) <= _MOST_DEVICES for name in names):
        return tuple(sorted({int(name) for name in names}))
    raise UsageError(
        f"--world-size: must be numbers from 2 up to {_MOST_DEVICES:,}, as in 8,64,512, "
        f"got {text!r}"
    )


@click.command("predict")
@click.argument("run", default="latest", shell_complete=complete_run)
@click.option(
    "--world-size",
    "world_sizes",
    callback=read_world_sizes,
    required=True,
    metavar="N,N,…",
    help="Numbers of devices, each more than the run measured.",
)
@results_option
@text_format_option
@json_format_option
def predict_command(
    run: str,
    world_sizes: tuple[int, ...],
    results: Path,
    kind: str | None,
    as_json: bool,
) -> None:
    """Predict the data-parallel steps of RUN on more devices than it measured, with intervals.

    RUN is as for `raybench report`. More devices of its nodes are predicted from any run; more
    nodes only from a run over several nodes. Needs no cluster.
    """
    kind = format_asked(kind, as_json) or "terminal"
    write_document(load_forecast(results, run, world_sizes), kind)


def load_forecast(results: Path, run: str, world_sizes: tuple[int, ...]) -> Forecast:
    """Return the predictions of a run. Raises ResultsError where nothing can be predicted.

    Raises UsageError where the run measured as many devices as one of the world sizes, or more.
    """
    from raybench.analysis.prediction import predict
    from raybench.analysis.rows import point_rows
    from raybench.report.prediction import Forecast
    from raybench.results import reader

    root, run_id = reader.find_run(results, run)
    found, points = reader.read_run(root, run_id), point_rows(reader.load(root, "points", run_id))
    largest = max((row.world_size for row in points), default=0)
    if world_sizes[0] <= largest:
        raise UsageError(
            f"--world-size {world_sizes[0]}: must be more than the {largest} that {run_id} measured"
        )
    nodes = reader.read_table(root, "devices", run_id, ("node_id",))["node_id"].to_pylist()
    devices_per_node = max(Counter(nodes).values(), default=1)
    try:
        predictions, left_out = predict(points, world_sizes, devices_per_node)
    except ResultsError as error:
        raise ResultsError(f"{run_id}: cannot predict: {error}") from error
    return Forecast(
        run=found,
        predictions=predictions,
        devices_per_node=devices_per_node,
        left_out=left_out,
    )


@click.command("advise")
@click.argument("run", default="latest", shell_complete=complete_run)
@results_option
@json_option
def advise_command(run: str, results: Path, as_json: bool) -> None:
    """Advise which devices, shares, precision and batch to use, by the measurements of RUN.

    RUN is as for `raybench report`, or a health check. Each advice names its rows; what is not
    measured is called an estimate. Needs no cluster.
    """
    from raybench.report.show import AdviceList, advise_run

    if (check := load_health(results, run)) is not None:
        found = AdviceList(run_id=check.run.run_id, advice=check.advice)
    else:
        summary = load_summary(results, run)
        found = AdviceList(run_id=summary.run.run_id, advice=advise_run(summary))
    write_document(found, "json" if as_json else "terminal")
