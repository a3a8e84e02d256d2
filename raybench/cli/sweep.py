"""`raybench sweep`: run a job on a cluster, keep every point, print the report."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from click.core import ParameterSource

from raybench.cli.completion import complete_run
from raybench.cli.options import overrides_option
from raybench.environment import git_commit, package_versions, variables_that_matter
from raybench.errors import UsageError
from raybench.results.run import Run, RunStatus
from raybench.sweep.commands import command

if TYPE_CHECKING:
    from raybench.job.model import Job
    from raybench.job.plan import Plan
    from raybench.records.sources import Code
    from raybench.sweep.rounds import Rounds
    from raybench.sweep.run_state import RunState, RunTarget

_LONGEST_WAIT_S = 1_000_000.0
_EXIT_CODES = {RunStatus.OK: 0, RunStatus.FAILED: 1, RunStatus.INTERRUPTED: 130}
# The options that a command to resume must have again.
_REPEATED = (
    "address",
    "device",
    "overrides",
    "expression",
    "again",
    "only",
    "against",
    "retry_failed",
    "profile_expression",
    "wait_s",
    "shared",
)


def _check_wait(_: click.Context, __: click.Parameter, wait_s: float) -> float:
    # Nothing is above or below NaN: it fails this test, and passes that of click's ranges.
    if not 0 <= wait_s <= _LONGEST_WAIT_S:
        raise UsageError(f"--wait {wait_s:g}: must be from 0 to {_LONGEST_WAIT_S:,.0f} seconds")
    return wait_s


@click.command("sweep", short_help="Run a job on a cluster and report how it scales.")
@click.argument("job_file", metavar="JOB", required=False, type=click.Path(path_type=Path))
@click.option(
    "--address",
    default="auto",
    show_default=True,
    metavar="auto|local|HOST:PORT",
    help="The Ray cluster. auto: the one of RAY_ADDRESS or of this host, else a private one. "
    "local: always a private one.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="The devices to measure. auto: GPUs where the cluster has any, else CPU workers.",
)
@click.option(
    "--wait",
    "wait_s",
    type=float,
    callback=_check_wait,
    default=0.0,
    metavar="SECONDS",
    help="How long to wait for devices: for other sweeps that use them to end, and for nodes that "
    "join late. Points that fit run meanwhile.",
)
@click.option(
    "--shared",
    is_flag=True,
    help="Measure beside other sweeps on the same devices; each row says who was there.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder for the result tables.",
)
@overrides_option
@click.option(
    "--filter", "expression", metavar="EXPR", help="Run only the points for which EXPR is true."
)
@click.option(
    "--resume",
    "resumed",
    metavar="RUN",
    shell_complete=complete_run,
    help="Continue RUN of the output folder: run its unfinished and lost points.",
)
@click.option(
    "--retry-failed", is_flag=True, help="With --resume: also run the failed points again."
)
@click.option(
    "--again",
    metavar="RUN",
    shell_complete=complete_run,
    help="In place of JOB: measure the points of RUN once more, as a new run.",
)
@click.option(
    "--only",
    type=click.Choice(["unclear"]),
    help="With --again: just the points that `raybench compare` calls unclear.",
)
@click.option(
    "--against",
    metavar="BASE",
    shell_complete=complete_run,
    help="With --only: the run that RUN is compared with; by default the one of its job before it.",
)
@click.option(
    "--profile",
    "profile_expression",
    metavar="EXPR",
    help="Also trace the points for which EXPR is true, after they are measured.",
)
@click.option(
    "--tag",
    "tags",
    multiple=True,
    metavar="K=V",
    help="A tag to store with the run; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of the report."
)
@click.pass_context
def sweep_command(
    ctx: click.Context,
    job_file: Path | None,
    address: str,
    device: Literal["auto", "cuda", "cpu"],
    wait_s: float,
    shared: bool,
    output: Path,
    overrides: tuple[str, ...],
    expression: str | None,
    resumed: str | None,
    retry_failed: bool,
    again: str | None,
    only: str | None,
    against: str | None,
    profile_expression: str | None,
    tags: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run JOB and print its report. Each point becomes a row, also where it fails.

    \b
    raybench sweep jobs/ddp_scaling.yaml --address auto --tag driver=580.159
    raybench sweep jobs/ddp_scaling.yaml --device cpu --set matrix.world_size=1,2
    raybench sweep jobs/ddp_scaling.yaml --resume latest
    raybench sweep --again latest --only unclear
    raybench sweep jobs/ddp_scaling.yaml --profile "world_size == 4"

    EXPR compares settings of a point, as in "world_size > 1 and precision == 'bf16'".

    Exit code: 0 all points ok or skipped, 1 a point failed, 2 a mistake in the job or the command,
    3 no cluster or none that fits, 130 interrupted.
    """
    # Here, so that neither --help nor the Tab key waits for them.
    from raybench.cli.plans import print_plan
    from raybench.results.writer import check_writable
    from raybench.sweep.run_state import RunTarget

    given_tags = _tags(tags)
    if retry_failed and resumed is None:
        raise UsageError("--retry-failed: goes with --resume RUN only")
    job, plan = _load_asked(ctx, None if resumed else expression)
    where = RunTarget(
        address=address,
        device=device,
        output=output,
        profiled=_choose_profiled(plan, profile_expression),
        wait_s=wait_s,
        shared=shared,
    )
    if resumed is not None:
        ctx.exit(_resume(ctx, job, plan, where, given_tags))
    if dry_run:
        print_plan(job, plan, as_json)
        return
    _check_kept(output)
    check_writable(output)
    start = _new_start(ctx, job, plan, given_tags)
    ctx.exit(_run(job, start, where, as_json))


