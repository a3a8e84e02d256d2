"""A run: how it begins or is resumed, and what a sweep writes of it and tells the user."""

from __future__ import annotations

import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from raybench.sweep.batch_search import with_probes
from raybench.sweep.loop import Event, PointAdded, PointFinished, RoundStarted
from raybench.sweep.rounds import Rounds

_MOST_DIFFERENCES = 5


class ProgressDisplay(Protocol):
    """Shows the events of a sweep as they come."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None:
        """Show one more event, inside the `with` block."""


class Listener(Protocol):
    """Shows a sweep to the user; the sweep itself prints nothing."""

    def tell(self, line: str) -> None:
        """Show a line that stays visible; any thread may call it."""

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Return a context that shows `what` on a terminal, such as "connecting to Ray"."""

    def progress(self, plan: Plan, trials: int) -> ProgressDisplay:
        """Return the progress display of a sweep.

        Args:
            trials: how many trials the sweep will run, as far as known.
        """

    def show_cursor(self) -> None:
        """Show the cursor, which a spinner hides; called before the process is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTarget:
    """Where a run is carried out, and where its tables go."""

    # As `address` of `raybench.cluster.connect`.
    address: str
    device: Literal["auto", "cuda", "cpu"]
    # The results folder.
    output: Path
    # Ids of the points to profile.
    profiled: frozenset[str]
    # How long to wait for the devices of the biggest point, and for other sweeps to end.
    wait_s: float = 0.0
    # Measure beside other sweeps on the same devices.
    shared: bool = False
    # The devices to use; None: all.
    only: DeviceList | None = None


DeviceKey = tuple[str, str, int]


def _device_key(kind: str, uuid: str, host: str, index: int) -> DeviceKey:
    """Return a key of the device that is the same in all sweeps of a run.

    The uuid of a CPU worker names a process, so two nodes of a host may share a key.
    """
    return (kind, uuid, 0) if kind == "cuda" else (kind, host, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run as it is before a sweep; `Rounds.todo` is what the sweep has to do."""

    run: Run
    rounds: Rounds
    # How the trials ended that have a row; `Rounds.kept` has those that are not run again.
    ended: Mapping[TrialKey, Status] = field(default_factory=dict)
    # Source files that the workers must have.
    code: Code | None = None
    # Devices that have a row, and their models.
    devices: frozenset[DeviceKey] = frozenset()
    models: frozenset[str] = frozenset()
    is_resumed: bool
    # The run is resumed, and its last sweep did not end ok.
    was_cut_short: bool = False
    # The command that resumes the run.
    resume_command: str


def _finish_run(run: Run, plan: Plan, ended: Mapping[TrialKey, Status]) -> Run:
    """Return the run with the counts of its points and its status."""
    statuses = by_point(ended)
    run = reader.count_points(run, statuses)
    failures = {status for status in statuses.values() if status.is_failure}
    # A batch search looks for the batch that runs out of memory.
    is_ok = plan.batch_search and failures <= {Status.OOM}
    return replace(run, status=RunStatus.OK) if is_ok else run


