"""`raybench sweep`: run a job on a cluster, keep every point, print the report."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from rich.console import Console

from raybench.cli.interrupts import interrupt_held_back
from raybench.environment import git_commit, measured_variables, package_versions
from raybench.errors import ClusterError, RaybenchError, UsageError
from raybench.records import Record, Run, RunStatus, Status

if TYPE_CHECKING:
    from raybench.cluster import Cluster
    from raybench.job import Job
    from raybench.plan import Plan
    from raybench.store import RunStore
    from raybench.sweep import SweepSettings

_EXIT_CODES = {RunStatus.OK: 0, RunStatus.FAILED: 1, RunStatus.INTERRUPTED: 130}


@dataclass(frozen=True, slots=True)
class _Where:
    """Where a run is carried out, where its tables go, and the point_ids to profile."""

    address: str
    device: Literal["auto", "cuda", "cpu"]
    output: Path
    profiled: frozenset[str]


@click.command("sweep", short_help="Run a job on a cluster and report how it scales.")
@click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path))
@click.option(
    "--address",
    default="auto",
    show_default=True,
    metavar="auto|local|HOST:PORT",
    help="The Ray cluster: auto joins RAY_ADDRESS or one running on this host, else starts "
    "a private one; local always starts a private one.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="What a worker owns: auto takes GPUs where the cluster has any.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="The folder that takes the result tables.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a job setting; may be repeated.",
)
@click.option(
    "--filter", "expression", metavar="EXPR", help="Run only the points for which EXPR holds."
)
@click.option(
    "--profile",
    "profile_expression",
    metavar="EXPR",
    help="Trace the points for which EXPR holds, after they are measured.",
)
@click.option(
    "--tag", "tags", multiple=True, metavar="K=V", help="Stored with the run; may be repeated."
)
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
    profile_expression: str | None,
    tags: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run JOB: every point of it becomes a row in the results, whatever happens to it.

    \b
    raybench sweep jobs/ddp_scaling.yaml --address auto --tag driver=580.159
    raybench sweep jobs/ddp_scaling.yaml --device cpu --set matrix.world_size=1,2
    raybench sweep jobs/ddp_scaling.yaml --profile "world_size == 4 and precision == 'bf16'"

    Exit code: 0 all points ok or skipped, 1 a point failed, 2 a mistake in the job or the command,
    3 no cluster or none that fits, 130 interrupted.
    """
    from raybench.cli.jobs import load_plan, print_plan
    from raybench.cli.results import print_report
    from raybench.store import check_writable

    given_tags = _tags(tags)
    job, plan = load_plan(job_file, overrides, expression)
    profiled = _profiled(plan, profile_expression)
    if dry_run:
        print_plan(job, plan, as_json)
        return
    run = _new_run(job, plan, given_tags)
    _check_kept(output)
    check_writable(output)
    console = Console(stderr=True)
    for warning in plan.warnings:
        console.print(f"{warning} (warning)", markup=False, highlight=False, soft_wrap=True)
    run = _carried_out(job, plan, run, _Where(address, device, output, profiled), console)
    if as_json or run.points_ok + run.points_failed + run.points_skipped:
        print_report(output, run.run_id, "json" if as_json else "terminal")
    ctx.exit(_EXIT_CODES[run.status])


def _carried_out(job: Job, plan: Plan, run: Run, where: _Where, console: Console) -> Run:
    """Run the plan on a cluster; the run as it ended. Raises ClusterError and ResultsError."""
    from raybench.cluster.ray_cluster import RayCluster
    from raybench.cluster.ray_connection import connect
    from raybench.scheduler import workers_needed
    from raybench.store import RunStore
    from raybench.sweep import SweepSettings

    biggest = max(point.world_size for point in plan.points)
    with ExitStack() as at_the_end:
        with console.status("connecting to Ray"), interrupt_held_back():
            cluster = RayCluster(connect(where.address, where.device, biggest))
            at_the_end.callback(cluster.close)
        told = f"{cluster.description}; run {run.run_id} in {where.output}"
        console.print(told, markup=False, highlight=False, soft_wrap=True)
        workers = workers_needed(plan, cluster.capacity)
        if not workers:
            smallest = min(point.world_size for point in plan.points)
            raise ClusterError(
                f"no point fits: the smallest needs {smallest} devices, the cluster has "
                f"{cluster.capacity}; set matrix.world_size with --set, or use a bigger cluster"
            )
        run = replace(run, cluster=cluster.description)
        store = RunStore.create(where.output, run, job.measure)
        settings = SweepSettings(
            measure=job.measure,
            strategy=job.placement.strategy,
            stop_on_error=job.on_error == "stop",
            profiled=where.profiled,
        )
        return _recorded(settings, plan, run, cluster, workers, store, console)


