"""`raybench health`: is a cluster fit to be measured, and which devices, links or nodes are bad."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from raybench.api.files import check_outlives_job
from raybench.cli.node_reports import (
    NodeOutputs,
    exit_code,
    finish,
    node_options,
    untested_report,
)
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
    from raybench.records.node_report import NodeReport


# The imports before a quick check take less, also on a busy node.
_LONGEST_START_S = 4.0
# Parameter -> its option, of the full check; each option needs a cluster, a run or stages.
_NOT_WITH_QUICK = {
    "address": "--address",
    "devices_file": "--devices",
    "stages": "--only",
    "serial": "--serial",
    "burn_in_s": "--burn-in",
    "healthy_file": "--healthy-devices",
    "wait_s": "--wait",
    "shared": "--shared",
    "output": "--output",
}


def refuse_with_quick(ctx: click.Context) -> None:
    """Raise UsageError if an option was given that `--quick` does not take."""
    for name, option in _NOT_WITH_QUICK.items():
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(
                f"{option}: not with --quick, which checks the devices of this node in seconds; "
                "leave one of them out"
            )


def check_node(device: Literal["auto", "cuda", "cpu"], references: References) -> NodeReport:
    """Run the quick check of this node, with its progress on stderr."""
    began = datetime.now(UTC)
    try:
        import psutil

        # The deadlines count from the start of the command, whose imports take a second. A shell
        # that started this command by `exec` is the same process, and may be old.
        process_age_s = max(0.0, time.time() - psutil.Process().create_time())
        began_s = time.monotonic() - min(process_age_s, _LONGEST_START_S)

        def tell(text: str) -> None:
            click.echo(f"{time.monotonic() - began_s:4.1f} s  {text}", err=True)

        tell("raybench health --quick")
        from raybench.health.quick.check import quick_check

        return quick_check(device, references=references, tell=tell, began_s=began_s)
    except ImportError as error:
        # A missing package is no fault of a device.
        return untested_report(error, began)


def write_node_report(report: NodeReport, *, as_json: bool) -> None:
    """Write the report of a node to stdout, as text or as one JSON object."""
    from raybench.report.quick_report import format_node_report

    if as_json:
        write_result(json_text(asdict(report)))
    else:
        write_result(format_node_report(report, width=width(), color=color()))


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
@click.option(
    "--quick",
    is_flag=True,
    help="Check the devices of this node alone, in seconds and without Ray; writes no results.",
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
    quick: bool,
    stages: tuple[Stage, ...],
    serial: bool,
    burn_in_s: float,
    healthy_file: Path | None,
    references: References,
    outputs: NodeOutputs,
    as_json: bool,
    **given: Any,
) -> None:
    """Check a cluster and its devices, alone, in pairs and together, and name what is bad.

    \b
    raybench health
    raybench health --only environment
    raybench health --only alone --only pairs
    raybench health --address auto --healthy-devices healthy.txt
    raybench health --quick
    raybench health --report /shared/checks
    raybench health --collect /shared/checks --expect 'gpu[01-12]'

    Exit code: 0 healthy, 1 something is suspect or bad, 2 a mistake in the command, 3 something was
    not tested, nothing has a comparison, or no cluster or devices can be had, 130 interrupted.
    """
    if quick:
        refuse_with_quick(ctx)
        report = check_node(given["device"], references)
        usual_code = exit_code([report], None)
        code = finish([report], outputs, usual_code, is_json=as_json)
        write_node_report(report, as_json=as_json)
        ctx.exit(code)
    # Import here, so that neither --help nor the Tab key waits for these modules.
    from raybench.api.progress import ConsoleListener
    from raybench.api.stored_runs import load_health
    from raybench.health.check import CheckSettings, examine
    from raybench.health.suite import ENVIRONMENT, STAGES, title
    from raybench.records.devices import check_list_writable, write_device_list
    from raybench.records.status import RunStatus
    from raybench.results.writer import check_writable

    if "burn-in" in stages and not burn_in_s:
        raise UsageError("--only burn-in: needs a time; add --burn-in, as in --burn-in 30m")
    target = make_target(given)
    if set(stages) == {ENVIRONMENT} and not target.wait_s:
        # If another sweep uses the devices, report this sweep and do not fail: the stage takes only
        # seconds, and disturbs the sweep little.
        target = replace(target, shared=True)
    # A check takes minutes, so fail before the check begins.
    check_outlives_job(target.output)
    check_writable(target.output)
    if healthy_file is not None:
        check_list_writable(healthy_file)
    check = examine(
        target,
        ConsoleListener(make_console(), title),
        CheckSettings(stages=stages or STAGES, serial=serial, burn_in_s=burn_in_s),
        ("raybench", *sys.argv[1:]),
        references,
    )
    if check.run.status is RunStatus.INTERRUPTED:
        ctx.exit(finish(check.node_reports, outputs, 130, is_json=as_json))
    if healthy_file is not None:
        comment = f"healthy by run {check.run.run_id}"
        write_device_list(healthy_file, check.healthy_devices, comment)
    document = load_health(target.output, check.run.run_id, references)
    assert document is not None, "its command line says that it is a check"
    code = finish(check.node_reports, outputs, document.exit_code, is_json=as_json)
    write_document(document, "json" if as_json else "terminal")
    ctx.exit(code)
