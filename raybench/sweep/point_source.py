"""Sources of points that are added to a running sweep: the searches of a job, or a health check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raybench.cluster import Cluster
from raybench.job.model import Measure
from raybench.job.plan import varying_settings
from raybench.job.point import Point
from raybench.records.record import Record
from raybench.records.status import Status
from raybench.sweep.batch_search import first_points, series_search, with_batch
from raybench.sweep.rounds import Rounds


class PointSource:
    """Adds points to a running sweep; called in the main thread. The base class adds none."""

    def rounds(self, cluster: Cluster) -> Rounds | None:
        """Return new rounds for the run, or None; called when the workers have started."""
        return None

    def measure_of(self, point: Point) -> Measure | None:
        """Return how to measure this point; None means `SweepSettings.measure`."""
        return None

    def note(self, record: Record) -> None:
        """Receive the record of an attempt that has ended or was skipped."""

    def follow_ups(self, record: Record) -> Sequence[Point]:
        """Return the points to add after a point of round 1 has ended."""
        return ()

    def further_round(self, number: int) -> Sequence[Point]:
        """Return the points of one more round; without points the run ends."""
        return ()

    def last_lines(self) -> Iterable[str]:
        """Return lines for the user at the end of the run."""
        return ()


class BatchSearches(PointSource):
    """The batch searches of a plan; adds nothing to a plan without a search."""

    def __init__(self, rounds: Rounds) -> None:
        self._plan = rounds.plan
        # point_id -> status in round 1, in which all searches run.
        self._statuses: dict[str, Status] = {}
        # A resumed run keeps trials of earlier sweeps.
        for trial, status in rounds.kept.items():
            if trial.round == 1:
                self._statuses[trial.point_id] = status
        # Ids of the points that were planned or added.
        self._planned_ids = {point.point_id for point in self._plan.points}

    def follow_ups(self, record: Record) -> tuple[Point, ...]:
        """Note how a point ended, and return the next point of its series if there is one."""
        search = self._plan.batch_search
        if search is None:
            return ()
        self._statuses[record.point.point_id] = record.status
        first = with_batch(record.point, search.start)
        probes = series_search(search, first, self._statuses).probes
        new_points = tuple(probe for probe in probes if probe.point_id not in self._planned_ids)
        self._planned_ids.update(point.point_id for point in new_points)
        return new_points

    def last_lines(self) -> list[str]:
        """Return a line for each search that failed: its settings, and why it failed."""
        search = self._plan.batch_search
        if search is None:
            return []
        names = [name for name in varying_settings(self._plan.points) if name != "batch_size"]
        lines = []
        for first in first_points(search, self._plan.points):
            next_batch_or_failure = series_search(search, first, self._statuses).step
            if isinstance(next_batch_or_failure, str):
                settings = "".join(f" {name}={first.settings.get(name)}" for name in names)
                lines.append(f"batch_size: auto{settings}: {next_batch_or_failure}")
        return lines
