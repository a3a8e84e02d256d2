"""`raybench sweep`: run a job on a cluster, keep every point, print the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from raybench.cli.options import (
    address_option,
    complete_run,
    device_option,
    devices_option,
    output_option,
    overrides_option,
    shared_option,
    wait_option,
)
from raybench.cli.sweep_job import ScriptGiven, load_script_job, plan_again
from raybench.errors import UsageError
from raybench.results.run import RunStatus
from raybench.sweep.messages import command

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
    "again",
    "only",
    "against",
    "retry_failed",
    "profile_expression",
    "wait_s",
    "shared",
    "devices_file",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments and options of `raybench sweep`, by their names; None for those not given."""

    job: tuple[str, ...]
    script: str | None
    world_sizes: str
    items_per_step: str
    address: str
    device: Literal["auto", "cuda", "cpu"]
    wait_s: float
    shared: bool
    devices_file: Path | None
    output: Path
    overrides: tuple[str, ...]
    expression: str | None
    resumed: str | None
    retry_failed: bool
    again: str | None
    only: str | None
    against: str | None
    profile_expression: str | None
    tags: Mapping[str, str]
    dry_run: bool
    as_json: bool

    def check(self) -> None:
        """Raise UsageError for options that do not go together."""
        if self.retry_failed and self.resumed is None:
            raise UsageError("--retry-failed: goes with --resume RUN only")

    @property
    def job_file(self) -> Path | None:
        """The job file; None where there is none. Raises UsageError for more than one."""
        if self.script is not None:
            return None
        if len(self.job) > 1:
            raise UsageError(
                f"one JOB only, given also {self.job[1]}; arguments of a script go with --script"
            )
        return Path(self.job[0]) if self.job else None

    @property
    def script_given(self) -> ScriptGiven | None:
        """The script and its options; None without --script.

        Raises UsageError for options of a script that are given without --script.
        """
        if self.script is not None:
            return ScriptGiven(
                path=self.script,
                arguments=self.job,
                world_sizes=self.world_sizes,
                items_per_step=self.items_per_step,
            )
        if self.world_sizes != "1" or self.items_per_step:
            raise UsageError("--world-size and --items-per-step: go with --script; a job has them")
        return None


def _read_tags(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
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
    callback=_read_tags,
    metavar="K=V",
    help="A tag to store with the run; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of the report."
)
@click.pass_context
def sweep_command(ctx: click.Context, /, **given: Any) -> None:
    """Run JOB and print its report. Each point becomes a row, also where it fails.

    \b
    raybench sweep --script train.py --world-size 1,2,4 -- --batch-size 64
    raybench sweep jobs/ddp_scaling.yaml --address auto --tag driver=580.159
    raybench sweep jobs/ddp_scaling.yaml --device cpu --set matrix.world_size=1,2
    raybench sweep jobs/ddp_scaling.yaml --resume latest --set measure.rounds=3
    raybench sweep --again latest --only unclear
    raybench sweep jobs/ddp_scaling.yaml --profile "world_size == 4"

    EXPR compares settings of a point, as in "world_size > 1 and precision == 'bf16'".

    Exit code: 0 all points ok or skipped, 1 a point failed, 2 a mistake in the job or the command,
    3 no cluster or none that fits, 130 interrupted.
    """
    # Here, so that neither --help nor the Tab key waits for them.
    from raybench.cli.plans import print_plan
    from raybench.results.writer import check_writable
    from raybench.sweep.run_state import start_run

    asked = Asked(**given)
    asked.check()
    job, plan = _load_asked(ctx, asked)
    where = _target(asked, plan)
    if asked.resumed is not None:
        ctx.exit(_resume(ctx, asked, job, plan, where))
    if asked.dry_run:
        print_plan(job, plan, asked.as_json)
        return
    if missing := job.missing_module:
        raise job.error([missing])
    _check_kept(asked.output)
    check_writable(asked.output)
    start = start_run(
        job,
        plan,
        # Not sys.argv[0]: where the program lies says nothing of the run.
        argv=(
            "raybench",
            *sys.argv[1:],
            # The job file alone would not tell what was set in the run.
            *(f"--set={one}" for one in _overrides_of(asked.output, asked.again)),
        ),
        tags=asked.tags,
        resume_command=lambda run_id: _resume_command(ctx, asked, run_id, asked.output),
    )
    ctx.exit(_run(job, start, where, asked.as_json))


