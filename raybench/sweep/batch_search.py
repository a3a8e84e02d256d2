"""`batch_size: auto`: which batch size comes next, until the largest that fits is known.

Each series of the plan is searched by itself: the batch is doubled until memory runs out or `max`
is reached, then bisected between the largest that fits and the smallest that does not, until they
are within 1 % or one item. Where the first batch does not fit, it is bisected down to 1. A failure
that says nothing of memory, as a timeout, ends a search. All that a search knows follows from the
statuses of its points, so it goes on when a run does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raybench.errors import UsageError
from raybench.job.model import BatchSearch
from raybench.job.plan import Plan, varying_settings
from raybench.job.point import Point
from raybench.records import Record, Status

# The range of the setting batch_size.
_MOST = 2**31 - 1
_INT64_MAX = 2**63 - 1  # what the result tables can hold
# Of the largest batch that fits: as near as the smallest that does not must come.
_RESOLUTION = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The end of a search: the largest batch size that fits, and the smallest that does not."""

    largest: int
    ran_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a search that did not find its batch, and why."""

    reason: str


Step = int | Found | Ended


def next_batch(start: int, most: int, outcomes: Mapping[int, Status]) -> Step:
    """Return the batch size to try next (an int), or how the search ended (Found or Ended).

    start: the batch size to begin with. most: no batch above it is tried. outcomes: batch size ->
    how its point ended, of this series alone.
    """
    ran_out = min((b for b, status in outcomes.items() if status is Status.OOM), default=None)
    below = {b: status for b, status in outcomes.items() if ran_out is None or b < ran_out}
    for batch, status in sorted(below.items()):
        if status is not Status.OK:
            return Ended(reason=f"batch_size {batch:,} ended {status.value}")
    fits = max(below, default=0)
    if ran_out is None:
        if fits >= most:
            return Ended(reason=f"batch_size {fits:,} fits, and no larger one may be tried")
        return min(2 * fits, most) if fits else start
    if not is_found(fits, ran_out):
        return (fits + ran_out) // 2
    if fits:
        return Found(largest=fits, ran_out=ran_out)
    return Ended(reason="not even batch_size 1 fits")


def is_found(fits: int, ran_out: int) -> bool:
    """Return whether the largest batch that fits is within 1 % of the smallest that does not."""
    return ran_out - fits <= max(1, int(_RESOLUTION * fits))


def check_bounded(plan: Plan, kind: Literal["cuda", "cpu"]) -> None:
    """Raise UsageError for a search without a maximum on CPU workers: it would fill the host."""
    search = plan.batch_search
    if search is None or search.max is not None or kind == "cuda":
        return
    raise UsageError(
        "matrix.batch_size: auto on CPU workers would fill the host's memory; give a maximum, "
        f"as in --set 'matrix.batch_size={{start: {search.start}, max: {16 * search.start}}}'"
    )


def with_probes(plan: Plan, statuses: Mapping[str, Status]) -> Plan:
    """Return the plan of a resumed run, with the points that its searches added, at the end.

    statuses: how the latest attempt at each point ended that has a row, by id, in the order of the
    rows. The batch that a search wants next is added too.
    """
    search = plan.batch_search
    if search is None:
        return plan
    order = {point_id: place for place, point_id in enumerate(statuses)}
    probes = [point for first in plan.points for point in _follow(search, first, statuses)[0]]
    probes.sort(key=lambda probe: order.get(probe.point_id, len(order)))
    return replace(plan, points=(*plan.points, *probes))


def largest_found(plan: Plan, outcomes: Mapping[str, Status]) -> list[Point]:
    """Return for each series the point with the largest batch that was ok so far.

    A series without one is left out. plan: one with a batch search. outcomes: point_id -> how the
    point ended.
    """
    search = plan.batch_search
    assert search is not None, "only a search finds batches"
    largest = []
    for first in _first_points(search, plan.points):
        points = [first, *_follow(search, first, outcomes)[0]]
        fitting = [point for point in points if outcomes.get(point.point_id) is Status.OK]
        largest += [max(fitting, key=lambda point: point.batch_size or 0)] if fitting else []
    return largest


class BatchSearches:
    """The searches of all series of a run; without a search in the plan nothing follows.

    plan: of `with_probes`. statuses: by point_id, of its points that are not tried again.
    """

    def __init__(self, plan: Plan, statuses: Mapping[str, Status]) -> None:
        self._plan = plan
        self._statuses = dict(statuses)
        self._asked = {point.point_id for point in plan.points}

    def follow_ups(self, record: Record) -> tuple[Point, ...]:
        """Note how a point ended; return the point to run next in its series, one at most.

        () where the search of the series is over, or its next point was returned before.
        """
        search = self._plan.batch_search
        if search is None:
            return ()
        self._statuses[record.point.point_id] = record.status
        added, _ = _follow(search, _with_batch(record.point, search.start), self._statuses)
        new = tuple(point for point in added if point.point_id not in self._asked)
        self._asked.update(point.point_id for point in new)
        return new

    def endings(self) -> Iterator[str]:
        """Yield a line for the user for each search that ended without a batch, with the reason."""
        search = self._plan.batch_search
        if search is None:
            return
        varying = [name for name in varying_settings(self._plan.points) if name != "batch_size"]
        for first in _first_points(search, self._plan.points):
            _, step = _follow(search, first, self._statuses)
            if isinstance(step, Ended):
                told = "".join(f" {name}={first.settings.get(name)}" for name in varying)
                yield f"batch_size: auto{told}: {step.reason}"


def _first_points(search: BatchSearch, points: Sequence[Point]) -> list[Point]:
    """Return the point of each series with which its search begins."""
    firsts = (_with_batch(point, search.start) for point in points)
    return list({first.point_id: first for first in firsts}.values())


def _follow(
    search: BatchSearch, first: Point, statuses: Mapping[str, Status]
) -> tuple[list[Point], Step]:
    """Return the points that a search has added to its first one, and its next step.

    The point of that step is among them. statuses: by point_id, of points that have ended.
    """
    # The range of the setting, and what the tables can hold.
    most = min(search.max or _MOST, _INT64_MAX // _share(first))
    outcomes: dict[int, Status] = {}
    # The status of a point may have changed when it was tried again. Its search went on because
    # the point was ok or ran out of memory.
    taken: dict[int, Status] = {}
    step: Step = search.start
    while isinstance(step, int) and (status := statuses.get(_with_batch(first, step).point_id)):
        outcomes[step] = status
        taken[step] = Status.OK if status is Status.OK else Status.OOM
        step = next_batch(search.start, most, taken)
    wanted = next_batch(search.start, most, outcomes)
    batches = dict.fromkeys([*outcomes, *([wanted] if isinstance(wanted, int) else [])])
    return [_with_batch(first, batch) for batch in batches if batch != search.start], wanted


def _share(point: Point) -> int:
    """Return the batches of all ranks in an optimizer step: global_batch_size / batch_size."""
    assert point.global_batch_size is not None
    assert point.batch_size is not None
    return point.global_batch_size // point.batch_size


def _with_batch(first: Point, batch_size: int) -> Point:
    return replace(first, batch_size=batch_size, global_batch_size=batch_size * _share(first))
