"""A run: how it begins, what a sweep is to do of it, what is written and said of it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raybench.cluster import Cluster
from raybench.errors import ClusterError, ResultsError
from raybench.job.plan import Plan
from raybench.job.point import SCRIPT, Point
from raybench.job.registry import module_of
from raybench.job.rules import script_path
from raybench.records import Device, Record, Status, TrialKey, by_point
from raybench.records.device_list import DeviceList
from raybench.records.environment import (
    Code,
    code_of,
    code_of_script,
    git_commit,
    package_versions,
    variables_that_matter,
)
from raybench.results.reader import count_points
from raybench.results.run import Run, RunStatus
from raybench.results.writer import RunStore
from raybench.sweep.commands import command
from raybench.sweep.listener import Listener
from raybench.sweep.loop import Before, RoundStarted
from raybench.sweep.rounds import Rounds

if TYPE_CHECKING:
    from raybench.job.model import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTarget:
    """Where a run is carried out, where its tables go, and the point_ids to profile.

    wait_s: how long the cluster may take to get the devices that the biggest point needs, and other
    sweeps to let go of theirs. shared: measure beside other sweeps.
    only: the devices to use; all where there is none.
    """

    address: str
    device: Literal["auto", "cuda", "cpu"]
    output: Path
    profiled: frozenset[str]
    wait_s: float = 0.0
    shared: bool = False
    only: DeviceList | None = None

    @property
    def is_on_cpus(self) -> bool:
        """Whether a private Ray would surely be one of CPU workers."""
        has_gpus = any(Path("/dev").glob("nvidia[0-9]*"))
        return self.device == "cpu" or (self.device == "auto" and not has_gpus)


DeviceKey = tuple[str, str, int]


def device_key(kind: str, uuid: str, host: str, index: int) -> DeviceKey:
    """Return what a device keeps over the sweeps of a run; a CPU's uuid names a process."""
    return (kind, uuid, 0) if kind == "cuda" else (kind, host, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run and what is to be done of it.

    rounds: of the whole run. ended: how the trials ended that have a row already. before: which of
    them are kept, and what is to be run.
    code: what the workers must load. devices: those that the run has rows of, by `device_key`.
    models: the names of these.
    resume_command: what the user types to go on with it.
    """

    run: Run
    rounds: Rounds
    ended: Mapping[TrialKey, Status] = field(default_factory=dict)
    before: Before
    code: Code | None = None
    devices: frozenset[DeviceKey] = frozenset()
    models: frozenset[str] = frozenset()
    is_resumed: bool
    resume_command: str

    @property
    def plan(self) -> Plan:
        """Of the whole run."""
        return self.rounds.plan

    @property
    def todo(self) -> tuple[TrialKey, ...]:
        """The trials that are to be run, as far as they are known."""
        kept = self.before.kept
        rounds = (self.rounds.attempts(n, kept) for n in range(1, self.rounds.count + 1))
        return tuple(attempt.key for attempts in rounds for attempt in self.before.left(attempts))

    @property
    def left(self) -> Plan:
        """The plan of the points that are to be run."""
        left = {key.point_id for key in self.todo}
        points = (point for point in self.plan.points if point.point_id in left)
        return replace(self.plan, points=tuple(points))

    @property
    def ran_out(self) -> list[Point]:
        """Points that ran out of memory before, and are not run again."""
        kept = by_point(self.before.kept)
        return [point for point in self.plan.points if kept.get(point.point_id) is Status.OOM]

    @property
    def searched(self) -> dict[str, Status]:
        """point_id -> status in the first round, of the points that are not run again there."""
        return {k.point_id: status for k, status in self.before.kept.items() if k.round == 1}


def finish_run(run: Run, plan: Plan, ended: Mapping[TrialKey, Status]) -> Run:
    """Give the run its counts and the status that follows from its points, as `count_points`.

    Where batch sizes are searched, a batch that runs out of memory is an answer and no failure.
    """
    statuses = by_point(ended)
    run = count_points(run, statuses)
    failures = {status for status in statuses.values() if status.is_failure}
    if plan.batch_search and failures <= {Status.OOM}:
        return replace(run, status=RunStatus.OK)
    return run


class RunRows:
    """What is written of a run. left: trials that the sweep still has to finish."""

    def __init__(self, start: RunState, store: RunStore, listener: Listener) -> None:
        self.start = start
        self.store = store
        self.listener = listener
        self.left = set(start.todo)
        self._ended = dict(start.ended)
        self._known = set(start.devices)
        self._run = start.run
        self._points = {point.point_id for point in start.plan.points}
        self._is_told = False
        self._written: dict[Path, list[TrialKey]] = {}

    def keep_devices(self, devices: Sequence[Device]) -> None:
        """Write the devices that the run has no row of. Raises ClusterError for other models."""
        strange = {device.name for device in devices} - self.start.models
        if self.start.models and strange:
            raise ClusterError(
                f"run {self.store.run_id} was measured on "
                f"{', '.join(sorted(self.start.models))}, this cluster has "
                f"{', '.join(sorted(strange))}; start a new run, to compare the two"
            )
        new = {device_key(d.kind, d.uuid, d.host, d.index): d for d in devices}
        new = {key: device for key, device in new.items() if key not in self._known}
        if not self._known:
            # CPU workers of one host have one key, and each has its row.
            self.store.write_devices(devices)
        elif new:
            self.store.write_devices(list(new.values()), f"devices-{len(self._known)}")
        self._known.update(new)

    def keep_records(self, batch: Sequence[tuple[int, Record]], cluster: Cluster) -> None:
        """Write attempts at points, with what was sampled of the devices meanwhile."""
        kept = self.store.write_records(batch)
        self._written[self.store.rows_of(batch)] = [record.key for record in kept]
        self._ended.update((record.key, record.status) for record in kept)
        for (_, measured), record in zip(batch, kept, strict=True):
            if record is not measured:
                self.listener.tell(f"point {record.point.point_id}: {record.error_message}")
        self.keep_devices(cluster.devices)
        self.store.write_telemetry(batch, cluster.telemetry())

    def begin_round(self, event: RoundStarted) -> None:
        """Take in what a round has to finish, which is known when it begins."""
        later = {key for key in self.left if key.round != event.round}
        self.left = later.union(event.trials)

    def adopt(self, rounds: Rounds) -> None:
        """Take in the points of a run, of which there were none before its devices were known."""
        self.start = replace(self.start, rounds=rounds)
        self.left = set(self.start.todo)
        self._points = {point.point_id for point in rounds.plan.points}
        self._keep_total(len(self._points))

    def expect(self, key: TrialKey) -> None:
        """One more trial belongs to the run."""
        self.left.add(key)
        if key.point_id not in self._points:
            self._points.add(key.point_id)
            self._keep_total(self._run.points_total + 1)

    def _keep_total(self, points: int) -> None:
        self._run = replace(self._run, points_total=points)
        self.store.write_run(self._run)

    def close(self, status: RunStatus | None = None) -> Run:
        """Write how the run ended; without a status it follows from the points.

        Raises ResultsError where rows are gone that were written; those points are left.
        """
        if removed := self._find_removed():
            self.close(RunStatus.INTERRUPTED)
            raise ResultsError(
                f"{self.store.points}: the rows of {removed} point{'s' * (removed != 1)} were "
                "removed while the sweep ran; put them back, or go on with the run"
            )
        run = finish_run(self._run, self.start.plan, self._ended)
        run = replace(run, status=status or run.status, finished_at=datetime.now(UTC))
        self.store.write_run(run)
        return run

    def _find_removed(self) -> int:
        """How many points have lost their rows since the last call; they are left to be run."""
        gone = [path for path in self._written if not path.exists()]
        trials = {key for path in gone for key in self._written.pop(path)}
        self.left |= trials
        for key in trials:
            self._ended.pop(key, None)
        return len({key.point_id for key in trials})

    def forget(self) -> None:
        """Leave no run where none has begun; one that was to go on can still be resumed."""
        if self.start.is_resumed:
            self.close(RunStatus.INTERRUPTED)
        else:
            self.store.remove()

    def tell_kept(self, what: str) -> None:
        """Say once what there is of a run that was cut short, and how to go on with it."""
        if self._is_told:
            return
        self._is_told = True
        text = f"{what} before any point finished"
        # As `raybench list` counts them: a point that was cut short is not finished.
        run = count_points(self._run, by_point(self._ended))
        if count := run.points_ok + run.points_failed + run.points_skipped:
            points = "point is" if count == 1 else "points are"
            text = f"{what}: {count} finished {points} kept{_how_they_ended(run)}; see: "
            text += command("report", self.store.run_id, "--results", str(self.store.root))
        if self.left:
            self.listener.tell(f"go on with: {self.start.resume_command}")
        self.listener.tell(text)


def _how_they_ended(run: Run) -> str:
    """` (4 ok, 3 failed)`; empty where all are ok."""
    told = {"ok": run.points_ok, "failed": run.points_failed, "skipped": run.points_skipped}
    if not run.points_failed and not run.points_skipped:
        return ""
    return " (" + ", ".join(f"{count} {word}" for word, count in told.items() if count) + ")"


def start_run(
    job: Job,
    plan: Plan,
    *,
    argv: Sequence[str],
    tags: Mapping[str, str],
    resume_command: Callable[[str], str],
) -> RunState:
    """Make a run of which nothing is done yet. Raises UsageError as `code_of_job`.

    resume_command: gives what the user types to go on with a run, of which it takes the id.
    """
    code = code_of_job(job)
    run = _make_run(job, plan, argv, tags, code)
    return RunState(
        run=run,
        code=code,
        rounds=replace(rounds_of_job(job, plan), seed=run.seed or 0),
        before=Before(),
        is_resumed=False,
        resume_command=resume_command(run.run_id),
    )


def rounds_of_job(job: Job, plan: Plan) -> Rounds:
    """Return the rounds in which the points are run, without a seed of their order."""
    has_controls = job.placement.isolation == "cluster"
    return Rounds(plan=plan, count=job.measure.rounds, has_controls=has_controls)


def code_of_job(job: Job) -> Code:
    """Read the sources of the job's workload, which is imported, and of raybench.

    Raises UsageError where there is no such workload.
    """
    script = script_path(job) if job.workload.kind == SCRIPT else None
    return code_of_script(script) if script else code_of(module_of(job.workload.kind))


def _make_run(
    job: Job, plan: Plan, argv: Sequence[str], tags: Mapping[str, str], code: Code
) -> Run:
    now = datetime.now(UTC)
    return Run(
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
    )
