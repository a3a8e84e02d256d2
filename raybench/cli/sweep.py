"""`raybench sweep` and `plan`: run a job on a cluster, or list its points without one."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from raybench.api.files import check_outlives_job
from raybench.cli.shared import (
    address_option,
    complete_run,
    device_option,
    devices_option,
    json_option,
    json_text,
    make_console,
    make_target,
    output_option,
    overrides_option,
    say,
    scalar_text,
    shared_option,
    table_text,
    text_width,
    wait_option,
    write_document,
    write_result,
)
from raybench.errors import UsageError
from raybench.records.status import RunStatus
from raybench.report.formatting import command, counted, printable

if TYPE_CHECKING:
    from rich.console import Console

    from raybench.job.model import BatchSearch, Job, Measure
    from raybench.job.plan import Plan
    from raybench.job.problems import KeyPath
    from raybench.records.device import DeviceKind
    from raybench.sweep.run_state import RunState, RunTarget


_EXIT_CODES = {RunStatus.OK: 0, RunStatus.FAILED: 1, RunStatus.INTERRUPTED: 130}
# Options that the command to resume must repeat.
_OPTIONS_TO_REPEAT = (
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


def _read_tags(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Return the tags of `--tag KEY=VALUE` as a dict."""
    tags = {}
    for text in texts:
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
    help="In place of JOB: measure this training script, unchanged; its arguments follow after --.",
)
@click.option(
    "--world-size",
    "world_sizes",
    metavar="N,N",
    default="1",
    help="With --script: the numbers of ranks; by default 1.",
)
@click.option(
    "--items-per-step",
    metavar="N",
    default="",
    help="With --script: samples of an iteration on one rank, for the throughput.",
)
@address_option(
    help="The Ray cluster. auto: the cluster of RAY_ADDRESS or of this host, else a private Ray. "
    "local: always a private Ray."
)
@device_option(help="The devices to measure. auto: GPUs if the cluster has any, else CPU workers.")
@wait_option
@shared_option
@devices_option
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
    help="Continue RUN of the output folder, with its own --set and devices: run its unfinished, "
    "skipped and lost points.",
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

    Exit code: 0 all points ok or skipped (or out of memory in a batch search), 1 a point failed, 2
    a bad job, command or results folder, 3 no cluster that fits, a cluster that is gone, or devices
    in use, 130 interrupted.
    """
    # Import late, so that --help and completion are fast.
    from raybench.job.plan import make_plan

    resumed_run = given["resumed"]
    if given["retry_failed"] and resumed_run is None:
        raise UsageError("--retry-failed: goes with --resume RUN only")
    console = make_console()
    job, device = _load_job(ctx, given, console)
    # Import after the first line of progress, which must not wait for pyarrow.
    from raybench.results.writer import check_writable
    from raybench.sweep.run_state import start_run

    # To resume, filter later: first the points of the run are compared with the whole plan.
    plan = _select(make_plan(job), given["expression"] if resumed_run is None else None)
    profiled_ids: frozenset[str] = frozenset()
    if given["profile_expression"] is not None:
        profiled_ids = _select_ids(plan, given["profile_expression"], "--profile")
    target = make_target({**given, "device": device}, profiled_ids)
    if resumed_run is not None:
        ctx.exit(_resume(ctx, job, plan, target))
    if given["dry_run"]:
        _print_plan(job, plan, given["as_json"])
        return
    _check_packages(job, given["address"])
    check_outlives_job(target.output)
    check_writable(target.output)
    _say_estimate(console, job, plan, job.measure.rounds * len(plan.points))
    run_state = start_run(
        job,
        plan,
        # Without sys.argv[0], which is a path of this machine.
        argv=("raybench", *sys.argv[1:]),
        tags=given["tags"],
        resume_command=lambda run_id: _resume_command(ctx, run_id, target.output),
    )
    ctx.exit(_run(job, run_state, target, given["as_json"]))


def _load_job(
    ctx: click.Context, given: Mapping[str, Any], console: Console
) -> tuple[Job, Literal["auto", "cuda", "cpu"]]:
    """Return the job and which devices to measure, and print what its section `cpu` replaces."""
    from raybench.job.loading import job_of_source
    from raybench.job.source import overrides_in, read_source
    from raybench.report.words.sweep import replaced_by_cpu

    # `words` is the path of the job; with --script, the arguments of the script.
    overrides, words, run = given["overrides"], given["job"], None
    if given["resumed"] is not None:
        with console.status(f"reading run {given['resumed']}"):
            from raybench.results import reader

            root, run_id = reader.find_run(given["output"], given["resumed"])
            run = reader.read_run(root, run_id)
        # The overrides of the run come first, so that new overrides replace them.
        overrides = (*overrides_in(run.argv), *overrides)
    if given["script"] is not None:
        return _load_script_job(given, overrides), given["device"]
    has_world_sizes = ctx.get_parameter_source("world_sizes") is not ParameterSource.DEFAULT
    if has_world_sizes or given["items_per_step"]:
        raise UsageError("--world-size and --items-per-step: go with --script; a job has them")
    if not words:
        raise click.MissingParameter(ctx=ctx, param_hint="'JOB'", param_type="argument")
    if len(words) > 1:
        raise UsageError(
            f"one JOB only, given also {words[1]}; arguments of a script go with --script"
        )
    if words[0].endswith(".py"):
        raise UsageError(f"{words[0]}: a job is a YAML file; did you mean --script {words[0]}?")
    source = read_source(Path(words[0]), overrides)
    device = given["device"]
    if not source.has_cpu:
        return job_of_source(source), device
    if run is None:
        why_on_cpu = "--device cpu" if device == "cpu" else "no GPU here"
        device = _find_device_kind(given, console)
        on_cpu = device == "cpu"
    else:
        # A resumed run uses the same devices as before.
        why_on_cpu = "as before"
        on_cpu = bool(run.cpu_section)
        if on_cpu and device == "cuda":
            raise UsageError(
                f"--resume {run.run_id}: it used the section cpu: of its job, so it goes on with "
                "--device cpu; for GPUs start a new run"
            )
        device = "cpu" if on_cpu else device
    if on_cpu:
        source = read_source(Path(words[0]), overrides, on_cpu=True)
        if source.uses_cpu:
            say(console, replaced_by_cpu(source.name, source.replaced_keys, why_on_cpu))
    return job_of_source(source), device


def _find_device_kind(given: Mapping[str, Any], console: Console) -> DeviceKind:
    """Return the kind of the devices that the sweep will use: cuda or cpu."""
    from raybench.cluster import find_kind, starts_private

    address, device = given["address"], given["device"]
    if device == "auto" and not starts_private(address):
        say(console, "asking the Ray cluster whether it has GPUs")
    return find_kind(address, device)


def _check_packages(job: Job, address: str) -> None:
    """Raise UsageError if workers on this host would lack a package of the workload."""
    from raybench.cluster import starts_private
    from raybench.job.declarations import missing_packages

    for package, remedy in missing_packages(job.workload_class).items():
        # The workers of another cluster may have other packages than this host.
        if starts_private(address):
            raise UsageError(
                f"{job.name}: workload {job.workload.kind} needs {package}, which is not "
                f"installed; {remedy}"
            )


def _say_estimate(console: Console, job: Job, plan: Plan, trials: int) -> None:
    """Print the number of points and their estimated time; a trial is a point in one round."""
    from raybench.job.estimate import estimate_time
    from raybench.report.words.sweep import time_of_sweep

    estimate = estimate_time(job, plan, trials)
    say(console, time_of_sweep(estimate, plan, job.measure.rounds))


def _load_script_job(given: Mapping[str, Any], overrides: Sequence[str]) -> Job:
    """Return the job of `--script` and its options; errors in the job name the options."""
    from raybench.cli.jobs import name_after
    from raybench.job.loading import job_from_text

    script, world_sizes, items = given["script"], given["world_sizes"], given["items_per_step"]
    sizes = world_sizes.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise UsageError(f"--world-size {world_sizes}: must be counts of ranks, as in 1,2,4")
    # With --script, the words of the argument JOB are the arguments of the script.
    arguments = shlex.join(given["job"])
    workload = {"kind": "script", "path": script, "args": arguments}
    workload |= {"items_per_step": items} if items else {}
    # JSON is valid YAML.
    text = (
        "version: 1\n"
        f"name: {json.dumps(name_after(Path(script), 'script'))}\n"
        f"workload: {json.dumps(workload, ensure_ascii=False)}\n"
        f"matrix: {{world_size: [{', '.join(str(int(size)) for size in sizes)}]}}\n"
    )
    option = f"--script {script}"
    # Path in the job -> the option that gave the value.
    options: dict[KeyPath, str] = {
        ("workload", "path"): option,
        ("workload", "args"): f"{option} -- {arguments}",
        ("workload", "items_per_step"): f"--items-per-step {items}",
        ("matrix", "world_size"): f"--world-size {world_sizes}",
    }
    return job_from_text(option, text, overrides, options)


def _resume(ctx: click.Context, job: Job, plan: Plan, target: RunTarget) -> int:
    """Resume the run of `--resume`; return the exit code."""
    from raybench.records.devices import DeviceList
    from raybench.results.writer import clear_leftovers, hold_run
    from raybench.sweep.run_state import (
        check_code,
        code_of_job,
        nothing_left_message,
        plan_of_run,
        resume_run,
        rounds_of_job,
        run_to_resume,
    )

    given = ctx.params
    output, run = run_to_resume(given["output"], given["resumed"], job)
    source_code = code_of_job(job)
    check_code(run, source_code)
    with hold_run(output, run.run_id):
        plan = plan_of_run(plan, output, run.run_id)
        filtered_ids = _select_ids(plan, given["expression"])
        # All trials of the job; only the points that pass --filter may run.
        rounds = replace(rounds_of_job(job, plan), chosen=filtered_ids)
        run_state = resume_run(
            run,
            rounds,
            output,
            source_code,
            # The user gets this command if the sweep is interrupted again.
            _resume_command(ctx, run.run_id, output),
            retry_failed=given["retry_failed"],
        )
        argv = _with_new_overrides(run.argv, given["overrides"])
        tags = {**run_state.run.tags, **given["tags"]}
        run_state = replace(run_state, run=replace(run_state.run, argv=argv, tags=tags))
        trials_left, plan_left = run_state.rounds.todo, run_state.rounds.plan_left
        if given["dry_run"]:
            if not trials_left:
                say(make_console(), nothing_left_message(run_state))
            if trials_left or given["as_json"]:
                _print_plan(job, plan_left, given["as_json"])
            return 0
        if trials_left:
            _say_estimate(make_console(), job, plan_left, len(trials_left))
        clear_leftovers(output, run.run_id)
        only_devices = target.only
        if only_devices is None and run.only_devices:
            # Without --devices, the resumed run uses the devices that it was started with.
            source = f"--devices of {run.run_id}"
            only_devices = DeviceList(names=run.only_devices, source=source)
        target = replace(target, output=output, only=only_devices)
        return _run(job, run_state, target, given["as_json"])


def _with_new_overrides(argv: Sequence[str], overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the command line with those values of `--set` that are not yet in it."""
    from raybench.job.source import overrides_in

    old_overrides = overrides_in(argv)
    new_words = [f"--set={text}" for text in overrides if text not in old_overrides]
    # The arguments of a script follow `--`.
    end = argv.index("--") if "--" in argv else len(argv)
    return (*argv[:end], *new_words, *argv[end:])


