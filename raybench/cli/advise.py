"""`raybench advise`: which devices, shares, precision and batch to use, by what a run measured."""

from __future__ import annotations

import json
from pathlib import Path

import click

from raybench.cli.health_results import load_health
from raybench.cli.options import complete_run, results_option
from raybench.cli.output import text_width, write_result
from raybench.cli.results import load_summary


@click.command("advise")
@click.argument("run", default="latest", shell_complete=complete_run)
@results_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def advise_command(run: str, results: Path, as_json: bool) -> None:
    """Advise which devices, shares, precision and batch to use, by the measurements of RUN.

    RUN is as for `raybench report`, or a health check. Each advice names its rows; what is not
    measured is called an estimate. Needs no cluster.
    """
    from raybench.health.report import advise_health
    from raybench.report.advice import advise_run, as_rows, format_advice

    if (check := load_health(results, run)) is not None:
        run_id, advice = check.run.run_id, advise_health(check)
    else:
        summary = load_summary(results, run)
        run_id, advice = summary.run.run_id, advise_run(summary)
    if as_json:
        write_result(json.dumps({"run_id": run_id, "advice": as_rows(advice)}, indent=2) + "\n")
    else:
        write_result(format_advice(advice, run_id, text_width()))
