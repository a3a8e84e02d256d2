"""Run a job from Python; the command shares `carry_out`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args

from raybench.errors import ResultsError, UsageError
from raybench.job.problems import quote
from raybench.records.status import RunStatus
from raybench.report.formatting import command

if TYPE_CHECKING:
    from raybench.api.jobs import JobSource
    from raybench.api.run_result import RunResult
    from raybench.job.model import Job
    from raybench.results.tables import Run
    from raybench.sweep.listener import Listener
    from raybench.sweep.run_state import RunState, RunTarget

# The table `points` is compacted if it has this many parts. A report of 1,000 points takes 5.5 s
# with 1,000 parts and 1.5 s with one part; with fewer parts than this, a second more at most.
_MANY_PARTS = 200

DeviceChoice = Literal["auto", "cuda", "cpu"]


class SweepOptions(TypedDict, total=False):
    """Further options of `raybench.sweep`; the command has the same options."""

    # Tags to store with the run.
    tags: Mapping[str, str]
    # How long to wait for devices.
    wait_s: float
    # Measure beside other sweeps on the same devices.
    shared: bool


def sweep(
    job: JobSource,
    *,
    set: Mapping[str, Any] | None = None,
    filter: str | None = None,
    results: str | os.PathLike[str] = "results",
    device: DeviceChoice = "auto",
    address: str = "auto",
    **options: Unpack[SweepOptions],
) -> RunResult:
    """Run a job on a cluster, as `raybench sweep` does, and return its run.

    Example: `raybench.sweep("ddp_scaling.yaml", set={"matrix.world_size": [1, 2]})`.

    Progress goes to stderr, or to the output of a notebook's cell. Ctrl-C, or an interrupt of the
    kernel, waits for the points in flight and returns what was measured. A second interrupt stops
    these points.

    Args:
        job: path of a job file, or a dict with its keys.
        set: dotted key -> value, in place of the settings of the job; as `--set`.
        filter: run only the points for which this expression is true, as in "world_size > 1".
        results: folder for the result tables.
        device: auto takes GPUs if the cluster has any, else CPU workers.
        address: auto, local or HOST:PORT of a Ray cluster. If this process has joined a cluster
            already, this cluster is used, and stays joined.
        options: tags, wait_s, shared; see `SweepOptions`.

    Raises:
        JobError: the job has problems, one line each.
        ClusterError: there is no suitable cluster, it is lost, or its devices are in use.
        ResultsError: the results cannot be written.
        UsageError: an argument is wrong.
        KeyboardInterrupt: the interrupt came before any point could start.
    """
    from raybench.api.jobs import override_texts, read_job
    from raybench.api.progress_line import listener_here
    from raybench.api.run_result import RunResult
    from raybench.job.plan import make_plan, select_points
    from raybench.sweep.run_state import start_run

    run_target = target(results, device, address, options)
    checked_job, cpu_line = read_job(job, set, device=device, address=address)
    plan = make_plan(checked_job)
    if filter is not None:
        plan = replace(plan, points=select_points(plan.points, filter, "filter"))
    # The command that is stored with the run. A dict has no file that a command could name.
    if isinstance(job, Mapping):
        words = ["raybench.sweep", "job"]
    else:
        words = ["raybench", "sweep", os.fspath(job)]
    arguments = [f"--set={text}" for text in override_texts(set)]
    for name, value in (("device", device), ("address", address)):
        if value != "auto":
            arguments.append(f"--{name}={value}")

    def resume_command(run_id: str) -> str:
        output = run_target.output
        output_words = [] if output == Path("results") else ["-o", str(output)]
        resume_words = (*arguments, *output_words, "--resume", run_id)
        if isinstance(job, Mapping):
            resumed = command("sweep", "job.yaml", *resume_words)
            return f"save the job as job.yaml, then: {resumed}"
        return command("sweep", os.fspath(job), *resume_words)

    run_state = start_run(
        checked_job,
        plan,
        argv=[*words, *arguments],
        tags=_tags_of(options),
        resume_command=resume_command,
    )
    listener = listener_here()
    if cpu_line:
        listener.tell(cpu_line)
    run = carry_out(checked_job, run_state, run_target, listener)
    return RunResult(results=run_target.output, run_id=run.run_id)


def target(
    results: str | os.PathLike[str], device: str, address: str, options: SweepOptions
) -> RunTarget:
    """Check the options of a sweep, and return where it runs.

    Raises:
        UsageError: an option is wrong.
        ResultsError: the folder cannot be written.
        TypeError: there is no such option.
    """
    from raybench.api.files import check_outlives_job
    from raybench.results.writer import check_writable
    from raybench.sweep.run_state import RunTarget

    for name in options:
        if name not in SweepOptions.__annotations__:
            raise TypeError(f"sweep() got an unexpected keyword argument {name!r}")
    if device not in get_args(DeviceChoice):
        raise UsageError(f"device: must be auto, cuda or cpu, given {quote(device)}")
    wait_s = options.get("wait_s", 0.0)
    if not 0 <= wait_s <= 1_000_000:
        raise UsageError(f"wait_s: must be from 0 to 1,000,000 seconds, given {quote(wait_s)}")
    output = Path(results)
    if "://" in os.fspath(results):
        raise UsageError(f"results: must be a folder of this machine, given {quote(results)}")
    check_outlives_job(output, "results")
    check_writable(output)
    return RunTarget(
        address=address,
        device=device,  # type: ignore[arg-type]
        output=output,
        profiled=frozenset(),
        wait_s=wait_s,
        shared=options.get("shared", False),
        # The process belongs to the caller, so an interrupt must not end the process.
        is_guest=True,
    )


def _tags_of(options: SweepOptions) -> dict[str, str]:
    """Return the tags, with keys and values as text."""
    return {str(name): str(value) for name, value in options.get("tags", {}).items()}


def carry_out(job: Job, start: RunState, where: RunTarget, listener: Listener) -> Run:
    """Run the trials of a run that are left, if any, and return the ended run.

    Raises:
        RaybenchError: the errors of `run_sweep`.
    """
    from raybench.sweep.run_rows import finish_without_trials
    from raybench.sweep.run_state import nothing_left_message
    from raybench.sweep.runner import run_sweep

    for warning in start.rounds.plan.warnings:
        listener.tell(f"{warning} (warning)")
    if start.rounds.todo:
        run = run_sweep(job, start, where, listener)
    else:
        listener.tell(nothing_left_message(start))
        run = finish_without_trials(start, where.output, job.measure)
    # After an interrupt the process ends soon; the sweep that resumes the run compacts it.
    if run.status is not RunStatus.INTERRUPTED:
        _compact_points(start, where.output, listener)
    return run


def _compact_points(start: RunState, root: Path, listener: Listener) -> None:
    """Put the table `points` of a run into one file, if the table has many files (parts)."""
    from raybench.results.columns import parts_of
    from raybench.results.writer import compact_points, hold_run

    run_id = start.run.run_id
    if len(parts_of(root, "points", run_id)) < _MANY_PARTS:
        return
    try:
        # A resumed run is locked already.
        with nullcontext() if start.is_resumed else hold_run(root, run_id):
            compact_points(root, run_id)
    except ResultsError as error:
        compact = command("compact", run_id, "--results", str(root))
        listener.tell(f"the points stay in many parts: {error}; put them together: {compact}")
