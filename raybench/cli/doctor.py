"""`raybench doctor`: is this cluster fit to be measured."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

import click
from rich.console import Console

from raybench.cli.listener import ConsoleListener
from raybench.cli.output import color, width, write_result
from raybench.environment import package_versions, usable_cores, variables_that_matter
from raybench.errors import ClusterError, UsageError
from raybench.sweep.interrupts import Interrupts

if TYPE_CHECKING:
    from raybench.cluster import Cluster
    from raybench.doctor.facts import Check, Facts
    from raybench.doctor.text import Diagnosis

_STARTS = 3


@click.command("doctor", short_help="Check whether a cluster is fit to be measured.")
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
    help="What a worker owns: auto takes GPUs where the cluster has any.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--parity",
    "wants_parity",
    is_flag=True,
    help="Also time the same steps by bare torchrun and by raybench; takes minutes.",
)
@click.option(
    "--starts",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"Starts of each side for --parity, {_STARTS} unless told.",
)
@click.pass_context
def doctor_command(
    ctx: click.Context,
    address: str,
    device: Literal["auto", "cuda", "cpu"],
    as_json: bool,
    wants_parity: bool,
    starts: int | None,
) -> None:
    """Start a worker on every device and print one line per check: ok, warn or fail.

    \b
    raybench doctor --address auto
    raybench doctor --parity --starts 5 --json

    Exit code: 0 nothing failed, 1 a check failed, 2 a mistake in the command, 3 no cluster or its
    devices cannot be had, 130 interrupted.
    """
    if starts is not None and not wants_parity:
        raise UsageError(f"--starts {starts}: is for --parity; add it, or leave --starts out")
    from raybench.cluster.claims import Terms
    from raybench.cluster.device_locks import this_process
    from raybench.cluster.ray_cluster.cluster import RayCluster
    from raybench.cluster.ray_cluster.connection import connect
    from raybench.doctor.text import format_json, format_text

    console = Console(stderr=True)
    with ExitStack() as at_the_end:
        interrupts = at_the_end.enter_context(Interrupts(ConsoleListener(console)))
        with _phase(console, "connecting to Ray"), interrupts.held_back(math.inf):
            # A private Ray on CPUs gets a worker for each core.
            connection = connect(address, device, usable_cores(), end=interrupts.end)
            terms = Terms(holder=this_process("raybench doctor"), shared=True)
            cluster = RayCluster(connection, end=interrupts.end, terms=terms)
            at_the_end.callback(cluster.close)
            interrupts.take_signals()
        diagnosis = diagnose(cluster, (starts or _STARTS) if wants_parity else 0, console)
    if as_json:
        write_result(format_json(diagnosis))
    else:
        write_result(format_text(diagnosis, width=width(), color=color()))
    ctx.exit(1 if diagnosis.failed else 0)


def diagnose(cluster: Cluster, starts: int, console: Console) -> Diagnosis:
    """Start all workers and run all checks; parity with `starts` starts, not at all for 0.

    Raises ClusterError when the workers do not come.
    """
    from raybench.doctor.checks import examine
    from raybench.doctor.facts import Facts
    from raybench.doctor.text import Diagnosis

    refusal = _start(cluster, console)
    facts = Facts(
        devices=cluster.devices,
        versions=package_versions(),
        refusal=refusal,
        others=cluster.others,
    )
    checks = [*examine(facts), *_try_devices(cluster, facts, console)]
    if starts and not refusal:
        checks += _parity(cluster, facts, starts, console)
    return Diagnosis(
        cluster=cluster.description,
        facts=facts,
        checks=tuple(checks),
        environment=variables_that_matter(),
    )


def _start(cluster: Cluster, console: Console) -> str:
    """Why raybench refuses the devices that it found; empty when it does not."""
    count = cluster.capacity
    with _phase(console, f"starting {count} worker{'s' * (count != 1)}"):
        try:
            cluster.start(count, "pack")
        except ClusterError as error:
            if not cluster.devices:
                raise
            return str(error)
    return ""


def _try_devices(cluster: Cluster, facts: Facts, console: Console) -> list[Check]:
    """The checks for which the devices do something."""
    from raybench.doctor import collective

    if skipped := collective.not_run(facts):
        return [skipped]
    count = len(facts.devices)
    with _phase(console, f"all_reduce over {count} devices"):
        task = collective.all_reduce(facts.devices[0].kind, count)
        return collective.judge(cluster.run(task, range(count)))


def _parity(cluster: Cluster, facts: Facts, starts: int, console: Console) -> list[Check]:
    from raybench.doctor import parity
    from raybench.doctor.facts import Check, Verdict

    worker_ids = parity.local_worker_ids(facts.devices, socket.gethostname())
    if not worker_ids:
        found = f"not run: no worker on this host ({socket.gethostname()})"
        advice = "run doctor on a node that has devices"
        return [Check(name="parity", verdict=Verdict.WARN, found=found, advice=advice)]
    checks = []
    for step in parity.steps(facts.is_cuda):
        with _phase(console, f"{step.name}: {starts} starts of torchrun and of raybench"):
            found_by = parity.compare(
                cluster, worker_ids, step, starts, lambda line: _say(console, line)
            )
        checks.append(parity.judge(found_by, is_cuda=facts.is_cuda))
    return checks


@contextmanager
def _phase(console: Console, what: str) -> Iterator[None]:
    """What is going on: a spinner on a terminal, a line elsewhere."""
    if not console.is_interactive:
        _say(console, what)
    with console.status(what):
        yield


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
