"""`raybench doctor` and `health`: is a cluster fit to be measured, and what of it is bad."""

from __future__ import annotations

import math
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from raybench.api.files import check_outlives_job
from raybench.cli.node_reports import NodeOutputs, finish, node_options
from raybench.cli.shared import (
    address_option,
    color,
    device_option,
    devices_option,
    json_option,
    json_text,
    make_console,
    make_target,
    output_option,
    read_duration,
    references_option,
    shared_option,
    wait_option,
    width,
    write_document,
    write_result,
)
from raybench.errors import UsageError
from raybench.records.devices import Stage

if TYPE_CHECKING:
    from raybench.analysis.references import References
    from raybench.doctor.diagnosis import Diagnosis


SCHEMA_VERSION = 1  # of the JSON object
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command("doctor")
@address_option(help="The Ray cluster, as for `raybench sweep`.")
@device_option(help="What a worker owns: auto takes GPUs where the cluster has any.")
@json_option
@click.pass_context
def doctor_command(
    ctx: click.Context, address: str, device: Literal["auto", "cuda", "cpu"], as_json: bool
) -> None:
    """Try every device, alone and in an all_reduce; print one line per check: ok, warn or fail.

    \b
    raybench doctor
    raybench doctor --address auto --json

    Sweeps on these devices are slowed, not waited for. Exit code: 0 nothing failed, 1 a check
    failed, 2 a mistake in the command, 3 no cluster or devices to be had, 130 interrupted.
    """
    from raybench.api.progress import ConsoleListener, show_phase
    from raybench.doctor.checks import Verdict
    from raybench.doctor.diagnosis import diagnose, open_cluster
    from raybench.sweep.interrupts import Interrupts

    console = make_console()
    phase = partial(show_phase, console)
    with ExitStack() as at_the_end:
        listener = ConsoleListener(console)
        interrupts = at_the_end.enter_context(Interrupts(listener))
        with phase("connecting to Ray"), interrupts.held_back(math.inf):
            cluster = open_cluster(address, device, interrupts.end, listener.tell)
            at_the_end.callback(cluster.close)
            interrupts.take_signals()
        diagnosis = diagnose(cluster, phase)
    write_result(format_json(diagnosis) if as_json else format_text(diagnosis))
    ctx.exit(int(any(check.verdict is Verdict.FAIL for check in diagnosis.checks)))


def format_text(diagnosis: Diagnosis) -> str:
    """Return the cluster, a line for each check with its advice below it, and counts by verdict."""
    from rich.table import Table
    from rich.text import Text

    from raybench.report.documents import render_parts
    from raybench.report.formatting import plain

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", max_width=18)
    grid.add_column(overflow="fold")
    for check in diagnosis.checks:
        # Names and findings may contain markup of rich: they may come from an error message.
        verdict = Text(check.verdict, style=_STYLES[check.verdict])
        grid.add_row(verdict, Text(plain(check.name)), Text(plain(check.found)))
        if check.advice:
            grid.add_row("", "", Text(plain(f"-> {check.advice}")))
    counts = Counter[str](check.verdict for check in diagnosis.checks)
    total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _STYLES)
    return render_parts([Text(plain(diagnosis.cluster)), grid, Text(total)], width(), color())


def format_json(diagnosis: Diagnosis) -> str:
    """Return the JSON object of all checks as text."""
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


@click.command("health")
@address_option(help="The Ray cluster, as for `raybench sweep`.")
@device_option(help="The devices to check. auto: GPUs where the cluster has any, else CPU workers.")
@devices_option
@click.option(
    "--only",
    "stages",
    type=click.Choice(get_args(Stage)),
    multiple=True,
    help="Run this stage only; may be repeated.",
)
@click.option("--serial", is_flag=True, help="Test one pair at a time, not disjoint pairs at once.")
@click.option(
    "--burn-in",
    "burn_in_s",
    callback=read_duration,
    default="0",
    metavar="TIME",
    help="Afterwards let the devices work for TIME, as in 30m, and compare its end to its start.",
)
@click.option(
    "--healthy-devices",
    "healthy_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the healthy devices to FILE, for `raybench sweep --devices FILE`.",
)
@wait_option
@shared_option
@output_option
@references_option
@node_options
@json_option
@click.pass_context
def health_command(
    ctx: click.Context,
    /,
    stages: tuple[Stage, ...],
    serial: bool,
    burn_in_s: float,
    healthy_file: Path | None,
    references: References,
    outputs: NodeOutputs,
    as_json: bool,
    **given: Any,
) -> None:
    """Check all devices of a cluster, alone, in pairs and together, and name what is bad.

    \b
    raybench health
    raybench health --only alone --only pairs
    raybench health --address auto --healthy-devices healthy.txt
    raybench health --report /shared/checks
    raybench health --collect /shared/checks --expect 'gpu[01-12]'

    Exit code: 0 healthy, 1 something is suspect or bad, 2 a mistake in the command, 3 something was
    not tested, nothing has a comparison, or no cluster or devices can be had, 130 interrupted.
    """
    # Here, so that neither --help nor the Tab key waits for them.
    from raybench.api.progress import ConsoleListener
    from raybench.api.stored_runs import load_health
    from raybench.health.check import examine
    from raybench.health.suite import STAGES, title
    from raybench.records.devices import check_list_writable, write_device_list
    from raybench.records.status import RunStatus
    from raybench.results.writer import check_writable

    if "burn-in" in stages and not burn_in_s:
        raise UsageError("--only burn-in: needs a time; add --burn-in, as in --burn-in 30m")
    where = make_target(given)
    # A check takes minutes: fail before it begins.
    check_outlives_job(where.output)
    check_writable(where.output)
    if healthy_file is not None:
        check_list_writable(healthy_file)
    check = examine(
        where,
        ConsoleListener(make_console(), title),
        stages or STAGES,
        ("raybench", *sys.argv[1:]),
        serial=serial,
        burn_in_s=burn_in_s,
        references=references,
    )
    if check.run.status is RunStatus.INTERRUPTED:
        ctx.exit(finish(check.node_reports, outputs, 130, is_json=as_json))
    if healthy_file is not None:
        comment = f"healthy by run {check.run.run_id}"
        write_device_list(healthy_file, check.healthy_devices, comment)
    report = load_health(where.output, check.run.run_id, references)
    assert report is not None, "its command line says that it is a check"
    code = finish(check.node_reports, outputs, report.exit_code, is_json=as_json)
    write_document(report, "json" if as_json else "terminal")
    ctx.exit(code)
