"""The trials of a run, round by round, and which of them a sweep has to run.

Each round runs in fresh processes, because samples from one start of the processes say nothing
about other starts (Georges et al., "Statistically rigorous Java performance evaluation", OOPSLA
2007; Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM 2013).

The points of one world_size form a block and share a process group. Each block is shuffled. Even
rounds reverse the order of the blocks: a linear drift of the machine then cancels over two rounds.
A control ends each block: the baseline point again, which shows a drift within the round.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raybench.job.plan import Plan
from raybench.job.point import Point, Precision
from raybench.records.record import TrialKey
from raybench.records.status import Status
from raybench.sweep.batch_search import SeriesKey, largest_fitting, series_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a trial."""

    # Position among all trials of the run; in a batch search, unique only within a round.
    index: int
    point: Point
    # Counts all attempts at the point, from 1; set when the attempt starts.
    number: int
    # Counts the attempts of this sweep at the trial, from 1.
    tries: int = 1
    round: int = 1
    # The world_size of the block that this control ends; 0 for other attempts.
    control_of: int = 0

    @property
    def key(self) -> TrialKey:
        """The key of the trial."""
        return TrialKey(self.point.point_id, self.round, self.control_of)

    @property
    def block(self) -> int:
        """The world_size of the block."""
        return self.control_of or self.point.world_size


def smaller_batches_first(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Sort each series by batch size, so that larger batches can be skipped after out of memory.

    Each series keeps its positions among the attempts.
    """
    # Series -> its attempts, the smallest batch first.
    by_series: defaultdict[SeriesKey, deque[Attempt]] = defaultdict(deque)
    for attempt in sorted(attempts, key=lambda attempt: attempt.point.batch_size or 0):
        by_series[series_key(attempt.point)].append(attempt)
    return [by_series[series_key(attempt.point)].popleft() for attempt in attempts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The trials of a run, and which of them a sweep has to run."""

    plan: Plan
    count: int = 1
    # Shuffles the blocks; None keeps the order of the plan.
    seed: int | None = 0
    # Only for sweeps that run one point at a time.
    has_controls: bool = True
    # Whether each round runs in new worker processes.
    in_fresh_workers: bool = True
    # Trials of earlier sweeps that are not run again.
    kept: Mapping[TrialKey, Status] = field(default_factory=dict)
    # point_id -> number of attempts in earlier sweeps.
    attempts_before: Mapping[str, int] = field(default_factory=dict)
    # Ids of points that may run; None allows all.
    chosen: Collection[str] | None = None

    @property
    def first_free_index(self) -> int:
        """The first index after all trials; invalid for a plan with a batch search."""
        return self.count * self._trials_per_round

    @property
    def todo(self) -> tuple[TrialKey, ...]:
        """The trials to run, in order; a batch search may add more."""
        todo: list[TrialKey] = []
        for number in range(1, self.count + 1):
            todo += (attempt.key for attempt in self.remaining(number, self.kept))
        return tuple(todo)

    @property
    def plan_left(self) -> Plan:
        """The plan with only the points of `todo`."""
        point_ids = {key.point_id for key in self.todo}
        points = tuple(point for point in self.plan.points if point.point_id in point_ids)
        return replace(self.plan, points=points)

    def remaining(self, number: int, ended: Mapping[TrialKey, Status]) -> list[Attempt]:
        """Return the `attempts` of a round that have to run."""
        remaining = []
        for attempt in self.attempts(number, ended):
            may_run = self.chosen is None or attempt.point.point_id in self.chosen
            if may_run and attempt.key not in self.kept:
                remaining.append(attempt)
        # A control is useless if no other attempt of its block runs.
        blocks = {attempt.block for attempt in remaining if not attempt.control_of}
        return [attempt for attempt in remaining if attempt.block in blocks]

    def attempts(self, number: int, ended: Mapping[TrialKey, Status]) -> tuple[Attempt, ...]:
        """Return the attempts of a round in order, without points that failed in earlier rounds.

        Skipped points count as failed; lost points do not.

        Args:
            number: the round, from 1.
            ended: statuses of the trials of earlier rounds.
        """
        points = self._points_of(number, ended)
        # Points that a batch search has added come after the points of the plan.
        positions = {point.point_id: index for index, point in enumerate(self.plan.points)}
        for point in points:
            positions.setdefault(point.point_id, len(positions))
        # Each round reserves an index for each point and each control of the plan.
        first_index = (number - 1) * self._trials_per_round
        attempts = []
        for point in points:
            index = first_index + positions[point.point_id]
            attempts.append(Attempt(index=index, point=point, number=1, round=number))
        if self.count == 1:
            return tuple(smaller_batches_first(attempts))

        control = self._control_point(number, points)
        # The indices of controls follow the indices of points.
        index = first_index + len(positions)
        ordered = []
        for block in self._blocks(number, attempts):
            ordered += block
            if control is not None:
                world_size = block[0].point.world_size  # of all points of the block
                control_attempt = Attempt(
                    index=index, point=control, number=1, round=number, control_of=world_size
                )
                ordered.append(control_attempt)
                index += 1
        return tuple(ordered)

    @property
    def _trials_per_round(self) -> int:
        """Upper bound: a trial for each point, and a control for each block."""
        return len(self.plan.points) + len(_world_sizes(self.plan.points))

    def _points_of(self, number: int, ended: Mapping[TrialKey, Status]) -> list[Point]:
        """Return the points of a round without controls and without points that failed before."""
        points: Sequence[Point] = self.plan.points
        if self.plan.batch_search is not None and number > 1:
            # Later rounds measure only the largest batch of each series.
            statuses = {key.point_id: status for key, status in ended.items() if key.round == 1}
            points = largest_fitting(self.plan, statuses)
        failed_ids = {
            key.point_id
            for key, status in ended.items()
            if key.round < number and not key.control_of and status.is_lasting
        }
        return [point for point in points if point.point_id not in failed_ids]

    def _blocks(self, number: int, attempts: Sequence[Attempt]) -> list[list[Attempt]]:
        """Return a block of attempts for each world_size; `seed` shuffles each block."""
        by_size: dict[int, list[Attempt]] = {size: [] for size in _world_sizes(self.plan.points)}
        for attempt in attempts:
            by_size.setdefault(attempt.point.world_size, []).append(attempt)
        blocks = [block for block in by_size.values() if block]
        if self.seed is not None:
            generator = random.Random(f"{self.seed}/{number}")
            for block in blocks:
                generator.shuffle(block)
            if number % 2 == 0:
                # A linear drift of the machine then cancels over two rounds.
                blocks.reverse()
        return blocks

    def _control_point(self, number: int, points: Sequence[Point]) -> Point | None:
        """Return the point that ends each block; None in rounds without controls."""
        is_search = self.plan.batch_search is not None and number == 1
        baseline_settings = self.plan.baseline.items()
        if not baseline_settings or is_search or not self.has_controls:
            return None
        candidates = [point for point in points if baseline_settings <= point.settings.items()]
        # Avoid fp16. Prefer large batches: their steps wait least for the host, and vary least.
        return max(
            candidates,
            key=lambda point: (point.precision is not Precision.FP16, point.batch_size or 0),
            default=None,
        )


def _world_sizes(points: Sequence[Point]) -> list[int]:
    return list(dict.fromkeys(point.world_size for point in points))
