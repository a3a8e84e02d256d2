"""The state of a run before a sweep: a new run, or what is left of a resumed run."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from raybench.errors import JobError, ResultsError, UsageError
from raybench.job.loading import job_from_text
from raybench.job.model import NOT_MEASURED, Job
from raybench.job.plan import Plan, script_path
from raybench.job.point import SCRIPT
from raybench.job.registry import module_and_class
from raybench.job.source import overrides_in
from raybench.records.code import Code, code_of, code_of_script, differing_files
from raybench.records.devices import DeviceList
from raybench.records.environment import git_commit, package_versions, variables_that_matter
from raybench.records.record import TrialKey
from raybench.records.status import RunStatus, Status
from raybench.results import reader
from raybench.results.tables import Run
from raybench.sweep.batch_search import with_probes
from raybench.sweep.rounds import Rounds

_MOST_DIFFERENCES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTarget:
    """Where a run is measured, and where its tables go."""

    # See `ClusterRequest.address`.
    address: str
    device: Literal["auto", "cuda", "cpu"]
    # The results folder.
    output: Path
    # Ids of the points to profile.
    profiled: frozenset[str]
    # How long to wait for missing devices, and for other sweeps to end.
    wait_s: float = 0.0
    # Whether other sweeps may use the devices at the same time.
    shared: bool = False
    # None allows all devices.
    only: DeviceList | None = None
    # See `Interrupts`.
    is_guest: bool = False


DeviceKey = tuple[str, str, int]


def device_key(kind: str, uuid: str, host: str, index: int) -> DeviceKey:
    """Return a key of the device that is the same in all sweeps of a run."""
    # The UUID of a CPU worker changes with its process. Without it, workers of two nodes of a host
    # may share a key.
    return (kind, uuid, 0) if kind == "cuda" else (kind, host, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run before a sweep, which has to run the trials `rounds.todo`."""

    run: Run
    rounds: Rounds
    # Statuses of all trials that have a row; some may run again.
    ended: Mapping[TrialKey, Status] = field(default_factory=dict)
    # Source files that the workers must have.
    code: Code | None = None
    # Keys of the devices that have a row.
    devices: frozenset[DeviceKey] = frozenset()
    # Models of the devices that have a row.
    models: frozenset[str] = frozenset()
    is_resumed: bool
    # Whether the last sweep of a resumed run did not end ok.
    was_cut_short: bool = False
    resume_command: str


def start_run(
    job: Job,
    plan: Plan,
    *,
    argv: Sequence[str],
    tags: Mapping[str, str],
    resume_command: Callable[[str], str],
) -> RunState:
    """Return the state of a new run with a new id; writes nothing.

    Args:
        argv: the command line, from which a resumed run takes the values of `--set`.
        resume_command: run_id -> the command that resumes the run.

    Raises:
        UsageError: see `code_of_job`.
    """
    code = code_of_job(job)
    now = datetime.now(UTC)
    run = Run(
        run_id=f"{job.name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        job_name=job.name,
        job_text=job.text,
        job_sha256=job.meaning_sha256,
        argv=tuple(argv),
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
        cpu_section=job.uses_cpu,
    )
    return RunState(
        run=run,
        code=code,
        rounds=replace(rounds_of_job(job, plan), seed=run.seed or 0),
        is_resumed=False,
        resume_command=resume_command(run.run_id),
    )


def rounds_of_job(job: Job, plan: Plan) -> Rounds:
    """Return the rounds of a job, without the seed of a run."""
    has_controls = job.placement.isolation == "cluster"
    return Rounds(plan=plan, count=job.measure.rounds, has_controls=has_controls)


def code_of_job(job: Job) -> Code:
    """Return the hashes of the sources of workload and raybench; imports no code of the workload.

    Raises:
        UsageError: the kind is neither built in nor of the form package.module:Class.
    """
    script = script_path(job) if job.workload.kind == SCRIPT else None
    if script:
        return code_of_script(script)
    module, _ = module_and_class(job.workload.kind)
    return code_of(module)


def run_to_resume(output: Path, run_name: str, job: Job) -> tuple[Path, Run]:
    """Return the results folder and the named run, without locking the run.

    Args:
        output: the results folder, unless `run_name` has a path.
        run_name: an id, or another name of a run: see `find_run`.

    Raises:
        ResultsError: no run or several match, or the run cannot be read.
        UsageError: the job differs from the job of the run.
    """
    root, run_id = reader.find_run(output, run_name)
    run = reader.read_run(root, run_id)
    # `run_id` is the name of a folder, which somebody may have renamed.
    if run.run_id != run_id:
        raise ResultsError(
            f"{root}/runs/{run_id}: is run {run.run_id} by its row; give its folders that name, "
            "then resume it"
        )
    if run.job_sha256 != job.meaning_sha256:
        raise UsageError(
            f"--resume {run_id}: the job is not the one of that run: {_difference(run, job)}; "
            "resume it with the same job and --set, or start a new run"
        )
    return root, run