def _run(job: Job, run_state: RunState, target: RunTarget, as_json: bool) -> int:
    """Run the sweep, print its report, and return the exit code."""
    from raybench.analysis.answer import decide
    from raybench.analysis.run_data import load_run_data
    from raybench.api.progress import ConsoleListener
    from raybench.api.sweeps import carry_out
    from raybench.job.estimate import estimate_time
    from raybench.report.run_report import RunReport

    rounds = run_state.rounds
    estimate = estimate_time(job, rounds.plan_left, len(rounds.todo))
    listener = ConsoleListener(make_console(), trials_s=estimate.trials_s)
    run = carry_out(job, run_state, target, listener)
    has_points = run.points_ok + run.points_failed + run.points_skipped > 0
    if as_json or has_points:
        answer = decide(load_run_data(target.output, run.run_id))
        report = RunReport(answer=answer, is_short=not as_json)
        write_document(report, "json" if as_json else "terminal")
    return _EXIT_CODES[run.status]


def _resume_command(ctx: click.Context, run_id: str, output: Path) -> str:
    """Return the command that resumes this run, with the options of this command."""
    given, words = ctx.params, ["sweep"]
    if given["script"] is None:
        words += given["job"]
    else:
        words += ["--script", given["script"], "--world-size", given["world_sizes"]]
        if given["items_per_step"]:
            words += ["--items-per-step", given["items_per_step"]]
    words += ["--resume", run_id]
    if output != Path("results"):
        words += ["-o", str(output)]
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        is_given = source is ParameterSource.COMMANDLINE
        if option.name not in _OPTIONS_TO_REPEAT or not is_given:
            continue
        given_value = given[option.name]
        if given_value is True:  # a flag
            words.append(option.opts[-1])
            continue
        # An option that may be repeated has a tuple.
        values = given_value if isinstance(given_value, tuple) else (given_value,)
        for value in values:
            words += [option.opts[0], str(value)]
    if given["script"] is not None and given["job"]:
        words += ["--", *given["job"]]
    return command(*words)


