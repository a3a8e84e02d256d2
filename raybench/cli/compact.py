"""`raybench compact`: the parts of a finished run, put together."""

from __future__ import annotations

from pathlib import Path

import click

from raybench.cli.options import complete_run, results_option
from raybench.cli.output import make_console, write_result

_MIB = 2**20


@click.command("compact")
@click.argument("run", shell_complete=complete_run)
@results_option
def compact_command(run: str, results: Path) -> None:
    """Put the parts of RUN together, one file a table: smaller, and faster to read.

    Rows stay as they are. A run that is still measured is refused; do it when nobody reads the run.
    RUN is as for `raybench report`.
    """
    from raybench.results.run import find_run
    from raybench.results.writer import compact_run

    root, run_id = find_run(results, run)
    with make_console().status(f"putting the parts of {run_id} together"):
        done = compact_run(root, run_id)
    if done.parts_after == done.parts_before:
        write_result(f"{run_id}: {done.parts_before} parts, nothing to put together\n")
        return
    write_result(
        f"{run_id}: {done.parts_before} parts are now {done.parts_after}, "
        f"{done.bytes_before / _MIB:.1f} MiB now {done.bytes_after / _MIB:.1f}\n"
    )