class RunRows:
    """Writes the tables of a run, and tells the user what is kept of it."""

    def __init__(self, start: RunState, store: RunStore, listener: Listener) -> None:
        self.start = start
        self.store = store
        self.listener = listener
        # Trials that the sweep still has to finish.
        self.left = set(start.rounds.todo)
        self._ended = dict(start.ended)
        self._device_keys = set(start.devices)
        self._run = start.run
        # Add monotonic time to the start: the wall clock may be set back meanwhile.
        self._began = datetime.now(UTC), time.monotonic()
        self._point_ids = {point.point_id for point in start.rounds.plan.points}
        self._has_told = False

    def keep_devices(self, devices: Sequence[Device]) -> None:
        """Write the devices that have no row yet.

        Raises:
            ClusterError: a resumed run has no device of the model of one of these.
            ResultsError: the folder cannot be written.
        """
        strange = {device.name for device in devices} - self.start.models
        if self.start.models and strange:
            raise ClusterError(
                f"run {self.store.run_id} was measured on "
                f"{', '.join(sorted(self.start.models))}, this cluster has "
                f"{', '.join(sorted(strange))}; start a new run, to compare the two"
            )
        new = {_device_key(d.kind, d.uuid, d.host, d.index): d for d in devices}
        new = {key: device for key, device in new.items() if key not in self._device_keys}
        if not self._device_keys:
            # Write all, not `new`: CPU workers of two nodes of a host may share a key.
            self.store.write_devices(devices)
        elif new:
            self.store.write_devices(list(new.values()), f"devices-{len(self._device_keys)}")
        self._device_keys.update(new)

    def keep_records(self, batch: Sequence[tuple[int, Record]], cluster: Cluster) -> None:
        """Write (index, record) of attempts, new devices, and new samples of the devices.

        A record that cannot be kept gets status error, and the user is told.

        Raises:
            ClusterError: see `keep_devices`; the records are written first.
            ResultsError: the folder cannot be written.
        """
        kept = self.store.write_records(batch)
        self._ended.update((record.key, record.status) for record in kept)
        for (_, measured), record in zip(batch, kept, strict=True):
            if record is not measured:
                self.listener.tell(f"point {record.point.point_id}: {record.error_message}")
        self.keep_devices(cluster.devices)
        self.store.write_telemetry(batch, cluster.telemetry())

    def note(self, event: Event) -> None:
        """Update `left` and the number of points of the run; call it with each event, in order."""
        if isinstance(event, RoundStarted):
            # Failures of earlier rounds may have shortened the round.
            self.left = {key for key in self.left if key.round != event.round} | {*event.trials}
        elif isinstance(event, PointFinished):
            self.left.discard(event.record.key)
        elif isinstance(event, PointAdded):
            point_id = event.point.point_id
            self.left.add(TrialKey(point_id, event.round))
            if point_id not in self._point_ids:
                self._point_ids.add(point_id)
                self._keep_total(self._run.points_total + 1)

    def adopt(self, rounds: Rounds) -> None:
        """Replace the rounds of the run; call it before the first attempt."""
        self.start = replace(self.start, rounds=rounds)
        self.left = set(rounds.todo)
        self._point_ids = {point.point_id for point in rounds.plan.points}
        self._keep_total(len(self._point_ids))

    def _keep_total(self, points: int) -> None:
        self._run = replace(self._run, points_total=points)
        self.store.write_run(self._run)

    def close(self, status: RunStatus | None = None) -> Run:
        """Write how the run ended, and its summary; return the run.

        Args:
            status: None derives it from the points. The row of a resumed run then stays
                `interrupted` while trials that `--filter` leaves out have not ended.
        """
        run = _finish_run(self._run, self.start.rounds.plan, self._ended)
        began_at, began_s = self._began
        finished_at = began_at + timedelta(seconds=time.monotonic() - began_s)
        run = replace(run, status=status or run.status, finished_at=finished_at)
        is_over = status or not self.start.was_cut_short or _is_whole(self.start, run, self._ended)
        _write_end(self.store, run if is_over else replace(run, status=RunStatus.INTERRUPTED))
        return run

    def forget(self) -> None:
        """Delete a new run that has no record; close a resumed run as interrupted."""
        if self.start.is_resumed:
            self.close(RunStatus.INTERRUPTED)
        else:
            self.store.remove()

    def tell_kept(self, what: str) -> None:
        """Tell the user once what is kept of a run that was cut short, and how to resume it.

        Args:
            what: how the run ended, such as "interrupted".
        """
        if self._has_told:
            return
        self._has_told = True
        text = f"{what} before any point finished"
        # Count as `raybench list` does: a point that was cut short is not finished.
        run = reader.count_points(self._run, by_point(self._ended))
        counts = {"ok": run.points_ok, "failed": run.points_failed, "skipped": run.points_skipped}
        if total := sum(counts.values()):
            points = "point is" if total == 1 else "points are"
            parts = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
            ended = f" ({parts})" if run.points_ok < total else ""
            words = ("raybench", "report", self.store.run_id, "--results", str(self.store.root))
            text = f"{what}: {total} finished {points} kept{ended}; see: `{shlex.join(words)}`"
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
    """Return the state of a new run with a new id; writes nothing.

    Args:
        argv: the command line; a resumed run takes over its `--set`.
        resume_command: returns the command that resumes the run with this id.

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
    )
    return RunState(
        run=run,
        code=code,
        rounds=replace(rounds_of_job(job, plan), seed=run.seed or 0),
        is_resumed=False,
        resume_command=resume_command(run.run_id),
    )


def rounds_of_job(job: Job, plan: Plan) -> Rounds:
    """Return the rounds that the job asks for, without the seed of a run."""
    has_controls = job.placement.isolation == "cluster"
    return Rounds(plan=plan, count=job.measure.rounds, has_controls=has_controls)


def code_of_job(job: Job) -> Code:
    """Return the hashes of the source files of the job's workload and of raybench.

    The files are not imported.

    Raises:
        UsageError: the kind is neither built in nor of the form package.module:Class.
    """
    script = script_path(job) if job.workload.kind == SCRIPT else None
    return code_of_script(script) if script else code_of(module_and_class(job.workload.kind)[0])


# A resumed run: `raybench sweep --resume`.


def run_to_resume(output: Path, text: str, job: Job) -> tuple[Path, Run]:
    """Return the results folder and the run that `text` names; does not hold the run.

    Args:
        output: the results folder, unless `text` has a path.
        text: as for `find_run`.

    Raises:
        ResultsError: there is no such run or several, or it cannot be read.
        UsageError: the job of the run has another meaning.
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
    """Raise UsageError if a file of the workload or of raybench is not as in the run."""
    differences = []
    for name in differing(run.workload_files, code.workload):
        if name not in run.workload_files:
            differences.append(f"{name} is new")
        else:
            differences.append(f"{name} {'has changed' if name in code.workload else 'is gone'}")
    if run.raybench_sha256 != code.raybench_sha256:
        differences.append("raybench itself has changed")
    if differences:
        raise UsageError(
            f"--resume {run.run_id}: the code is not that of the run: {_list_few(differences)}; "
            "resume it with the same code, or start a new run"
        )