def _load_asked(ctx: click.Context, expression: str | None) -> tuple[Job, Plan]:
    """The job of the command and its points. Raises UsageError."""
    from raybench.cli.again import plan_again
    from raybench.cli.plans import load_plan
    from raybench.job.filter import select_points

    given = ctx.params
    again, job_file = given["again"], given["job_file"]
    if again is None:
        if given["only"] or given["against"]:
            raise UsageError("--only and --against: go with --again RUN only")
        if job_file is None:
            raise click.MissingParameter(ctx=ctx, param=ctx.command.params[0])
        return load_plan(job_file, given["overrides"], expression)
    if job_file is not None or given["resumed"] or given["overrides"]:
        raise UsageError("--again RUN: has its job; give no JOB, --set or --resume")
    if given["against"] and not given["only"]:
        raise UsageError("--against BASE: goes with --only unclear")
    job, plan = plan_again(given["output"], again, given["only"], given["against"])
    points = plan.points if expression is None else select_points(plan.points, expression)
    return job, replace(plan, points=points)


def _resume(
    ctx: click.Context, job: Job, plan: Plan, where: RunTarget, tags: dict[str, str]
) -> int:
    """Go on with the run that `--resume` names; the exit code."""
    from raybench.cli.plans import print_plan
    from raybench.cli.stderr import make_console, say
    from raybench.results.cleanup import clear_leftovers
    from raybench.results.writer import hold_run
    from raybench.sweep.resume import (
        check_code,
        nothing_left,
        plan_of_run,
        resume_run,
        run_to_resume,
    )

    given = ctx.params
    output, run = run_to_resume(where.output, given["resumed"], job)
    code = _code(job)
    if warning := check_code(run, code):
        say(make_console(), f"{warning} (warning)")
    again = _resume_command(ctx, run.run_id, output)
    with hold_run(output, run.run_id):
        plan = plan_of_run(plan, output, run.run_id)
        chosen = _choose(plan, given["expression"])
        start = resume_run(
            run,
            _rounds(job, plan),
            output,
            chosen,
            again,
            code,
            retry_failed=given["retry_failed"],
            tags=tags,
        )
        if given["dry_run"]:
            if not start.todo:
                say(make_console(), nothing_left(start))
            if start.todo or given["as_json"]:
                print_plan(job, start.left, given["as_json"])
            return 0
        clear_leftovers(output, run.run_id)
        return _run(job, start, replace(where, output=output), given["as_json"])


