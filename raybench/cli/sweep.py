"""`raybench sweep`: run a job on a cluster, keep every point, print the report."""

from __future__ import annotations

import secrets
import socket
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from rich.console import Console

from raybench.environment import git_commit, measured_variables, package_versions
from raybench.errors import ClusterError, UsageError
from raybench.records import Run, RunStatus, Status

if TYPE_CHECKING:
    from raybench.cluster import Cluster
    from raybench.job import Job
    from raybench.plan import Plan
    from raybench.store import RunStore

_EXIT_CODES = {RunStatus.OK: 0, RunStatus.FAILED: 1, RunStatus.INTERRUPTED: 130}


@dataclass(frozen=True, slots=True)
class _Where:
    """Where a run is carried out and where its tables go."""

    address: str
    device: Literal["auto", "cuda", "cpu"]
    output: Path


@click.command("sweep")
@click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path))
@click.option(
    "--address",
    default="auto",
    show_default=True,
    metavar="auto|local|HOST:PORT",
    help="The Ray cluster: auto joins RAY_ADDRESS or one running on this host, else starts "
    "a private one; local always starts a private one.",
)
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="The folder that takes the result tables.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a job setting."
)
@click.option(
    "--filter", "expression", metavar="EXPR", help="Run only the points for which EXPR holds."
)
@click.option("--tag", "tags", multiple=True, metavar="K=V", help="Stored with the run.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of the report."
)
@click.pass_context
def sweep_command(
    ctx: click.Context,
    job_file: Path,
    address: str,
    device: Literal["auto", "cuda", "cpu"],
    output: Path,
    overrides: tuple[str, ...],
    expression: str | None,
    tags: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run JOB: every point of it becomes a row in the results, whatever happens to it."""
    from raybench.cli.jobs import load_plan, print_plan

    job, plan = load_plan(job_file, overrides, expression)
    if dry_run:
        print_plan(job, plan, as_json)
        return
    run = _new_run(job, plan, _tags(tags))
    console = Console(stderr=True)
    for warning in plan.warnings:
        console.print(f"{warning} (warning)", markup=False, soft_wrap=True)
    run = _carried_out(job, plan, run, _Where(address, device, output), console)
    _print_result(output, run, as_json)
    ctx.exit(_EXIT_CODES[run.status])


def _carried_out(job: Job, plan: Plan, run: Run, where: _Where, console: Console) -> Run:
    """Run the plan on a cluster; the run as it ended. Raises ClusterError and ResultsError."""
    from raybench.cluster.ray_cluster import RayCluster
    from raybench.cluster.ray_connection import connect
    from raybench.scheduler import workers_needed
    from raybench.store import RunStore

    biggest = max(point.world_size for point in plan.points)
    with console.status("connecting to Ray"):
        cluster = RayCluster(connect(where.address, where.device, biggest))
    with closing(cluster):
        console.print(f"{cluster.description}; run {run.run_id}", markup=False, soft_wrap=True)
        workers = workers_needed(plan, cluster.capacity)
        if not workers:
            smallest = min(point.world_size for point in plan.points)
            raise ClusterError(
                f"no point fits: the smallest needs {smallest} devices, the cluster has "
                f"{cluster.capacity}; set matrix.world_size with --set, or use a bigger cluster"
            )
        store = RunStore.create(
            where.output, replace(run, cluster=cluster.description), job.measure
        )
        with console.status(f"starting {workers} workers"):
            cluster.start(workers, job.placement.strategy)
        store.write_devices(cluster.devices)
        return _swept(job, plan, replace(run, cluster=cluster.description), cluster, store, console)


def _swept(
    job: Job, plan: Plan, run: Run, cluster: Cluster, store: RunStore, console: Console
) -> Run:
    """The loop over the points, with its progress; the row of the run is written at its end."""
    from raybench.cli.progress import make_progress
    from raybench.sweep import PointFinished, SweepSettings, sweep

    settings = SweepSettings(
        measure=job.measure,
        strategy=job.placement.strategy,
        stop_on_error=job.on_error == "stop",
    )
    ended: Counter[Status] = Counter()
    status = RunStatus.FAILED
    try:
        with make_progress(plan, console) as progress:
            for event in sweep(plan, settings, cluster, store.write_record):
                progress.show(event)
                if isinstance(event, PointFinished):
                    ended[event.record.status] += 1
        failed = sum(ended.values()) - ended[Status.OK] - ended[Status.SKIPPED]
        status = RunStatus.FAILED if failed else RunStatus.OK
    except KeyboardInterrupt:
        # The point in flight has its row already; the report tells what was kept.
        status = RunStatus.INTERRUPTED
        console.print("interrupted: the points that finished are kept", soft_wrap=True)
    finally:
        run = replace(
            run,
            status=status,
            finished_at=datetime.now(UTC),
            points_ok=ended[Status.OK],
            points_skipped=ended[Status.SKIPPED],
            points_failed=sum(ended.values()) - ended[Status.OK] - ended[Status.SKIPPED],
        )
        store.write_run(run)
    return run


def _new_run(job: Job, plan: Plan, tags: dict[str, str]) -> Run:
    now = datetime.now(UTC)
    return Run(
        run_id=f"{job.name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        job_name=job.name,
        job_text=job.text,
        job_sha256=job.meaning_sha256,
        argv=tuple(sys.argv),
        status=RunStatus.RUNNING,
        started_at=now,
        points_total=len(plan.points),
        baseline=job.baseline,
        cluster="",
        host=socket.gethostname(),
        versions=package_versions(),
        git_commit=git_commit(Path.cwd()),
        environment=measured_variables(),
        tags=tags,
    )


def _tags(given: tuple[str, ...]) -> dict[str, str]:
    tags = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--tag {text}: expected KEY=VALUE, as in --tag driver=580.159")
        tags[key] = value
    return tags


def _print_result(output: Path, run: Run, as_json: bool) -> None:
    from raybench.cli.results import print_report

    print_report(output, run.run_id, "json" if as_json else "terminal")
