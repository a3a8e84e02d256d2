"""What a sweep writes of a run and tells the user, and how the run ends."""

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
from raybench.records.record import Record, TrialKey, by_point
from raybench.records.status import RunStatus, Status
from raybench.results import reader
from raybench.results.tables import Run
from raybench.results.writer import RunStore
from raybench.sweep.listener import Listener
from raybench.sweep.loop import Event, PointAdded, PointFinished, RoundStarted
from raybench.sweep.rounds import Rounds
from raybench.sweep.run_state import RunState, device_key


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
            ClusterError: the run is resumed, and has no device of one of these models.
            ResultsError: the folder cannot be written.
        """
        strange = {device.name for device in devices} - self.start.models
        if self.start.models and strange:
            raise ClusterError(
                f"run {self.store.run_id} was measured on "
                f"{', '.join(sorted(self.start.models))}, this cluster has "
                f"{', '.join(sorted(strange))}; start a new run, to compare the two"
            )
        new = {device_key(d.kind, d.uuid, d.host, d.index): d for d in devices}
        new = {key: device for key, device in new.items() if key not in self._device_keys}
        if not self._device_keys:
            # Write all, not `new`: CPU workers of two nodes of a host may share a key.
            self.store.write_devices(devices)
        elif new:
            self.store.write_devices(list(new.values()), f"devices-{len(self._device_keys)}")
        self._device_keys.update(new)

    def keep_records(self, batch: Sequence[tuple[int, Record]], cluster: Cluster) -> None:
        """Write (index, record) of attempts, new devices, and new samples of the devices.

        A record that cannot be kept gets the status error.

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


def end_of_run(start: RunState, root: Path, measure: Measure) -> Run:
    """Return a resumed run without trials to do, with the counts and the status of its points.

    The run must be held. Writes new tags, and the end of the run if all its trials have ended.

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
    """Return whether all trials have ended, including trials that `--filter` leaves out."""
    over = {key: status for key, status in ended.items() if status is not Status.CANCELLED}
    point_ids = {key.point_id for key in over}
    whole = replace(start.rounds, kept=over, chosen=point_ids)
    return len(point_ids) == run.points_total and not whole.todo


def _write_end(store: RunStore, run: Run) -> None:
    from raybench.analysis.scaling import write_summary  # `raybench plan` needs no numpy

    store.write_run(run)
    write_summary(store, run)


def _finish_run(run: Run, plan: Plan, ended: Mapping[TrialKey, Status]) -> Run:
    """Return the run with the counts of its points and its status."""
    statuses = by_point(ended)
    run = reader.count_points(run, statuses)
    failures = {status for status in statuses.values() if status.is_failure}
    # A batch search looks for the batch that runs out of memory.
    is_ok = plan.batch_search and failures <= {Status.OOM}
    return replace(run, status=RunStatus.OK) if is_ok else run