def _run(job: Job, start: RunState, where: RunTarget, as_json: bool) -> int:
    """Carry the run out, print its report; the exit code."""
    from raybench.cli.listener import ConsoleListener
    from raybench.cli.results import print_report
    from raybench.cli.stderr import make_console, say
    from raybench.sweep.resume import end_of_run, nothing_left
    from raybench.sweep.runner import run_sweep

    console = make_console()
    for warning in start.plan.warnings:
        say(console, f"{warning} (warning)")
    if start.todo:
        run = run_sweep(job, start, where, ConsoleListener(console))
    else:
        say(console, nothing_left(start))
        run = end_of_run(start, where.output, job.measure)
    if as_json or run.points_ok + run.points_failed + run.points_skipped:
        print_report(where.output, run.run_id, "json" if as_json else "terminal")
    return _EXIT_CODES[run.status]


def _resume_command(ctx: click.Context, run_id: str, output: Path) -> str:
    """What to type to go on with this run: the options as they were given, as far as they count."""
    words = ["sweep", str(ctx.params["job_file"]), "--resume", run_id]
    if ctx.params["again"]:
        # What is unclear is asked again; what is measured by then is a repeat.
        words = ["sweep"]
    if output != Path("results"):
        words += ["-o", str(output)]
    for option in ctx.command.params:
        if (
            option.name not in _REPEATED
            or ctx.get_parameter_source(option.name) is not ParameterSource.COMMANDLINE
        ):
            continue
        given = ctx.params[option.name]
        for value in given if isinstance(given, tuple) else (given,):
            words += [option.opts[-1]] if value is True else [option.opts[0], str(value)]
    return command(*words)


def _new_start(ctx: click.Context, job: Job, plan: Plan, tags: dict[str, str]) -> RunState:
    from raybench.sweep.loop import Before
    from raybench.sweep.run_state import RunState

    code = _code(job)
    run = _new_run(job, plan, tags, code)
    if ctx.params["again"]:
        run = replace(run, argv=(*run.argv, *_overrides_of(ctx)))
    return RunState(
        run=run,
        code=code,
        rounds=replace(_rounds(job, plan), seed=run.seed or 0),
        before=Before(),
        is_resumed=False,
        resume_command=_resume_command(ctx, run.run_id, ctx.params["output"]),
    )


def _overrides_of(ctx: click.Context) -> tuple[str, ...]:
    """What was set in the run that is measured again: the job file alone does not tell it."""
    from raybench.results import reader
    from raybench.sweep.resume import overrides_in

    root, run_id = reader.find_run(ctx.params["output"], ctx.params["again"])
    argv = reader.read_run(root, run_id).argv
    return tuple(word for value in overrides_in(argv) for word in ("--set", value))


def _rounds(job: Job, plan: Plan) -> Rounds:
    from raybench.sweep.rounds import Rounds

    has_controls = job.placement.isolation == "cluster"
    return Rounds(plan=plan, count=job.measure.rounds, has_controls=has_controls)


def _choose(plan: Plan, expression: str | None) -> frozenset[str]:
    """The point_ids that `--filter` keeps. Raises UsageError."""
    from raybench.job.filter import select_points

    points = plan.points if expression is None else select_points(plan.points, expression)
    return frozenset(point.point_id for point in points)


def _code(job: Job) -> Code:
    """The sources of the job's workload, which is imported, and of raybench."""
    from raybench.job.registry import module_of
    from raybench.records.sources import code_of

    return code_of(module_of(job.workload.kind))


def _new_run(job: Job, plan: Plan, tags: dict[str, str], code: Code) -> Run:
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
        seed=secrets.randbits(31),
        cluster="",
        host=socket.gethostname(),
        versions=package_versions(),
        git_commit=git_commit(Path.cwd()),
        workload_sha256=code.workload_sha256,
        raybench_sha256=code.raybench_sha256,
        workload_files=code.workload,
        environment=variables_that_matter(),
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


def _choose_profiled(plan: Plan, expression: str | None) -> frozenset[str]:
    """The point_ids that `--profile` means. Raises UsageError."""
    if expression is None:
        return frozenset()
    from raybench.job.filter import select_points

    return frozenset(p.point_id for p in select_points(plan.points, expression, "--profile"))


def _tags(given: tuple[str, ...]) -> dict[str, str]:
    tags = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--tag {text}: expected KEY=VALUE, as in --tag driver=580.159")
        tags[key] = value
    return tags
