"""`raybench sweep`: run a job on a cluster, keep every point, print the report."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from raybench.cli.options import (
    address_option,
    complete_run,
    device_option,
    devices_option,
    json_option,
    make_target,
    output_option,
    overrides_option,
    shared_option,
    wait_option,
)
from raybench.errors import UsageError
from raybench.results.reader import RunStatus
from raybench.sweep import command

if TYPE_CHECKING:
    from raybench.job.model import Job
    from raybench.job.plan import Plan
    from raybench.sweep.run_state import RunState, RunTarget

_EXIT_CODES = {RunStatus.OK: 0, RunStatus.FAILED: 1, RunStatus.INTERRUPTED: 130}
# The options that a command to resume must have again.
_REPEATED = (
    "address",
    "device",
    "overrides",
    "expression",
    "retry_failed",
    "profile_expression",
    "wait_s",
    "shared",
    "devices_file",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments and options of `raybench sweep`, by their names; None for those not given.

    job: the path of the job file, or the arguments of the script. The options that say where it
    runs are in a `RunTarget`.
    """

    job: tuple[str, ...]
    script: str | None
    world_sizes: str
    items_per_step: str
    output: Path
    overrides: tuple[str, ...]
    expression: str | None
    resumed: str | None
    retry_failed: bool
    profile_expression: str | None
    tags: Mapping[str, str]
    dry_run: bool
    as_json: bool


