"""A run: how it begins, what is left of it for a sweep, and what a sweep writes and says of it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raybench.cluster import Cluster
from raybench.errors import ClusterError
from raybench.job.plan import Plan
from raybench.job.point import SCRIPT
from raybench.job.registry import module_of
from raybench.job.rules import script_path
from raybench.records import Device, Record, Status, TrialKey, by_point
from raybench.records.devices import DeviceList
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
from raybench.sweep.loop import EarlierSweeps, RoundStarted
from raybench.sweep.messages import Listener, command
from raybench.sweep.rounds import Rounds

if TYPE_CHECKING:
    from raybench.job.model import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTarget:
    """Where a run is carried out, and where its tables go.

    profiled: ids of the points to profile. wait_s: how long to wait for the devices that the
    biggest point needs, and for other sweeps to end. shared: measure beside other sweeps.
    only: the devices to use; None for all.
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
        """Whether a private Ray here would have CPU workers: asked for, or no GPU on this host."""
        has_gpus = any(Path("/dev").glob("nvidia[0-9]*"))
        return self.device == "cpu" or (self.device == "auto" and not has_gpus)


DeviceKey = tuple[str, str, int]


def device_key(kind: str, uuid: str, host: str, index: int) -> DeviceKey:
    """Return a key that a device keeps over all sweeps of a run.

    The uuid of a CPU worker names a process, so its host and index are used.
    """
    return (kind, uuid, 0) if kind == "cuda" else (kind, host, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run, and what is left of it for a sweep.

    rounds: of the whole run. ended: how the trials ended that have a row already. earlier: which of
    these are kept, and what is to be run. code: source files that the workers must have.
    devices: keys of the devices that have rows. models: their names. resume_command: what the user
    types to go on with the run.
    """

    run: Run
    rounds: Rounds
    ended: Mapping[TrialKey, Status] = field(default_factory=dict)
    earlier: EarlierSweeps
    code: Code | None = None
    devices: frozenset[DeviceKey] = frozenset()
    models: frozenset[str] = frozenset()
    is_resumed: bool
    resume_command: str

    @property
    def plan(self) -> Plan:
        """The plan of the whole run."""
        return self.rounds.plan

    @property
    def todo(self) -> tuple[TrialKey, ...]:
        """The trials that are to be run, as far as they are known."""
        kept = self.earlier.kept
        rounds = (self.rounds.attempts(n, kept) for n in range(1, self.rounds.count + 1))
        return tuple(attempt.key for attempts in rounds for attempt in self.earlier.left(attempts))

    @property
    def left(self) -> Plan:
        """The plan of the points that are to be run."""
        left = {key.point_id for key in self.todo}
        points = (point for point in self.plan.points if point.point_id in left)
        return replace(self.plan, points=tuple(points))

    @property
    def searched(self) -> dict[str, Status]:
        """How points ended in the first round, by id, of those that are not run again there."""
        return {k.point_id: status for k, status in self.earlier.kept.items() if k.round == 1}


def finish_run(run: Run, plan: Plan, ended: Mapping[TrialKey, Status]) -> Run:
    """Return the run with the counts of its points and the status that follows from them.

    Where batch sizes are searched, a batch that runs out of memory is no failure.
    """
    statuses = by_point(ended)
    run = count_points(run, statuses)
    failures = {status for status in statuses.values() if status.is_failure}
    if plan.batch_search and failures <= {Status.OOM}:
        return replace(run, status=RunStatus.OK)
    return run


class RunRows:
    """Writes the tables of a run. left: trials that the sweep still has to finish."""

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
        """Write the records of attempts, and the samples of the devices since the last call."""
        kept = self.store.write_records(batch)
        self._ended.update((record.key, record.status) for record in kept)
        for (_, measured), record in zip(batch, kept, strict=True):
            if record is not measured:
                self.listener.tell(f"point {record.point.point_id}: {record.error_message}")
        self.keep_devices(cluster.devices)
        self.store.write_telemetry(batch, cluster.telemetry())

    def begin_round(self, event: RoundStarted) -> None:
        """Note the trials of a round, which are known when it begins."""
        later = {key for key in self.left if key.round != event.round}
        self.left = later.union(event.trials)

    def adopt(self, rounds: Rounds) -> None:
        """Take in the points of a run that had none before its devices were known."""
        self.start = replace(self.start, rounds=rounds)
        self.left = set(self.start.todo)
        self._points = {point.point_id for point in rounds.plan.points}
        self._keep_total(len(self._points))

    def expect(self, key: TrialKey) -> None:
        """Add a trial to those that are left."""
        self.left.add(key)
        if key.point_id not in self._points:
            self._points.add(key.point_id)
            self._keep_total(self._run.points_total + 1)

    def _keep_total(self, points: int) -> None:
        self._run = replace(self._run, points_total=points)
        self.store.write_run(self._run)

    def close(self, status: RunStatus | None = None) -> Run:
        """Write how the run ended, and return it; without a status it follows from the points."""
        run = finish_run(self._run, self.start.plan, self._ended)
        run = replace(run, status=status or run.status, finished_at=datetime.now(UTC))
        self.store.write_run(run)
        # Here, so that `raybench plan` does not wait for numpy.
        from raybench.analysis.summary import write_summary

        write_summary(self.store, run)
        return run

    def forget(self) -> None:
        """Remove the run, in which nothing was measured; a resumed one is interrupted instead."""
        if self.start.is_resumed:
            self.close(RunStatus.INTERRUPTED)
        else:
            self.store.remove()

    def tell_kept(self, what: str) -> None:
        """Log once what is kept of a run that was cut short, and how to go on with it.

        what: the word for how it ended, as "interrupted".
        """
        if self._is_told:
            return
        self._is_told = True
        text = f"{what} before any point finished"
        # As `raybench list` counts them: a point that was cut short is not finished.
        run = count_points(self._run, by_point(self._ended))
        if count := run.points_ok + run.points_failed + run.points_skipped:
            points = "point is" if count == 1 else "points are"
            told = {"ok": run.points_ok, "failed": run.points_failed, "skipped": run.points_skipped}
            each = ", ".join(f"{count} {word}" for word, count in told.items() if count)
            ended = f" ({each})" if run.points_ok < count else ""
            text = f"{what}: {count} finished {points} kept{ended}; see: "
            text += command("report", self.store.run_id, "--results", str(self.store.root))
        if self.left:
            self.listener.tell(f"go on with: {self.start.resume_command}")
        self.listener.tell(text)


def start_run(
    job: Job,
    plan: Plan,
    *,
    argv: Sequence[str],
    tags: Mapping[str, str],
    resume_command: Callable[[str], str],
) -> RunState:
    """Return a new run, of which nothing is done yet.

    resume_command: returns what the user types to go on with the run of an id. Raises UsageError
    where there is no such workload.
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
    )
    return RunState(
        run=run,
        code=code,
        rounds=replace(rounds_of_job(job, plan), seed=run.seed or 0),
        earlier=EarlierSweeps(),
        is_resumed=False,
        resume_command=resume_command(run.run_id),
    )


def rounds_of_job(job: Job, plan: Plan) -> Rounds:
    """Return the rounds of the job, with the seed 0."""
    has_controls = job.placement.isolation == "cluster"
    return Rounds(plan=plan, count=job.measure.rounds, has_controls=has_controls)


def code_of_job(job: Job) -> Code:
    """Return the source files of the job's workload, which is imported, and of raybench.

    Raises UsageError where there is no such workload.
    """
    script = script_path(job) if job.workload.kind == SCRIPT else None
    return code_of_script(script) if script else code_of(module_of(job.workload.kind))
