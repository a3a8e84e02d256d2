"""`raybench doctor`: is this cluster fit to be measured."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from typing import Literal

import click

from raybench.cli.options import address_option, device_option, json_option
from raybench.cli.output import (
    ConsoleListener,
    color,
    make_console,
    show_phase,
    width,
    write_result,
)
from raybench.sweep.interrupts import Interrupts


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
    from raybench.cli.doctor_results import format_json, format_text
    from raybench.doctor.diagnosis import diagnose, open_cluster

    console = make_console()
    phase = partial(show_phase, console)
    with ExitStack() as at_the_end:
        interrupts = at_the_end.enter_context(Interrupts(ConsoleListener(console)))
        with phase("connecting to Ray"), interrupts.held_back(math.inf):
            cluster = open_cluster(address, device, interrupts.end)
            at_the_end.callback(cluster.close)
            interrupts.take_signals()
        diagnosis = diagnose(cluster, phase)
    if as_json:
        write_result(format_json(diagnosis))
    else:
        write_result(format_text(diagnosis, width=width(), color=color()))
    ctx.exit(1 if diagnosis.has_failed else 0)
