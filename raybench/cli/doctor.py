"""`raybench doctor`: is this cluster fit to be measured."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Literal

import click

from raybench.cli.options import address_option, device_option, json_option
from raybench.cli.output import (
    ConsoleListener,
    color,
    json_text,
    make_console,
    show_phase,
    width,
    write_result,
)

if TYPE_CHECKING:
    from raybench.doctor.diagnosis import Diagnosis

SCHEMA_VERSION = 1  # of the JSON object
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command("doctor")
@address_option()
@device_option("What a worker owns: auto takes GPUs where the cluster has any.")
@json_option
@click.pass_context
def doctor_command(
    ctx: click.Context,
    address: str,
    device: Literal["auto", "cuda", "cpu"],
    as_json: bool,
) -> None:
    """Start a worker on every device and print one line per check: ok, warn or fail.

    \b
    raybench doctor
    raybench doctor --address auto --json

    Exit code: 0 nothing failed, 1 a check failed, 2 a mistake in the command, 3 no cluster or its
    devices cannot be had, 130 interrupted.
    """
    from raybench.doctor.diagnosis import diagnose, open_cluster
    from raybench.sweep.runner import Interrupts

    console = make_console()
    phase = partial(show_phase, console)
    with ExitStack() as at_the_end:
        interrupts = at_the_end.enter_context(Interrupts(ConsoleListener(console)))
        with phase("connecting to Ray"), interrupts.held_back(math.inf):
            cluster = open_cluster(address, device, interrupts.end)
            at_the_end.callback(cluster.close)
            interrupts.take_signals()
        diagnosis = diagnose(cluster, phase)
    write_result(format_json(diagnosis) if as_json else format_text(diagnosis))
    ctx.exit(1 if diagnosis.has_failed else 0)


def format_text(diagnosis: Diagnosis) -> str:
    """Return a line for each check, its advice below it, and how many are ok, warn and fail."""
    from rich.table import Table
    from rich.text import Text

    from raybench.report.plain_text import plain
    from raybench.report.terminal import render_parts

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", max_width=18)
    grid.add_column(overflow="fold")
    for check in diagnosis.checks:
        # Names and findings may come from an error message or a variable.
        verdict = Text(check.verdict, style=_STYLES[check.verdict])
        grid.add_row(verdict, Text(plain(check.name)), Text(plain(check.found)))
        if check.advice:
            grid.add_row("", "", Text(plain(f"-> {check.advice}")))
    counts = Counter[str](check.verdict for check in diagnosis.checks)
    total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _STYLES)
    return render_parts([Text(plain(diagnosis.cluster)), grid, Text(total)], width(), color())


def format_json(diagnosis: Diagnosis) -> str:
    """Return the JSON object of all checks.

    Its members: schema_version, cluster, checks, devices; versions and environment of this process.
    """
    return json_text(
        {
            "schema_version": SCHEMA_VERSION,
            "cluster": diagnosis.cluster,
            "checks": [asdict(check) for check in diagnosis.checks],
            "devices": [asdict(device) for device in diagnosis.facts.devices],
            "versions": dict(diagnosis.facts.versions),
            "environment": dict(diagnosis.environment),
        }
    )
