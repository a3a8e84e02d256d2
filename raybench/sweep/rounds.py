"""Rounds: the whole plan several times, usually each time in fresh workers.

An interval from the samples of one start says nothing of other starts, so a point is started
several times (A. Georges, D. Buytaert, L. Eeckhout, "Statistically rigorous Java performance
evaluation", OOPSLA 2007; T. Kalibera, R. Jones, "Rigorous benchmarking in reasonable time", ISMM
2013). In a round the points of one world_size follow each other, so that their process group is
kept. Within such a block their order is shuffled, and the blocks run forward in one round and
backward in the next, so that a linear drift of the machine cancels over two rounds. At the end of
each block one baseline point is measured again as a control: it shows a drift within the round.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raybench.job.plan import Plan
from raybench.job.point import Point, Precision
from raybench.records import Status, TrialKey
from raybench.sweep.batch_search import largest_found
from raybench.sweep.scheduler import Attempt, smaller_batches_first

# With so many rounds, speed-ups of GPU-bound points are known to half a percent:
# docs/explanation/statistics.md.
WORTHWHILE = 3
# Between two rounds the processes of all workers are replaced: 4.5 s for two on H200s.
BETWEEN_ROUNDS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The trials of a run, round by round.

    seed: of the order of the points in each block; None keeps the order of the plan. has_controls:
    whether a control ends each block; it says something only where one point runs at a time.
    in_fresh_workers: whether each round but the first replaces the processes of all workers.
    """

    plan: Plan
    count: int = 1
    seed: int | None = 0
    has_controls: bool = True
    in_fresh_workers: bool = True

    @property
    def first_free_index(self) -> int:
        """The first index that no trial of the plan has in any round."""
        return self.count * (len(self.plan.points) + len(_blocks(self.plan.points)))

    def attempts(self, number: int, ended: Mapping[TrialKey, Status]) -> tuple[Attempt, ...]:
        """Return the trials of a round, in the order in which they are to be run.

        number: of the round, from 1. ended: how trials ended so far. A point that failed or was
        skipped in an earlier round is left out. Where batch sizes are searched, the first round
        searches, and the others measure the largest batch of each series that fits.
        With one round the order is that of the plan, smaller batches of a series first. With more,
        points are in random order within blocks of one world size, and a control, which is the
        baseline point measured once more, ends each block.
        """
        points = self._points(number, ended)
        of_plan = {point.point_id: index for index, point in enumerate(self.plan.points)}
        first = (number - 1) * (len(of_plan) + len(_blocks(self.plan.points)))
        found = (point.point_id for point in points if point.point_id not in of_plan)
        indices = of_plan | {one: index for index, one in enumerate(found, len(of_plan))}
        attempts = [
            Attempt(index=first + indices[point.point_id], point=point, number=1, round=number)
            for point in points
        ]
        if self.count == 1:
            return tuple(smaller_batches_first(attempts))
        control = self._control(points, number)
        ordered = []
        for place, block in enumerate(self._in_order(number, attempts), first + len(indices)):
            ordered += block
            if control is not None:
                of = block[0].point.world_size
                ordered.append(
                    Attempt(index=place, point=control, number=1, round=number, control_of=of)
                )
        return tuple(ordered)

    def _points(self, number: int, ended: Mapping[TrialKey, Status]) -> Sequence[Point]:
        points: Sequence[Point] = self.plan.points
        if self.plan.batch_search is not None and number > 1:
            first = {k.point_id: one for k, one in ended.items() if k.round == 1}
            points = largest_found(self.plan, first)
        stopped = {
            key.point_id
            for key, status in ended.items()
            if key.round < number and not key.control_of and status.is_lasting
        }
        return [point for point in points if point.point_id not in stopped]

    def _in_order(self, number: int, attempts: Sequence[Attempt]) -> list[list[Attempt]]:
        """Return the blocks of a round, the trials inside each shuffled.

        In rounds of even number the blocks themselves run from last to first. Without a seed all
        keep the order of the plan.
        """
        blocks: dict[int, list[Attempt]] = {size: [] for size in _blocks(self.plan.points)}
        for attempt in attempts:
            blocks.setdefault(attempt.point.world_size, []).append(attempt)
        if self.seed is None:
            return [block for block in blocks.values() if block]
        draw = random.Random(f"{self.seed}/{number}")
        for block in blocks.values():
            draw.shuffle(block)
        ordered = [block for block in blocks.values() if block]
        return ordered if number % 2 else ordered[::-1]

    def _control(self, points: Sequence[Point], number: int) -> Point | None:
        """Return the baseline point to be measured again as a control; None without controls.

        The largest batch in a precision other than fp16: its step waits least for the host, so it
        scatters least.
        """
        baseline = self.plan.baseline.items()
        there = [point for point in points if baseline and baseline <= point.settings.items()]
        is_search = self.plan.batch_search is not None and number == 1
        if not (self.has_controls and there) or is_search:
            return None
        return max(there, key=lambda p: (p.precision is not Precision.FP16, p.batch_size or 0))


def _blocks(points: Sequence[Point]) -> list[int]:
    return list(dict.fromkeys(point.world_size for point in points))