def _target(asked: Asked, plan: Plan) -> RunTarget:
    """Say where the run is carried out, and what of a plan is profiled. Raises UsageError."""
    from raybench.cli.plans import select_ids
    from raybench.records.device_list import read_device_list
    from raybench.sweep.run_state import RunTarget

    profiled: frozenset[str] = frozenset()
    if asked.profile_expression is not None:
        profiled = select_ids(plan, asked.profile_expression, "--profile")
    return RunTarget(
        address=asked.address,
        device=asked.device,
        output=asked.output,
        profiled=profiled,
        wait_s=asked.wait_s,
        shared=asked.shared,
        only=read_device_list(asked.devices_file) if asked.devices_file else None,
    )


def _load_asked(ctx: click.Context, asked: Asked) -> tuple[Job, Plan]:
    """Load the job of the command and make its points; of a run to resume all, whatever the filter.

    Raises UsageError.
    """
    from raybench.cli.plans import load_plan, select
    from raybench.job.plan import make_plan

    expression = asked.expression if asked.resumed is None else None
    # A run goes on with its own settings, and with others beside them or in place of them.
    overrides = (*_overrides_of(asked.output, asked.resumed), *asked.overrides)
    script = asked.script_given
    if script is not None:
        if asked.again or asked.only or asked.against:
            raise UsageError("--again, --only and --against: do not go with --script")
        job = load_script_job(script, overrides)
        return job, select(make_plan(job), expression)
    if asked.again is None:
        if asked.only or asked.against:
            raise UsageError("--only and --against: go with --again RUN only")
        if asked.job_file is None:
            raise click.MissingParameter(ctx=ctx, param_hint="'JOB'", param_type="argument")
        return load_plan(asked.job_file, overrides, expression)
    if asked.job_file is not None or asked.resumed or asked.overrides:
        raise UsageError("--again RUN: has its job; give no JOB, --set or --resume")
    if asked.against and not asked.only:
        raise UsageError("--against BASE: goes with --only unclear")
    job, plan = plan_again(asked.output, asked.again, asked.only, asked.against)
    return job, select(plan, expression)


def _overrides_of(output: Path, run: str | None) -> list[str]:
    """Return the `--set` values of a run; none without one. Raises ResultsError for no such run."""
    if run is None:
        return []
    from raybench.job.source import overrides_in
    from raybench.results import reader

    root, run_id = reader.find_run(output, run)
    return overrides_in(reader.read_run(root, run_id).argv)


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
    from raybench.results.lock import hold_run
    from raybench.results.writer import clear_leftovers
    from raybench.sweep.resume import (
        check_code,
        devices_of_run,
        nothing_left,
        plan_of_run,
        resume_run,
        run_to_resume,
    )
    from raybench.sweep.run_state import code_of_job, rounds_of_job

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
    from raybench.cli.output import ConsoleListener, make_console, say
    from raybench.cli.results import print_report
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


def _resume_command(ctx: click.Context, asked: Asked, run_id: str, output: Path) -> str:
    """Write the command that goes on with this run, with the options that were given."""
    script = asked.script_given
    job = script.options if script else [str(asked.job_file)]
    words = ["sweep", *job, "--resume", run_id]
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
    return command(*words, *(["--", *script.arguments] if script and script.arguments else []))


def _check_kept(output: Path) -> None:
    """Refuse a folder that a Ray job throws away. Raises UsageError."""
    # Set by `ray job submit`; with --working-dir the job runs in a copy below Ray's scratch folder.
    job = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
    if '"working_dir"' in job and not output.is_absolute():
        raise UsageError(
            f"--output {output}: a Ray job's working directory is thrown away; give an absolute "
            "path that outlives the job, as in --output /shared/results"
        )