def plan_of_run(plan: Plan, root: Path, run_id: str) -> Plan:
    """Return the plan of the job with the points that a batch search has added to the run.

    Raises:
        ResultsError: the rows of the run cannot be read.
    """
    latest = reader.latest(root, run_id)
    first_round = {key.point_id: row.status for key, row in latest.items() if key.round == 1}
    return with_probes(plan, first_round)


def resume_run(
    run: Run,
    rounds: Rounds,
    root: Path,
    code: Code,
    resume_command: str,
    *,
    retry_failed: bool,
) -> RunState:
    """Return the state of a run that is resumed; writes nothing. The run must be held.

    Args:
        run: the run as it was before it was held; `finished_at` says when it ended.
        rounds: those of the job, with the plan of `plan_of_run` and the points that may run.
        root: the results folder.
        code: has passed `check_code`.
        retry_failed: run all failed trials again, not only those that were lost, skipped or
            cancelled.

    Raises:
        ResultsError: the rows of the run cannot be read.
    """
    latest = reader.latest(root, run.run_id)
    ended = {key: row.status for key, row in latest.items()}
    kept = {}
    for key, status in ended.items():
        if status is Status.OK or not (retry_failed or status.is_retried):
            kept[key] = status
    attempts: dict[str, int] = {}
    for key, row in latest.items():
        attempts[key.point_id] = max(row.attempt, attempts.get(key.point_id, 0))
    names = ["kind", "uuid", "host", "index"]
    table = reader.read_table(root, "devices", run.run_id).select([*names, "name"])
    devices = {}
    for device in table.to_pylist():
        devices[_device_key(*(device[name] for name in names))] = device["name"]
    # If the driver was killed, `finished_at` is its last sign of life. If it is missing, the pause
    # counts as 0: another host may still work on the run.
    ended_at = run.finished_at or datetime.now(UTC)
    pause_s = max(0.0, (datetime.now(UTC) - ended_at).total_seconds())
    # A run with a filter gets more points when it is resumed without the filter.
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
        devices=frozenset(devices),
        models=frozenset(devices.values()),
        is_resumed=True,
        was_cut_short=run.status is not RunStatus.OK,
        resume_command=resume_command,
    )


