"""A run: how it begins or goes on, what is left of it, and what a sweep writes and says of it."""

from __future__ import annotations

import secrets
import shlex
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from raybench.cluster import Cluster
from raybench.errors import ClusterError, JobError, ResultsError, UsageError
from raybench.job.loading import job_from_text
from raybench.job.model import NOT_MEASURED, Job, Measure
from raybench.job.plan import Plan, script_path
from raybench.job.point import SCRIPT
from raybench.job.registry import module_and_class
from raybench.job.source import overrides_in
from raybench.records.code import Code, code_of, code_of_script, differing
from raybench.records.device import Device
from raybench.records.devices import DeviceList
from raybench.records.environment import git_commit, package_versions, variables_that_matter
from raybench.records.record import Record, TrialKey, by_point
from raybench.records.status import RunStatus, Status
from raybench.results import reader
from raybench.results.tables import Run
from raybench.results.writer import RunStore
from raybench.sweep.loop import EarlierSweeps, Event, PointAdded, PointFinished, RoundStarted
from raybench.sweep.scheduler import Rounds, with_probes

_MOST_DIFFERENCES = 5


class ProgressDisplay(Protocol):
    """Shows the events of a sweep while they come; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None:
        """Show one more event, inside the `with` block."""


class Listener(Protocol):
    """Whoever shows a sweep to the user; the sweep itself prints nothing."""

    def tell(self, line: str) -> None:
        """Show the user one line, which stays visible; any thread may call it."""

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Return a context that shows `what`, as "connecting to Ray", at least on a terminal."""

    def progress(self, plan: Plan, trials: int) -> ProgressDisplay:
        """Return the progress of a sweep of `plan`. trials: how many it runs, as far as known."""

    def show_cursor(self) -> None:
        """Show the cursor, which a spinner hides; a thread calls it before the process ends."""


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


DeviceKey = tuple[str, str, int]