SCHEMA_VERSION = 1  # of the JSON object that `plan` prints
_MOST_EXPLAINED = 3


def _select(plan: Plan, expression: str | None, option: str = "--filter") -> Plan:
    """Return the plan with only the points for which `expression` is true; None keeps all."""
    if expression is None:
        return plan
    from raybench.job.plan import select_points

    return replace(plan, points=select_points(plan.points, expression, option))


def _select_ids(plan: Plan, expression: str | None, option: str = "--filter") -> frozenset[str]:
    """Return the ids of the points for which `expression` is true."""
    return frozenset(point.point_id for point in _select(plan, expression, option).points)


def _read_size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Return a size with its unit, such as 141GB, in bytes."""
    from raybench.job.source import read_bytes

    if text is None:
        return None
    # Reject a number without a unit: the user may mean GB or GiB.
    is_number = text.replace(".", "").isdecimal()
    count = None if is_number else read_bytes(text)
    if count is None:
        rule = "must be a size with its unit, as in 141GB or 80GiB"
        raise click.BadParameter(f"{rule}, given {text!r}")
    return round(count)


@click.command("plan")
@click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path))
@device_option(
    help="cpu: the points that CPU workers run, with the section cpu of JOB. auto and cuda: the "
    "points that GPUs run."
)
@overrides_option
@click.option(
    "--filter", "expression", metavar="EXPR", help="Keep only the points for which EXPR is true."
)
@click.option(
    "--device-memory",
    "device_bytes",
    callback=_read_size,
    metavar="SIZE",
    help="Tell which points may not fit into a device with this much memory; not with --json.",
)
@json_option
def plan_command(
    job_file: Path,
    device: str,
    overrides: tuple[str, ...],
    expression: str | None,
    device_bytes: int | None,
    as_json: bool,
) -> None:
    """Check JOB and print its points, the devices they need and the time they may take.

    \b
    raybench plan jobs/ddp_scaling.yaml --set matrix.world_size=1,2
    raybench plan jobs/ddp_scaling.yaml --filter "precision == 'bf16'"
    raybench plan jobs/ddp_scaling.yaml --device cpu
    """
    from raybench.job.loading import load_job
    from raybench.job.plan import make_plan

    if as_json and device_bytes is not None:
        raise UsageError("--device-memory: not with --json, where points have mem_estimate_bytes")
    job = load_job(job_file, overrides, on_cpu=device == "cpu")
    _print_plan(job, _select(make_plan(job), expression), as_json, device_bytes)


def _print_plan(job: Job, plan: Plan, as_json: bool, device_bytes: int | None = None) -> None:
    """Print the plan on stdout, and its warnings on stderr."""
    from raybench.job.memory import estimate

    for warning in plan.warnings:
        click.echo(printable(f"{warning} (warning)"), err=True)
    # Estimated memory of each point in bytes; None: unknown.
    memory_bytes = [estimate(point) for point in plan.points]
    if not as_json:
        write_result(_plan_as_text(job, plan, memory_bytes, device_bytes))
        return
    least_s, most_s = _iterations_s(job, plan)
    points: list[dict[str, Any]] = []
    for point, needed_bytes in zip(plan.points, memory_bytes, strict=True):
        points.append({"point_id": point.point_id, **point.settings})
        if needed_bytes:
            points[-1]["mem_estimate_bytes"] = needed_bytes
    content = {
        "schema_version": SCHEMA_VERSION,
        "job": job.name,
        "workload": job.workload.kind,
        "points": points,
        "batch_search": plan.batch_search and plan.batch_search.model_dump(),
        "devices_needed": _devices_needed(plan),
        # The number of points of a search is unknown.
        "time_at_least_s": None if plan.batch_search else least_s,
        "time_at_most_s": None if plan.batch_search else most_s,
        "warnings": list(plan.warnings),
    }
    write_result(json_text(content))


def _devices_needed(plan: Plan) -> int:
    """Return the number of devices of the largest point."""
    return max((point.devices_needed for point in plan.points), default=0)


def _iterations_s(job: Job, plan: Plan) -> tuple[float, float]:
    """Return a lower and an upper estimate of the seconds of all iterations in all rounds."""
    # Slow steps, controls and set-up take additional time.
    measure = job.measure
    trials = measure.rounds * len(plan.points)
    longest_trial_s = min(measure.repeats * measure.max_seconds, measure.timeout_s)
    shortest_trial_s = measure.repeats * measure.least_s
    # At least one heating, at most one for each round and choice of devices.
    device_choices = {(point.world_size, point.devices) for point in plan.points}
    most_heatings = measure.rounds * len(device_choices)
    least_s = trials * shortest_trial_s + measure.heat_s
    most_s = trials * longest_trial_s + most_heatings * measure.heat_s
    return least_s, most_s


def _plan_as_text(
    job: Job, plan: Plan, memory_bytes: Sequence[int | None], device_bytes: int | None
) -> str:
    """Return the plan as text: settings of all points, a table of varying settings, and needs."""
    from raybench.job.memory import short_gib
    from raybench.job.plan import varying_settings
    from raybench.job.point import RUN_SETTINGS, UNEVEN

    varying = varying_settings(plan.points)
    first_settings = plan.points[0].settings_as_given
    left_out = set(varying)
    # Few jobs use the settings of uneven steps.
    left_out |= {name for name in UNEVEN if first_settings.get(name) == RUN_SETTINGS[name].default}
    if plan.batch_search:
        left_out.add("batch_size")
    shared = {name: value for name, value in first_settings.items() if name not in left_out}
    shared_text = " ".join(f"{name}={scalar_text(value)}" for name, value in shared.items())
    above = [f"{job.name}: workload {job.workload.kind}", f"in all points: {shared_text}"]
    if job.uses_cpu:
        above.insert(1, f"on CPU workers: its section cpu: replaces {', '.join(job.replaced_keys)}")
    elif "cpu" in job.model_fields_set:
        above.append("on GPUs; `raybench plan --device cpu` shows the points of CPU workers")
    if plan.batch_search:
        above.append(_batch_search_line(plan.batch_search))
    titles = ["#", "point_id", *varying, "est. GiB"]
    rows: list[list[str]] = []
    for point, needed_bytes in zip(plan.points, memory_bytes, strict=True):
        settings = [scalar_text(point.settings.get(name)) for name in varying]
        gib = short_gib(needed_bytes) if needed_bytes else ""
        rows.append([str(len(rows) + 1), point.point_id, *settings, gib])
    table = table_text(titles, rows)
    is_too_wide = max(map(len, click.unstyle(table).splitlines())) > text_width()
    if is_too_wide or not any(memory_bytes):
        # Leave out the column "est. GiB".
        table = table_text(titles[:-1], [row[:-1] for row in rows])
    below = [*_cost_lines(job, plan), *_memory_lines(plan, memory_bytes, device_bytes)]
    return "\n".join([*_wrapped(above), "", table, *_wrapped(below)]) + "\n"


def _batch_search_line(search: BatchSearch) -> str:
    """Return a sentence about the batch sizes that a search tries."""
    first_two = [search.start, 2 * search.start]
    batches = [str(batch) for batch in first_two if search.max is None or batch <= search.max]
    most = "" if search.max is None else f" or {search.max} is reached"
    return (
        f"batch_size: {', '.join(batches)}, ... until memory runs out{most}, then bisected to "
        "the largest that fits; below: the first point of each series"
    )


def _wrapped(lines: Iterable[str]) -> list[str]:
    """Return the lines, wrapped to the width for running text."""
    return [click.wrap_text(line, text_width(), subsequent_indent="  ") for line in lines]


def _cost_lines(job: Job, plan: Plan) -> Iterator[str]:
    """Yield lines: the counts of points and devices, the time, and the time of more rounds."""
    from raybench.job.estimate import SET_UP_S
    from raybench.job.rounds import BETWEEN_ROUNDS_S, WORTHWHILE

    measure, count = job.measure, len(plan.points)
    points_text = f"{count} series" if plan.batch_search else counted(count, "point")
    yield f"{points_text}; the largest needs {counted(_devices_needed(plan), 'device')}"
    yield (
        f"iterations: {_time_of_iterations(job, plan, points_text)}; {_slow_steps(measure)}; "
        "set-up and the first step of each point take additional time, and a point is stopped "
        f"after {measure.timeout_s:g} s"
    )
    if measure.heat_s:
        yield (
            f"heating: {measure.heat_s:g} s of steps before the first point, and before each point "
            "one of whose devices was idle for 10 s"
        )
    # With fewer rounds than this, the report has no intervals.
    if measure.rounds < WORTHWHILE and not plan.batch_search:
        least_s, _ = _iterations_s(job, plan)
        # The lower estimate includes one heating.
        iterations_of_round_s = (least_s - measure.heat_s) / measure.rounds
        one_round_s = iterations_of_round_s + count * SET_UP_S + BETWEEN_ROUNDS_S
        more_s = (WORTHWHILE - measure.rounds) * one_round_s
        yield (
            f"measure.rounds={WORTHWHILE} would take about {_duration(more_s)} more, and the "
            "report would have intervals"
        )


def _time_of_iterations(job: Job, plan: Plan, points_text: str) -> str:
    """Return the time of all iterations as a product: `2 min (2 points x 1 repeat of 60 s)`."""
    measure = job.measure
    least_s, most_s = _iterations_s(job, plan)
    if plan.batch_search:
        # The sweep adds points, so return the time of one trial: a point in one round.
        trials = measure.rounds * len(plan.points)
        most = f"at most {_duration(most_s / trials)} a point"
        return f"{most}; the number of points is known when the sweep has ended"
    rounds = f"{measure.rounds} rounds x " if measure.rounds > 1 else ""
    seconds = _range_text(f"{measure.least_s:.3g}", f"{measure.max_seconds:g}")
    point = f"{counted(measure.repeats, 'repeat')} of {seconds} s"
    point += f" + {measure.heat_s:g} s of heating" if measure.heat_s else ""
    return f"{_range_text(_duration(least_s), _duration(most_s))} ({rounds}{points_text} x {point})"


def _slow_steps(measure: Measure) -> str:
    """Return a clause: how many steps are timed if steps are too slow for max_seconds."""
    from raybench.job.model import ENOUGH_SAMPLES

    if measure.iterations:
        return f"{counted(measure.iterations, 'iteration')} are timed, however long they take"
    return (
        f"steps above {measure.longest_step_s:.2g} s are timed fewer than {ENOUGH_SAMPLES} times, "
        f"but at least {measure.fewest_samples} times"
    )


def _range_text(least: str, most: str) -> str:
    """Return `2 to 3`, `at most 3` for a `least` of zero, and `3` if both are the same."""
    if least == most:
        return most
    return f"at most {most}" if least.split()[0] == "0" else f"{least} to {most}"


def _duration(seconds: float) -> str:
    """Return a duration with three digits, in s, min or h."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.3g} min" if minutes < 100 else f"{minutes / 60:.3g} h"


