"""`raybench health`: which device, pair or node is bad, by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from raybench.cli.output import ConsoleListener, make_console, table_text, write_result


@click.command("health")
@click.option(
    "--address",
    default="auto",
    show_default=True,
    metavar="auto|local|HOST:PORT",
    help="The Ray cluster, as for `raybench sweep`.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="The devices to check. auto: GPUs where the cluster has any, else CPU workers.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder for the result tables.",
)
@click.pass_context
def health_command(
    ctx: click.Context, address: str, device: Literal["auto", "cuda", "cpu"], output: Path
) -> None:
    """Check all devices of a cluster, alone, in pairs and together, and name what is bad.

    \b
    raybench health
    raybench health --address auto --device cuda

    Exit code: 0 healthy, 1 something is suspect or bad, 2 a mistake in the command, 3 it could not
    be tested, 130 interrupted.
    """
    # Here, so that neither --help nor the Tab key waits for them.
    from raybench.doctor.health.check import examine
    from raybench.doctor.health.suite import STAGES, title
    from raybench.results.writer import check_writable
    from raybench.sweep.run_state import RunTarget

    check_writable(output)
    where = RunTarget(address=address, device=device, output=output, profiled=frozenset())
    listener = ConsoleListener(make_console(), title)
    found = examine(where, listener, STAGES, ("raybench", *sys.argv[1:]))
    rows = [
        (one.subject.name, one.test.name, str(one.pass_number), f"{one.value}", one.problem or "")
        for one in found.readings
    ]
    write_result(table_text(("subject", "test", "pass", "value", "problem"), rows))
