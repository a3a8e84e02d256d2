"""`raybench sweep --resume`: which run goes on, whether it may, and what is left of it."""

from __future__ import annotations

import socket
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raybench.errors import JobError, UsageError
from raybench.job.model import NOT_MEASURED, Job, Measure, load_job
from raybench.job.plan import Plan
from raybench.job.source import overrides_in
from raybench.records import by_point
from raybench.records.devices import DeviceList
from raybench.records.environment import Code, differing
from raybench.results import reader
from raybench.results.run import Run, RunStatus
from raybench.results.writer import RunStore
from raybench.sweep.batch_search import with_probes
from raybench.sweep.loop import EarlierSweeps
from raybench.sweep.rounds import Rounds
from raybench.sweep.run_state import RunState, device_key, finish_run
from raybench.sweep.scheduler import is_kept

_MOST_DIFFERENCES = 5


def run_to_resume(output: Path, text: str, job: Job) -> tuple[Path, Run]:
    """Return the results folder and the run that `text` names: an id, its beginning, or `latest`.

    output: the folder in which it is looked for.
    Raises ResultsError when there is no such run, UsageError when `job` is not the job of the run.
    """
    root, run_id = reader.find_run(output, text)
    run = reader.read_run(root, run_id)
    if run.job_sha256 != job.meaning_sha256:
        raise UsageError(
            f"--resume {run_id}: the job is not the one of that run: {_difference(run, job)}; "
            "resume it with the same job and --set, or start a new run"
        )
    return root, run


def check_code(run: Run, code: Code) -> None:
    """Raise UsageError when the code is not that of the run."""
    differences = [
        f"{name} is new"
        if name not in run.workload_files
        else f"{name} {'has changed' if name in code.workload else 'is gone'}"
        for name in differing(run.workload_files, code.workload)
    ]
    if run.raybench_sha256 != code.raybench_sha256:
        differences.append("raybench itself has changed")
    if differences:
        raise UsageError(
            f"--resume {run.run_id}: the code is not that of the run: {_few(differences)}; "
            "resume it with the same code, or start a new run"
        )


def plan_of_run(plan: Plan, root: Path, run_id: str) -> Plan:
    """Return the plan of the job with the points that a search for batch sizes added to the run."""
    latest = reader.latest(root, run_id)
    first = {key.point_id: one.status for key, one in latest.items() if key.round == 1}
    return with_probes(plan, first)


def resume_run(
    run: Run,
    rounds: Rounds,
    root: Path,
    chosen: Collection[str],
    resume_command: str,
    code: Code,
    *,
    retry_failed: bool,
    tags: Mapping[str, str],
) -> RunState:
    """Return the run with what is left of its points `chosen`.

    The run must be held (`hold_run`), because its rows are read.
    """
    latest = reader.latest(root, run.run_id)
    attempts: Counter[str] = Counter()
    for key, one in latest.items():
        attempts[key.point_id] = max(one.attempt, attempts[key.point_id])
    names = ["kind", "uuid", "host", "index"]
    table = reader.read_table(root, "devices", run.run_id).select([*names, "name"])
    devices = {device_key(*(row[name] for name in names)): row["name"] for row in table.to_pylist()}
    # `finished_at` of a run whose driver was killed is its last sign of life. Without it the pause
    # counts as none: another host may still work on the run.
    ended_at = run.finished_at or datetime.now(UTC)
    pause_s = max(0.0, (datetime.now(UTC) - ended_at).total_seconds())
    # A run that was filtered has more points when it goes on without the filter.
    points = {*(key.point_id for key in latest), *chosen}
    return RunState(
        run=replace(
            reader.read_run(root, run.run_id),
            status=RunStatus.RUNNING,
            finished_at=None,
            paused_s=(run.paused_s or 0.0) + pause_s,
            points_total=max(run.points_total, len(points)),
            host=socket.gethostname(),
            tags={**run.tags, **tags},
        ),
        rounds=replace(rounds, seed=run.seed or 0),
        ended={key: one.status for key, one in latest.items()},
        earlier=EarlierSweeps(
            kept={
                key: one.status
                for key, one in latest.items()
                if is_kept(one.status, retry_failed=retry_failed)
            },
            attempts=attempts,
            chosen=chosen,
        ),
        code=code,
        devices=frozenset(devices),
        models=frozenset(devices.values()),
        is_resumed=True,
        resume_command=resume_command,
    )


def devices_of_run(run: Run) -> DeviceList | None:
    """Return the devices that the run was told to use; None where it could use all."""
    names = run.only_devices
    return DeviceList(names=names, source=f"--devices of {run.run_id}") if names else None


def nothing_left(start: RunState) -> str:
    """Return the message that nothing is left to do, and what could be tried again."""
    text = f"run {start.run.run_id}: nothing to do"
    if any(status.is_failure for status in start.ended.values()):
        text += "; the points that failed: --retry-failed"
    return text


def end_of_run(start: RunState, root: Path, measure: Measure) -> Run:
    """Return a run that has nothing left, with the counts and the status of its rows.

    Writes the run and its summary too, if its driver died before it could.
    """
    from raybench.analysis.summary import write_summary

    stored = reader.read_run(root, start.run.run_id)
    ended = finish_run(stored, start.plan, start.ended)
    is_whole = len(by_point(start.ended)) == stored.points_total
    if is_whole and stored.status in (RunStatus.RUNNING, RunStatus.INTERRUPTED):
        ended = replace(ended, finished_at=stored.finished_at or datetime.now(UTC))
        store = RunStore(root=root, run_id=ended.run_id, measure=measure)
        store.write_run(ended)
        write_summary(store, ended)
    return ended


def _difference(run: Run, job: Job) -> str:
    """Return in words which settings differ from those of the run."""
    before = job_of_run(run)
    if before is None:
        return "its --set overrides, or what this version of raybench takes as defaults, differ"
    old, new = (dict(_leaves(one.model_dump(mode="json"))) for one in (before, job))
    differences = [
        f"{key} was {old.get(key, 'not set')}, is {new.get(key, 'not set')}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and key.split(".")[0] not in NOT_MEASURED
    ]
    return _few(differences)


def _few(differences: Sequence[str]) -> str:
    more = len(differences) - _MOST_DIFFERENCES
    told = ", ".join(differences[:_MOST_DIFFERENCES])
    return f"{told} and {more} more" if more > 0 else told


def job_of_run(run: Run) -> Job | None:
    """Return the job of a run from its text and command; None where it is another now."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(run.job_text, encoding="utf-8")
        try:
            job = load_job(path, overrides_in(run.argv))
        except JobError:
            return None
    return job if job.meaning_sha256 == run.job_sha256 else None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings in nested mappings, each with its dotted key."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))