def nothing_left_message(start: RunState) -> str:
    """Return the message for a run without trials to do."""
    text = f"run {start.run.run_id}: nothing to do"
    ok = {key: status for key, status in start.rounds.kept.items() if status is Status.OK}
    if replace(start.rounds, kept=ok).todo:
        text += "; the points that failed: --retry-failed"
    return text


def end_of_run(start: RunState, root: Path, measure: Measure) -> Run:
    """Return a resumed run without trials to do, with the counts and the status of its points.

    The run must be held. Writes new tags; and the end of a run that was cut short if all its trials
    have ended, including those that `--filter` leaves out.

    Raises:
        ResultsError: the run cannot be read or written.
    """
    stored = reader.read_run(root, start.run.run_id)
    tagged = replace(stored, tags=start.run.tags)
    ended = _finish_run(tagged, start.rounds.plan, start.ended)
    store = RunStore(root=root, run_id=ended.run_id, measure=measure)
    if start.was_cut_short and _is_whole(start, stored, start.ended):
        ended = replace(ended, finished_at=stored.finished_at or datetime.now(UTC))
        _write_end(store, ended)
    elif tagged != stored:
        store.write_run(tagged)
    return ended


def _is_whole(start: RunState, run: Run, ended: Mapping[TrialKey, Status]) -> bool:
    """Return whether all trials have ended, including those that `--filter` leaves out."""
    over = {key: status for key, status in ended.items() if status is not Status.CANCELLED}
    point_ids = {key.point_id for key in over}
    whole = replace(start.rounds, kept=over, chosen=point_ids)
    return len(point_ids) == run.points_total and not whole.todo


def _write_end(store: RunStore, run: Run) -> None:
    """Write the row of a run that has ended, and its summary."""
    from raybench.analysis.scaling import write_summary  # `raybench plan` needs no numpy

    store.write_run(run)
    write_summary(store, run)


def _difference(run: Run, job: Job) -> str:
    """Return in words which settings of the job differ from those of the run."""
    with suppress(JobError):
        before = job_from_text("job.yaml", run.job_text, overrides_in(run.argv))
        if before.meaning_sha256 == run.job_sha256:
            old = dict(_leaves(before.model_dump(mode="json")))
            new = dict(_leaves(job.model_dump(mode="json")))
            differences = []
            for key in dict.fromkeys([*old, *new]):
                if old.get(key) != new.get(key) and key.split(".")[0] not in NOT_MEASURED:
                    was, now = old.get(key, "not set"), new.get(key, "not set")
                    differences.append(f"{key} was {was}, is {now}")
            return _list_few(differences)
    return "its --set overrides, or what this version of raybench takes as defaults, differ"


def _list_few(differences: Sequence[str]) -> str:
    """Return the first five differences on one line, and the number of the others."""
    more = len(differences) - _MOST_DIFFERENCES
    text = ", ".join(differences[:_MOST_DIFFERENCES])
    return f"{text} and {more} more" if more > 0 else text


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting in nested mappings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