def _recorded(
    settings: SweepSettings,
    plan: Plan,
    run: Run,
    cluster: Cluster,
    workers: int,
    store: RunStore,
    console: Console,
) -> Run:
    """The run from its first worker to its last point; however it ends, its row says so."""
    ended: Counter[Status] = Counter()
    status = RunStatus.FAILED
    try:
        with console.status(f"starting {_workers(workers)}"):
            cluster.start(workers, settings.strategy)
        store.write_devices(cluster.devices)
        _swept(settings, plan, cluster, store, console, ended)
        status = RunStatus.FAILED if _failed(ended) else RunStatus.OK
    except KeyboardInterrupt:
        # The point in flight has its row already.
        status = RunStatus.INTERRUPTED
        _tell_kept("interrupted", _finished(ended), store, console)
    except RaybenchError:
        _tell_kept("stopped", _finished(ended), store, console)
        raise
    finally:
        run = replace(
            run,
            status=status,
            finished_at=datetime.now(UTC),
            points_ok=ended[Status.OK],
            points_skipped=ended[Status.SKIPPED],
            points_failed=_failed(ended),
        )
        store.write_run(run)
        _tell_traces(store, console)
    return run


def _swept(
    settings: SweepSettings,
    plan: Plan,
    cluster: Cluster,
    store: RunStore,
    console: Console,
    ended: Counter[Status],
) -> None:
    """The loop over the points, with its progress; `ended` counts the rows that are written."""
    from raybench.cli.progress import make_progress
    from raybench.sweep import sweep

    def write(index: int, record: Record) -> None:
        store.write_record(index, record)
        ended[record.status] += 1
        store.write_telemetry(index, record, cluster.telemetry())

    with make_progress(plan, console) as progress:
        for event in sweep(plan, settings, cluster, write):
            progress.show(event)


def _failed(ended: Counter[Status]) -> int:
    return _finished(ended) - ended[Status.OK] - ended[Status.SKIPPED]


def _finished(ended: Counter[Status]) -> int:
    """All but the point that an interrupt cut short."""
    return ended.total() - ended[Status.CANCELLED]


def _tell_kept(what: str, finished: int, store: RunStore, console: Console) -> None:
    text = f"{what} before any point finished"
    if finished:
        points = "point is" if finished == 1 else "points are"
        text = (
            f"{what}: {finished} finished {points} kept; "
            f"see: raybench report {store.run_id} --results {store.root}"
        )
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _tell_traces(store: RunStore, console: Console) -> None:
    if store.traces.is_dir():
        text = f"traces: {store.traces} (open them in ui.perfetto.dev or chrome://tracing)"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"


def _new_run(job: Job, plan: Plan, tags: dict[str, str]) -> Run:
    now = datetime.now(UTC)
    return Run(
        run_id=f"{job.name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        job_name=job.name,
        job_text=job.text,
        job_sha256=job.meaning_sha256,
        # Not sys.argv[0]: where the program lies says nothing of the run.
        argv=("raybench", *sys.argv[1:]),
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


def _check_kept(output: Path) -> None:
    """Refuse a folder that a Ray job throws away. Raises UsageError."""
    # Set by `ray job submit`; with --working-dir the job runs in a copy below Ray's scratch folder.
    job = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
    if '"working_dir"' in job and not output.is_absolute():
        raise UsageError(
            f"--output {output}: a Ray job's working directory is thrown away; give an absolute "
            "path that outlives the job, as in --output /shared/results"
        )


def _profiled(plan: Plan, expression: str | None) -> frozenset[str]:
    """The point_ids that `--profile` means. Raises UsageError."""
    if expression is None:
        return frozenset()
    from raybench.select import select_points

    return frozenset(p.point_id for p in select_points(plan.points, expression, "--profile"))


def _tags(given: tuple[str, ...]) -> dict[str, str]:
    tags = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--tag {text}: expected KEY=VALUE, as in --tag driver=580.159")
        tags[key] = value
    return tags
