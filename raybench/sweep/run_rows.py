"""Write the tables of a run while its sweep runs, and the row that says how the run ended."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from raybench.cluster import Cluster
from raybench.errors import ClusterError
from raybench.job.model import Measure
from raybench.job.plan import Plan
from raybench.records.device import Device
from raybench.records.record import Record, TrialKey, status_by_point
from raybench.records.status import RunStatus, Status
from raybench.results import reader
from raybench.results.tables import Run
from raybench.results.writer import RunStore
from raybench.sweep.listener import Listener
from raybench.sweep.loop import Event, PointAdded, PointFinished, RoundStarted
from raybench.sweep.rounds import Rounds
from raybench.sweep.run_state import RunState, device_key


class RunRows:
    """Writes the tables of a run while its sweep runs."""

    def __init__(self, start: RunState, store: RunStore, listener: Listener) -> None:
        self.start = start
        self.store = store
        self.listener = listener
        # Trials that the sweep still has to finish.
        self.unfinished = set(start.rounds.todo)
        # Trial -> its last status.
        self._ended = dict(start.ended)
        # Keys of the devices that have a row.
        self._device_keys = set(start.devices)
        self._run = start.run
        # The wall clock may be set back, so keep the monotonic time too.
        self._start_times = datetime.now(UTC), time.monotonic()
        self._point_ids = {point.point_id for point in start.rounds.plan.points}
        self._has_told_kept_points = False

    def keep_devices(self, devices: Sequence[Device]) -> None:
        """Write the devices that have no row yet.

        Raises:
            ClusterError: a resumed run has measured other models of devices.
            ResultsError: the folder cannot be written.
        """
        other_models = {device.name for device in devices} - self.start.models
        if self.start.models and other_models:
            raise ClusterError(
                f"run {self.store.run_id} was measured on "
                f"{', '.join(sorted(self.start.models))}, this cluster has "
                f"{', '.join(sorted(other_models))}; start a new run, to compare the two"
            )
        new_devices = {}  # device key -> device
        for device in devices:
            key = device_key(device.kind, device.uuid, device.host, device.index)
            if key not in self._device_keys:
                new_devices[key] = device
        if not self._device_keys:
            # Not `new_devices`, because CPU workers may share a key: see `device_key`.
            self.store.write_devices(devices)
        elif new_devices:
            name = f"devices-{len(self._device_keys)}"
            self.store.write_devices(list(new_devices.values()), name)
        self._device_keys.update(new_devices)

    def keep_records(self, batch: Sequence[tuple[int, Record]], cluster: Cluster) -> None:
        """Write the records of attempts, new devices, and new telemetry of the devices.

        Args:
            batch: (index of the trial in the run, record) of each attempt.

        Raises:
            ClusterError, ResultsError: see `keep_devices`.
        """
        written = self.store.write_records(batch)
        self._ended.update((record.key, record.status) for record in written)
        for (_, given_record), record in zip(batch, written, strict=True):
            # A record that cannot be written is replaced by a record of this error.
            if record is not given_record:
                self.listener.tell(f"point {record.point.point_id}: {record.error_message}")
        self.keep_devices(cluster.devices)
        self.store.write_telemetry(batch, cluster.telemetry())

    def note(self, event: Event) -> None:
        """Update `unfinished` and the number of points; must get all events in order."""
        if isinstance(event, RoundStarted):
            # `event.trials` leaves out points that failed in earlier rounds.
            in_other_rounds = {key for key in self.unfinished if key.round != event.round}
            self.unfinished = in_other_rounds | {*event.trials}
        elif isinstance(event, PointFinished):
            self.unfinished.discard(event.record.key)
        elif isinstance(event, PointAdded):
            point_id = event.point.point_id
            self.unfinished.add(TrialKey(point_id, event.round))
            if point_id not in self._point_ids:
                self._point_ids.add(point_id)
                self._write_total(self._run.points_total + 1)

    def replace_rounds(self, rounds: Rounds) -> None:
        """Replace the rounds of the run, before the first attempt."""
        self.start = replace(self.start, rounds=rounds)
        self.unfinished = set(rounds.todo)
        self._point_ids = {point.point_id for point in rounds.plan.points}
        self._write_total(len(self._point_ids))

    def _write_total(self, points: int) -> None:
        self._run = replace(self._run, points_total=points)
        self.store.write_run(self._run)

    def close(self, status: RunStatus | None = None) -> Run:
        """Write how the run ended, and its summary; return the run.

        Args:
            status: None derives the status from the points.
        """
        run = _with_outcome(self._run, self.start.rounds.plan, self._ended)
        began_at, began_s = self._start_times
        finished_at = began_at + timedelta(seconds=time.monotonic() - began_s)
        run = replace(run, status=status or run.status, finished_at=finished_at)
        written_run = run
        if not status and self.start.was_cut_short and not _has_ended(self.start, run, self._ended):
            # `--filter` leaves out trials that have not ended, so the run can be resumed again.
            written_run = replace(run, status=RunStatus.INTERRUPTED)
        _write_end(self.store, written_run)
        return run

    def undo_start(self) -> None:
        """Delete a new run, which has no record; close a resumed run as interrupted."""
        if self.start.is_resumed:
            self.close(RunStatus.INTERRUPTED)
        else:
            self.store.remove()

    def tell_kept(self, what: str) -> None:
        """Tell the user, once, which points are kept and how to resume the run.

        Args:
            what: how the run ended, such as "interrupted".
        """
        if self._has_told_kept_points:
            return
        self._has_told_kept_points = True
        text = f"{what} before any point finished"
        # Points that were cut short do not count as finished, as in `raybench list`.
        run = reader.count_points(self._run, status_by_point(self._ended))
        counts = {"ok": run.points_ok, "failed": run.points_failed, "skipped": run.points_skipped}
        if total := sum(counts.values()):
            points = "point is" if total == 1 else "points are"
            count_words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
            details = f" ({count_words})" if run.points_ok < total else ""
            command = ("raybench", "report", self.store.run_id, "--results", str(self.store.root))
            text = f"{what}: {total} finished {points} kept{details}; see: `{shlex.join(command)}`"
        if self.unfinished:
            self.listener.tell(f"go on with: {self.start.resume_command}")
        self.listener.tell(text)


def finish_without_trials(start: RunState, root: Path, measure: Measure) -> Run:
    """Write new tags and the end of a resumed run that has no trials to do; return the run.

    The end is written only if the trials that `--filter` leaves out have ended too. The caller must
    hold the run.

    Raises:
        ResultsError: the run cannot be read or written.
    """
    stored = reader.read_run(root, start.run.run_id)
    tagged = replace(stored, tags=start.run.tags)
    with_outcome = _with_outcome(tagged, start.rounds.plan, start.ended)
    store = RunStore(root=root, run_id=stored.run_id, measure=measure)
    if start.was_cut_short and _has_ended(start, stored, start.ended):
        # The last sweep was cut short after its last trial.
        ended_run = replace(with_outcome, finished_at=stored.finished_at or datetime.now(UTC))
        _write_end(store, ended_run)
        return ended_run
    # The end is stored already, or trials outside of `--filter` remain: write only new tags.
    if tagged != stored:
        store.write_run(tagged)
    return with_outcome


def _has_ended(start: RunState, run: Run, ended: Mapping[TrialKey, Status]) -> bool:
    """Return whether all trials have ended, including trials that `--filter` leaves out."""
    # A cancelled trial was cut short, so it must run again.
    complete = {key: status for key, status in ended.items() if status is not Status.CANCELLED}
    point_ids = {key.point_id for key in complete}
    # `chosen` has the points that may run. Replace the points of `--filter` by all points that have
    # a complete trial; `has_all_points` checks that no other points exist.
    without_filter = replace(start.rounds, kept=complete, chosen=point_ids)
    has_all_points = len(point_ids) == run.points_total
    return has_all_points and not without_filter.todo


def _write_end(store: RunStore, run: Run) -> None:
    """Write the row of a run that has ended, and its summary."""
    from raybench.analysis.scaling import write_summary  # `raybench plan` needs no numpy

    store.write_run(run)
    write_summary(store, run)


def _with_outcome(run: Run, plan: Plan, ended: Mapping[TrialKey, Status]) -> Run:
    """Return the run with the counts of its points and the status that follows."""
    statuses = status_by_point(ended)
    run = reader.count_points(run, statuses)
    failures = {status for status in statuses.values() if status.is_failure}
    # A batch search ends when a batch runs out of memory, so this is no failure.
    has_only_expected_failures = plan.batch_search and failures <= {Status.OOM}
    return replace(run, status=RunStatus.OK) if has_only_expected_failures else run