def check_code(run: Run, code: Code) -> None:
    """Raise UsageError if a file of the workload or of raybench has changed since the run."""
    differences = []
    for name in differing_files(run.workload_files, code.workload):
        if name not in run.workload_files:
            differences.append(f"{name} is new")
        elif name not in code.workload:
            differences.append(f"{name} is gone")
        else:
            differences.append(f"{name} has changed")
    if run.raybench_sha256 != code.raybench_sha256:
        differences.append("raybench itself has changed")
    if differences:
        raise UsageError(
            f"--resume {run.run_id}: the code is not that of the run: {_list_few(differences)}; "
            "resume it with the same code, or start a new run"
        )


def plan_of_run(plan: Plan, root: Path, run_id: str) -> Plan:
    """Return the plan with the points that batch searches have added, and will try next.

    Raises:
        ResultsError: the rows of the run cannot be read.
    """
    # Trial -> row of its last attempt.
    latest = reader.latest(root, run_id)
    # Batch searches run in the first round.
    statuses = {key.point_id: row.status for key, row in latest.items() if key.round == 1}
    return with_probes(plan, statuses)


def resume_run(
    run: Run,
    rounds: Rounds,
    root: Path,
    code: Code,
    resume_command: str,
    *,
    retry_failed: bool,
) -> RunState:
    """Return the state of a resumed run, which the caller must hold (`hold_run`); writes nothing.

    Args:
        run: the run as read before `hold_run`; a held run has no `finished_at`.
        rounds: rounds of the job, with the plan of `plan_of_run` and the points that may run.
        root: the results folder.
        retry_failed: run failed trials again; lost, skipped and cancelled trials always are.

    Raises:
        ResultsError: the rows of the run cannot be read.
    """
    # Trial -> row of its last attempt.
    latest = reader.latest(root, run.run_id)
    ended: dict[TrialKey, Status] = {}
    kept: dict[TrialKey, Status] = {}
    attempts: dict[str, int] = {}  # point_id -> number of attempts
    for key, row in latest.items():
        ended[key] = row.status
        runs_again = row.status is not Status.OK and (retry_failed or row.status.is_retried)
        if not runs_again:
            kept[key] = row.status
        attempts[key.point_id] = max(row.attempt, attempts.get(key.point_id, 0))
    columns = ["kind", "uuid", "host", "index", "name"]
    table = reader.read_table(root, "devices", run.run_id).select(columns)
    models = {}  # device key -> model
    for device in table.to_pylist():
        key_of_device = device_key(device["kind"], device["uuid"], device["host"], device["index"])
        models[key_of_device] = device["name"]

    # If the driver was killed, `finished_at` is its last sign of life. Without `finished_at`, the
    # pause counts as 0, because another host may still work on the run.
    ended_at = run.finished_at or datetime.now(UTC)
    pause_s = max(0.0, (datetime.now(UTC) - ended_at).total_seconds())
    # Without the filter of an earlier sweep, the run has more points.
    point_ids = {key.point_id for key in latest} | set(rounds.chosen or ())
    return RunState(
        run=replace(
            reader.read_run(root, run.run_id),
            status=RunStatus.RUNNING,
            finished_at=None,
            paused_s=(run.paused_s or 0.0) + pause_s,
            points_total=max(run.points_total, len(point_ids)),
            host=socket.gethostname(),
        ),
        rounds=replace(rounds, seed=run.seed or 0, kept=kept, attempts_before=attempts),
        ended=ended,
        code=code,
        devices=frozenset(models),
        models=frozenset(models.values()),
        is_resumed=True,
        was_cut_short=run.status is not RunStatus.OK,
        resume_command=resume_command,
    )


def nothing_left_message(start: RunState) -> str:
    """Return the message for a run without trials to do."""
    text = f"run {start.run.run_id}: nothing to do"
    # With --retry-failed, only the ok trials would not run again.
    ok_trials = {key: status for key, status in start.rounds.kept.items() if status is Status.OK}
    rounds_with_retries = replace(start.rounds, kept=ok_trials)
    if rounds_with_retries.todo:
        text += "; the points that failed: --retry-failed"
    return text


def _difference(run: Run, job: Job) -> str:
    """Return in words the settings that differ between the job of the run and this job."""
    with suppress(JobError):  # this version of raybench may refuse the older job
        before = job_from_text(
            "job.yaml", run.job_text, overrides_in(run.argv), on_cpu=bool(run.cpu_section)
        )
        # Compare only if the text of the job still has the meaning that the run has measured.
        if before.meaning_sha256 == run.job_sha256:
            old = dict(_dotted_settings(before.model_dump(mode="json")))
            new = dict(_dotted_settings(job.model_dump(mode="json")))
            differences = []
            for setting in dict.fromkeys([*old, *new]):
                section = setting.split(".")[0]
                if old.get(setting) != new.get(setting) and section not in NOT_MEASURED:
                    was, now = old.get(setting, "not set"), new.get(setting, "not set")
                    differences.append(f"{setting} was {was}, is {now}")
            return _list_few(differences)
    return "its --set overrides, or what this version of raybench takes as defaults, differ"


def _list_few(differences: Sequence[str]) -> str:
    hidden = len(differences) - _MOST_DIFFERENCES
    text = ", ".join(differences[:_MOST_DIFFERENCES])
    return f"{text} and {hidden} more" if hidden > 0 else text


def _dotted_settings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name of each setting of a nested dict, as `measure.rounds`, and its value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _dotted_settings(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
