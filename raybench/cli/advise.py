"""`raybench advise`: which devices, shares, precision and batch to use, by what a run measured."""

from __future__ import annotations

from pathlib import Path

import click

from raybench.cli.health_results import load_health
from raybench.cli.options import complete_run, json_option, results_option
from raybench.cli.output import write_document
from raybench.cli.results import load_summary


@click.command("advise")
@click.argument("run", default="latest", shell_complete=complete_run)
@results_option
@json_option
def advise_command(run: str, results: Path, as_json: bool) -> None:
    """Advise which devices, shares, precision and batch to use, by the measurements of RUN.

    RUN is as for `raybench report`, or a health check. Each advice names its rows; what is not
    measured is called an estimate. Needs no cluster.
    """
    from raybench.report.advice import AdviceList, advise_run

    if (check := load_health(results, run)) is not None:
        found = AdviceList(run_id=check.run.run_id, advice=check.advice)
    else:
        summary = load_summary(results, run)
        found = AdviceList(run_id=summary.run.run_id, advice=advise_run(summary))
    write_document(found, "json" if as_json else "terminal")