def _memory_lines(
    plan: Plan, memory_bytes: Sequence[int | None], device_bytes: int | None
) -> Iterator[str]:
    """Yield lines: the memory that points need, and for points that do not fit, what would fit."""
    from raybench.job.memory import USABLE_SHARE, explain_oom, short_gib

    known_bytes = [needed_bytes for needed_bytes in memory_bytes if needed_bytes]
    if not known_bytes:
        return
    least, most = short_gib(min(known_bytes)), short_gib(max(known_bytes))
    text = f"memory: estimated {most if least == most else f'{least} to {most}'} GiB a device"
    if device_bytes is None:
        yield f"{text}; --device-memory SIZE tells which points do not fit"
        return
    too_big = []
    for number, point in enumerate(plan.points, start=1):
        needed_bytes = memory_bytes[number - 1]
        if needed_bytes and needed_bytes > USABLE_SHARE * device_bytes:
            too_big.append((number, point, needed_bytes))
    numbers = ", ".join(f"#{number}" for number, *_ in too_big)
    size = f"{short_gib(device_bytes)} GiB"
    if too_big:
        yield f"{text}; do not fit into {size}, and run all the same: {numbers}"
    else:
        yield f"{text}; all fit into {size}"
    for number, point, needed_bytes in too_big[:_MOST_EXPLAINED]:
        yield f"#{number}: {explain_oom(point, needed_bytes, device_bytes)}"