def _device_key(kind: str, uuid: str, host: str, index: int) -> DeviceKey:
    """Return a key that a device keeps over all sweeps of a run.

    For CPUs it is host and index (a uuid names a process), so two nodes of a host may share it.
    """
    return (kind, uuid, 0) if kind == "cuda" else (kind, host, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run, and the trials that a sweep still has to do in it.

    rounds: of the whole run. ended: how the trials ended that have a row already. earlier: which of
    these are kept, and what is to be run. code: source files that the workers must have.
    devices: keys of the devices that have rows. models: their names. was_cut_short: it is resumed,
    and was not ok. resume_command: what the user types to go on with the run.
    """

    run: Run
    rounds: Rounds
    ended: Mapping[TrialKey, Status] = field(default_factory=dict)
    earlier: EarlierSweeps
    code: Code | None = None
    devices: frozenset[DeviceKey] = frozenset()
    models: frozenset[str] = frozenset()
    is_resumed: bool
    was_cut_short: bool = False
    resume_command: str

    @property
    def plan(self) -> Plan:
        """The run's plan, unfiltered if resumed; without the points that this sweep adds."""
        return self.rounds.plan

    @property
    def todo(self) -> tuple[TrialKey, ...]:
        """The trials that this sweep has to run, in order, as far as is known before it begins.

        Those in later rounds of a point kept as failed are left out. A sweep may add or drop some.
        """
        kept = self.earlier.kept
        rounds = (self.rounds.attempts(n, kept) for n in range(1, self.rounds.count + 1))
        return tuple(attempt.key for attempts in rounds for attempt in self.earlier.left(attempts))

    @property
    def left(self) -> Plan:
        """The plan with only the points of `todo`, also those that are only run as controls."""
        left = {key.point_id for key in self.todo}
        points = (point for point in self.plan.points if point.point_id in left)
        return replace(self.plan, points=tuple(points))


def _finish_run(run: Run, plan: Plan, ended: Mapping[TrialKey, Status]) -> Run:
    """Return the run with the counts of its points and its status: failed if one failed, else ok.

    ended: how the trials ended; others and cancelled ones are not counted, so a run that was cut
    short may be ok. In a batch search, points out of memory count as failed, but it stays ok.
    """
    statuses = by_point(ended)
    run = reader.count_points(run, statuses)
    failures = {status for status in statuses.values() if status.is_failure}
    is_ok = plan.batch_search and failures <= {Status.OOM}
    return replace(run, status=RunStatus.OK) if is_ok else run


class RunRows:
    """Writes the tables of a run. left: keys of the trials that the sweep still has to finish."""

    def __init__(self, start: RunState, store: RunStore, listener: Listener) -> None:
        self.start = start
        self.store = store
        self.listener = listener
        self.left = set(start.todo)
        self._ended = dict(start.ended)
        self._known = set(start.devices)
        self._run = start.run
        # A clock that is set back must not make the run end before it began.
        self._began = datetime.now(UTC), time.monotonic()
        self._points = {point.point_id for point in start.plan.points}
        self._is_told = False

    def keep_devices(self, devices: Sequence[Device]) -> None:
        """Write the devices of which the run has no row yet.

        Raises ClusterError, before it writes, if a resumed run has devices, and one of these is of
        another model than all of them; ResultsError where the folder cannot be written.
        """
        strange = {device.name for device in devices} - self.start.models
        if self.start.models and strange:
            raise ClusterError(
                f"run {self.store.run_id} was measured on "
                f"{', '.join(sorted(self.start.models))}, this cluster has "
                f"{', '.join(sorted(strange))}; start a new run, to compare the two"
            )
        new = {_device_key(d.kind, d.uuid, d.host, d.index): d for d in devices}
        new = {key: device for key, device in new.items() if key not in self._known}
        if not self._known:
            # CPU workers of two nodes of a host may have one key, and each has its row.
            self.store.write_devices(devices)
        elif new:
            self.store.write_devices(list(new.values()), f"devices-{len(self._known)}")
        self._known.update(new)

    def keep_records(self, batch: Sequence[tuple[int, Record]], cluster: Cluster) -> None:
        """Write a batch as for `RunStore.write_records`, new devices, and the devices' new samples.

        batch: one attempt or more. A record that cannot be kept gets status error, and the user is
        told. `left` is unchanged. Raises as `keep_devices`, ClusterError once records are written.
        """
        kept = self.store.write_records(batch)
        self._ended.update((record.key, record.status) for record in kept)
        for (_, measured), record in zip(batch, kept, strict=True):
            if record is not measured:
                self.listener.tell(f"point {record.point.point_id}: {record.error_message}")
        self.keep_devices(cluster.devices)
        self.store.write_telemetry(batch, cluster.telemetry())

    def note(self, event: Event) -> None:
        """Update `left` by an event of the sweep; write the run's number of points if it adds one.

        To be called with each event, in order. Raises ResultsError where it cannot be written.
        """
        if isinstance(event, RoundStarted):
            # The trials of a round are known when it begins.
            self.left = {key for key in self.left if key.round != event.round} | {*event.trials}
        elif isinstance(event, PointFinished):
            self.left.discard(event.record.key)
        elif isinstance(event, PointAdded):
            point_id = event.point.point_id
            self.left.add(TrialKey(point_id, event.round))
            if point_id not in self._points:
                self._points.add(point_id)
                self._keep_total(self._run.points_total + 1)

    def adopt(self, rounds: Rounds) -> None:
        """Replace `start` by one with these rounds, whose points depend on devices known by now.

        To be called before the first attempt: `left` begins anew. Their seed stays. Writes the row
        of the run, with its number of points; raises ResultsError where it cannot.
        """
        self.start = replace(self.start, rounds=rounds)
        self.left = set(self.start.todo)
        self._points = {point.point_id for point in rounds.plan.points}
        self._keep_total(len(self._points))

    def _keep_total(self, points: int) -> None:
        self._run = replace(self._run, points_total=points)
        self.store.write_run(self._run)

    def close(self, status: RunStatus | None = None) -> Run:
        """Write how the run ended, and its summary; return it. status: None: by its points.

        With None the row of a run that was cut short stays `interrupted`, unlike the result, while
        trials that `--filter` leaves out have not ended. Raises ResultsError if it cannot write.
        """
        run = _finish_run(self._run, self.start.plan, self._ended)
        began_at, began_s = self._began
        finished_at = began_at + timedelta(seconds=time.monotonic() - began_s)
        run = replace(run, status=status or run.status, finished_at=finished_at)
        is_over = status or not self.start.was_cut_short or _is_whole(self.start, run, self._ended)
        _write_end(self.store, run if is_over else replace(run, status=RunStatus.INTERRUPTED))
        return run

    def forget(self) -> None:
        """Delete a new run, before its first record; `close` a resumed one as interrupted."""
        if self.start.is_resumed:
            self.close(RunStatus.INTERRUPTED)
        else:
            self.store.remove()

    def tell_kept(self, what: str) -> None:
        """Tell the user once what is kept of a run that was cut short, and how to resume it.

        The latter if trials are `left`. what: how the run ended, as "interrupted".
        """
        if self._is_told:
            return
        self._is_told = True
        text = f"{what} before any point finished"
        # As `raybench list` counts them: a point that was cut short is not finished.
        run = reader.count_points(self._run, by_point(self._ended))
        told = {"ok": run.points_ok, "failed": run.points_failed, "skipped": run.points_skipped}
        if count := sum(told.values()):
            points = "point is" if count == 1 else "points are"
            each = ", ".join(f"{count} {word}" for word, count in told.items() if count)
            ended = f" ({each})" if run.points_ok < count else ""
            words = ("raybench", "report", self.store.run_id, "--results", str(self.store.root))
            text = f"{what}: {count} finished {points} kept{ended}; see: `{shlex.join(words)}`"
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
    """Return the state of a new run with a new id, of which nothing is done. Writes nothing.

    argv: the command line, whose `--set` a resumed run takes over. resume_command: from the run id
    makes the command that resumes it. Raises UsageError as `code_of_job`.
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
    """Return the rounds that the job asks for; seed 0, in place of which a run puts its own."""
    has_controls = job.placement.isolation == "cluster"
    return Rounds(plan=plan, count=job.measure.rounds, has_controls=has_controls)


def code_of_job(job: Job) -> Code:
    """Return the hashes of the source files of the job's workload and of raybench; imports none.

    Of a script that is not found, those of its class in raybench. Raises UsageError for a kind that
    is neither built in nor of the form package.module:Class.
    """
    script = script_path(job) if job.workload.kind == SCRIPT else None
    return code_of_script(script) if script else code_of(module_and_class(job.workload.kind)[0])


# A run that goes on: `raybench sweep --resume`.


def run_to_resume(output: Path, text: str, job: Job) -> tuple[Path, Run]:
    """Return the results folder and the run that `text` names in `output`, as `find_run` reads it.

    The folder is another one where `text` has a path. Does not hold the run. Raises ResultsError
    when no run or several are meant, its id is not its folder's name, or as `read_run` does;
    UsageError when `job` has another `meaning_sha256`.
    """
    root, run_id = reader.find_run(output, text)
    run = reader.read_run(root, run_id)
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
    """Raise UsageError, with five differences at most, if a workload file or raybench differs."""
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
    """Return the plan with the points that a search for batch sizes has added to the run, if any.

    The point that it wants next is in it too. plan: of the job, without a filter. run_id: the whole
    id. Raises ResultsError where the rows cannot be read.
    """
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
    """Return the state of a run that is resumed. Writes nothing; the run must be held (`hold_run`).

    run: of `run_to_resume`, read before that, which tells when it ended. root: the results folder.
    rounds: those of the job, with the plan of `plan_of_run`; the run's seed is put in. chosen: ids
    of the points that may be run. retry_failed: run failed trials again, not only those that were
    lost, skipped or cancelled. tags: added to the run's, in place of equal names. code: as it has
    passed `check_code`. Raises ResultsError where the rows of the run cannot be read.
    """
    latest = reader.latest(root, run.run_id)
    ended = {key: one.status for key, one in latest.items()}
    by_attempt = sorted(latest.items(), key=lambda item: item[1].attempt)
    attempts = {key.point_id: one.attempt for key, one in by_attempt}  # the largest comes last
    names = ["kind", "uuid", "host", "index"]
    table = reader.read_table(root, "devices", run.run_id).select([*names, "name"])
    devices = {_device_key(*(row[key] for key in names)): row["name"] for row in table.to_pylist()}
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
        ended=ended,
        earlier=EarlierSweeps(
            # Skipped, cancelled and lost trials are run again; other failures where it is asked.
            kept={
                key: status
                for key, status in ended.items()
                if status is Status.OK or not (retry_failed or status.is_retried)
            },
            attempts=attempts,
            chosen=chosen,
        ),
        code=code,
        devices=frozenset(devices),
        models=frozenset(devices.values()),
        is_resumed=True,
        was_cut_short=run.status is not RunStatus.OK,
        resume_command=resume_command,
    )


def nothing_left_message(start: RunState) -> str:
    """Return the message for a run without `todo`; it names --retry-failed where that runs some."""
    text = f"run {start.run.run_id}: nothing to do"
    ok = {key: status for key, status in start.earlier.kept.items() if status is Status.OK}
    if replace(start, earlier=replace(start.earlier, kept=ok)).todo:
        text += "; the points that failed: --retry-failed"
    return text


def end_of_run(start: RunState, root: Path, measure: Measure) -> Run:
    """Return a resumed run that has no `todo`, with the counts and the status of its points.

    It must be held. Writes new tags, and its end and summary if it was cut short and no trial is
    cancelled or missing, even by `--filter`. Raises ResultsError if it cannot read or write.
    """
    stored = reader.read_run(root, start.run.run_id)
    tagged = replace(stored, tags=start.run.tags)
    ended = _finish_run(tagged, start.plan, start.ended)
    store = RunStore(root=root, run_id=ended.run_id, measure=measure)
    if start.was_cut_short and _is_whole(start, stored, start.ended):
        ended = replace(ended, finished_at=stored.finished_at or datetime.now(UTC))
        _write_end(store, ended)
    elif tagged != stored:
        store.write_run(tagged)
    return ended


def _is_whole(start: RunState, run: Run, ended: Mapping[TrialKey, Status]) -> bool:
    """Return whether each trial of the run has ended, also those that `--filter` left out."""
    over = {key: status for key, status in ended.items() if status is not Status.CANCELLED}
    points = {key.point_id for key in over}
    whole = replace(start, earlier=EarlierSweeps(kept=over, chosen=points))
    return len(points) == run.points_total and not whole.todo


def _write_end(store: RunStore, run: Run) -> None:
    """Write the row of a run that has ended, and its summary."""
    from raybench.analysis.scaling import write_summary  # `raybench plan` needs no numpy

    store.write_run(run)
    write_summary(store, run)


def _difference(run: Run, job: Job) -> str:
    """Return in words which settings of the job differ from those of the run, five at most."""
    with suppress(JobError):
        before = job_from_text("job.yaml", run.job_text, overrides_in(run.argv))
        if before.meaning_sha256 == run.job_sha256:
            old, new = (dict(_leaves(one.model_dump(mode="json"))) for one in (before, job))
            return _few(
                [
                    f"{key} was {old.get(key, 'not set')}, is {new.get(key, 'not set')}"
                    for key in dict.fromkeys([*old, *new])
                    if old.get(key) != new.get(key) and key.split(".")[0] not in NOT_MEASURED
                ]
            )
    return "its --set overrides, or what this version of raybench takes as defaults, differ"


def _few(differences: Sequence[str]) -> str:
    """Return the first five differences on one line, and how many more there are."""
    more = len(differences) - _MOST_DIFFERENCES
    told = ", ".join(differences[:_MOST_DIFFERENCES])
    return f"{told} and {more} more" if more > 0 else told


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings in nested mappings, each with its dotted key."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