def _read_tags(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Return the tags as a dict. Raises UsageError for one that is not KEY=VALUE."""
    tags = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--tag {text}: expected KEY=VALUE, as in --tag driver=580.159")
        tags[key] = value
    return tags


@click.command("sweep")
@click.argument("job", metavar="[JOB]", nargs=-1, type=click.Path())
@click.option(
    "--script",
    metavar="FILE",
    type=click.Path(),
    help="In place of JOB: measure this training script, unchanged; its arguments stand behind --.",
)
@click.option(
    "--world-size",
    "world_sizes",
    metavar="N,N",
    default="1",
    help="With --script: the numbers of ranks.",
)
@click.option(
    "--items-per-step",
    metavar="N",
    default="",
    help="With --script: samples of an iteration on one rank, for the throughput.",
)
@address_option(
    "The Ray cluster. auto: the one of RAY_ADDRESS or of this host, else a private one. "
    "local: always a private one."
)
@device_option("The devices to measure. auto: GPUs where the cluster has any, else CPU workers.")
@wait_option
@shared_option
@devices_option(" A resumed run keeps to those that it had.")
@output_option
@overrides_option
@click.option(
    "--filter", "expression", metavar="EXPR", help="Run only the points for which EXPR is true."
)
@click.option(
    "--resume",
    "resumed",
    metavar="RUN",
    shell_complete=complete_run,
    help="Continue RUN of the output folder, with its own --set: run its unfinished and lost "
    "points.",
)
@click.option(
    "--retry-failed", is_flag=True, help="With --resume: also run the failed points again."
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
    callback=_read_tags,
    metavar="K=V",
    help="A tag to store with the run; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@json_option
@click.pass_context
def sweep_command(ctx: click.Context, /, **given: Any) -> None:
    """Run JOB and print its report. Each point becomes a row, also where it fails.

    \b
    raybench sweep jobs/ddp_scaling.yaml --address auto --tag driver=580.159
    raybench sweep jobs/ddp_scaling.yaml --device cpu --set matrix.world_size=1,2
    raybench sweep jobs/ddp_scaling.yaml --resume latest --set measure.rounds=3
    raybench sweep jobs/ddp_scaling.yaml --profile "world_size == 4"
    raybench sweep --script train.py --world-size 1,2,4 -- --batch-size 64

    EXPR compares settings of a point, as in "world_size > 1 and precision == 'bf16'".

    Exit code: 0 all points ok or skipped, 1 a point failed, 2 a mistake in the job or the command,
    3 no cluster or none that fits, 130 interrupted.
    """
    # Here, so that neither --help nor the Tab key waits for them.
    from raybench.cli.plans import print_plan, select, select_ids
    from raybench.job.plan import make_plan
    from raybench.sweep.run_state import start_run

    asked = Asked(**{name: given[name] for name in Asked.__dataclass_fields__})
    if asked.retry_failed and asked.resumed is None:
        raise UsageError("--retry-failed: goes with --resume RUN only")
    job = _load_job(ctx, asked)
    # Of a run to resume all points, whatever the filter.
    plan = select(make_plan(job), asked.expression if asked.resumed is None else None)
    profiled = asked.profile_expression
    where = make_target(given, select_ids(plan, profiled, "--profile") if profiled else frozenset())
    if asked.resumed is not None:
        ctx.exit(_resume(ctx, asked, job, plan, where))
    if asked.dry_run:
        print_plan(job, plan, asked.as_json)
        return
    _check_output(asked.output)
    start = start_run(
        job,
        plan,
        # Not sys.argv[0]: where the program lies says nothing of the run.
        argv=("raybench", *sys.argv[1:]),
        tags=asked.tags,
        resume_command=lambda run_id: _resume_command(ctx, asked, run_id, asked.output),
    )
    ctx.exit(_run(job, start, where, asked.as_json))


def _check_output(output: Path) -> None:
    """Raise UsageError for a folder that a Ray job throws away, or that cannot be written."""
    from raybench.results.writer import check_writable

    # Set by `ray job submit`; with --working-dir the job runs in a copy below Ray's scratch folder.
    ray_job = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
    if '"working_dir"' in ray_job and not output.is_absolute():
        raise UsageError(
            f"--output {output}: a Ray job's working directory is thrown away; give an absolute "
            "path that outlives the job, as in --output /shared/results"
        )
    check_writable(output)


def _load_job(ctx: click.Context, asked: Asked) -> Job:
    """Return the job of the file or the script, with the `--set` values of a run to resume.

    Raises UsageError where there is none or more than one, and JobError for mistakes in it.
    """
    from raybench.job.model import load_job
    from raybench.job.source import overrides_in
    from raybench.results import reader

    overrides = asked.overrides
    if asked.resumed is not None:
        # A run goes on with its own settings, and with others beside them or in place of them.
        root, run_id = reader.find_run(asked.output, asked.resumed)
        overrides = (*overrides_in(reader.read_run(root, run_id).argv), *overrides)
    if asked.script is not None:
        return _load_script_job(asked.script, asked, overrides)
    if asked.world_sizes != "1" or asked.items_per_step:
        raise UsageError("--world-size and --items-per-step: go with --script; a job has them")
    if not asked.job:
        raise click.MissingParameter(ctx=ctx, param_hint="'JOB'", param_type="argument")
    if len(asked.job) > 1:
        raise UsageError(
            f"one JOB only, given also {asked.job[1]}; arguments of a script go with --script"
        )
    return load_job(Path(asked.job[0]), overrides)


def _load_script_job(script: str, asked: Asked, overrides: Sequence[str]) -> Job:
    """Return the job that `--script` and its options stand for.

    Raises UsageError for world sizes that are no numbers, and JobError for other mistakes, which
    names the option that has it.
    """
    from raybench.job.catalog import name_after
    from raybench.job.model import job_from_text

    sizes = asked.world_sizes.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise UsageError(f"--world-size {asked.world_sizes}: must be counts of ranks, as in 1,2,4")
    arguments = shlex.join(asked.job)
    workload = {"kind": "script", "path": script, "args": arguments}
    if asked.items_per_step:
        workload["items_per_step"] = asked.items_per_step
    # JSON is YAML.
    text = (
        "version: 1\n"
        f"name: {json.dumps(name_after(Path(script), 'script'))}\n"
        f"workload: {json.dumps(workload, ensure_ascii=False)}\n"
        f"matrix: {{world_size: [{', '.join(str(int(size)) for size in sizes)}]}}\n"
    )
    name = f"--script {script}"
    return job_from_text(
        name,
        text,
        overrides,
        {
            ("workload", "path"): name,
            ("workload", "args"): f"{name} -- {arguments}",
            ("workload", "items_per_step"): f"--items-per-step {asked.items_per_step}",
            ("matrix", "world_size"): f"--world-size {asked.world_sizes}",
        },
    )


def _with_overrides(argv: Sequence[str], overrides: Sequence[str]) -> tuple[str, ...]:
    """Add the `--set` values that a command lacks, in front of the arguments of a script."""
    from raybench.job.source import overrides_in

    new = [f"--set={one}" for one in overrides if one not in overrides_in(argv)]
    end = argv.index("--") if "--" in argv else len(argv)
    return (*argv[:end], *new, *argv[end:])


def _resume(ctx: click.Context, asked: Asked, job: Job, plan: Plan, where: RunTarget) -> int:
    """Go on with the run that `--resume` names; the exit code."""
    from raybench.cli.output import make_console, say
    from raybench.cli.plans import print_plan, select_ids
    from raybench.results.writer import clear_leftovers, hold_run
    from raybench.sweep.run_state import (
        check_code,
        code_of_job,
        devices_of_run,
        nothing_left,
        plan_of_run,
        resume_run,
        rounds_of_job,
        run_to_resume,
    )

    assert asked.resumed is not None
    output, run = run_to_resume(asked.output, asked.resumed, job)
    code = code_of_job(job)
    check_code(run, code)
    with hold_run(output, run.run_id):
        plan = plan_of_run(plan, output, run.run_id)
        start = resume_run(
            run,
            rounds_of_job(job, plan),
            output,
            select_ids(plan, asked.expression),
            _resume_command(ctx, asked, run.run_id, output),
            code,
            retry_failed=asked.retry_failed,
            tags=asked.tags,
        )
        argv = _with_overrides(run.argv, asked.overrides)
        start = replace(start, run=replace(start.run, argv=argv))
        if asked.dry_run:
            if not start.todo:
                say(make_console(), nothing_left(start))
            if start.todo or asked.as_json:
                print_plan(job, start.left, asked.as_json)
            return 0
        clear_leftovers(output, run.run_id)
        only = where.only or devices_of_run(run)
        return _run(job, start, replace(where, output=output, only=only), asked.as_json)


def _run(job: Job, start: RunState, where: RunTarget, as_json: bool) -> int:
    """Carry out the run and print its report; the exit code."""
    from raybench.cli.output import ConsoleListener, make_console, say, write_document
    from raybench.cli.results import load_summary
    from raybench.report.run_report import RunReport
    from raybench.sweep.run_state import end_of_run, nothing_left
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
        summary = load_summary(where.output, run.run_id)
        report = RunReport(summary=summary, is_short=not as_json)
        write_document(report, "json" if as_json else "terminal")
    return _EXIT_CODES[run.status]


def _resume_command(ctx: click.Context, asked: Asked, run_id: str, output: Path) -> str:
    """Return the command that goes on with this run, with the options that were given."""
    words = ["sweep"]
    if asked.script is None:
        words += asked.job
    else:
        words += ["--script", asked.script, "--world-size", asked.world_sizes]
        if asked.items_per_step:
            words += ["--items-per-step", asked.items_per_step]
    words += ["--resume", run_id]
    if output != Path("results"):
        words += ["-o", str(output)]
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        if option.name not in _REPEATED or source is not ParameterSource.COMMANDLINE:
            continue
        given = ctx.params[option.name]
        for value in given if isinstance(given, tuple) else (given,):
            words += [option.opts[-1]] if value is True else [option.opts[0], str(value)]
    if asked.script is not None and asked.job:
        words += ["--", *asked.job]
    return command(*words)
