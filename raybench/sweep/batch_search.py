"""The search for the largest batch that fits (`batch_size: auto`).

A series is the points that differ only in their batch size. In the first round the batch size of
each series is doubled until memory runs out or `max` is reached, then bisected to 1 % or one item.
Any failure other than out of memory ends the search. The state of a search follows from the
statuses of its points, so a resumed run continues the search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raybench.errors import UsageError
from raybench.job.model import BatchSearch
from raybench.job.plan import Plan
from raybench.job.point import Point
from raybench.job.rounds import is_largest_known
from raybench.records.status import Status

_MOST_BATCH = 2**31 - 1  # upper bound of the setting batch_size
_INT64_MAX = 2**63 - 1  # what the result tables can hold

# The next batch size to try, the reason why the search failed, or None if it has succeeded.
Step = int | str | None
SeriesKey = tuple[object, ...]


def series_key(point: Point) -> SeriesKey:
    """Return a key that all points of a series share."""
    settings = *sorted(point.params.items()), *sorted(point.env.items())
    return (point.workload, settings, point.world_size, *point.execution.values(), point.scaling)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSearch:
    """The state of the search of one series."""

    # All points that were tried or come next, without the first point.
    probes: list[Point]
    step: Step


def next_batch(start: int, most: int, outcomes: Mapping[int, Status]) -> Step:
    """Return the next batch size to try, why the search failed, or None if the search succeeded.

    Args:
        start, most: first batch size, and upper bound.
        outcomes: batch size -> status of its point.
    """
    oom_batches = [batch for batch, status in outcomes.items() if status is Status.OOM]
    smallest_oom = min(oom_batches, default=None)
    # All batches below the smallest that was out of memory must have been ok.
    largest_ok = 0
    for batch, status in sorted(outcomes.items()):
        if batch == smallest_oom:
            break
        if status is not Status.OK:
            return f"batch_size {batch:,} ended {status.value}"
        largest_ok = batch
    if smallest_oom is None:
        if largest_ok >= most:
            return f"batch_size {largest_ok:,} fits, and no larger one may be tried"
        # Double the batch until memory runs out.
        return min(2 * largest_ok, most) if largest_ok else start
    if not is_largest_known(largest_ok, smallest_oom):
        return (largest_ok + smallest_oom) // 2  # bisect
    return None if largest_ok else "not even batch_size 1 fits"


def check_bounded(plan: Plan, kind: Literal["cuda", "cpu"]) -> None:
    """Raise UsageError for a search without a maximum on CPU workers."""
    search = plan.batch_search
    if search is None or search.max is not None or kind == "cuda":
        return
    raise UsageError(
        "matrix.batch_size: auto on CPU workers would fill the host's memory; give a maximum, "
        f"as in --set 'matrix.batch_size={{start: {search.start}, max: {16 * search.start}}}'"
    )


def with_probes(plan: Plan, statuses: Mapping[str, Status]) -> Plan:
    """Return the plan, extended by all points that its searches have tried or will try next.

    Args:
        statuses: point_id -> status in the first round, in the order of the rows.
    """
    search = plan.batch_search
    if search is None:
        return plan
    probes: list[Point] = []
    for first in plan.points:
        probes += series_search(search, first, statuses).probes
    # Points with a row come first, in the order of the rows.
    positions = {point_id: position for position, point_id in enumerate(statuses)}
    probes.sort(key=lambda probe: positions.get(probe.point_id, len(positions)))
    return replace(plan, points=(*plan.points, *probes))


def largest_fitting(plan: Plan, statuses: Mapping[str, Status]) -> list[Point]:
    """Return the point with the largest batch that was ok in each series of a search.

    Args:
        statuses: point_id -> status in the first round.
    """
    search = plan.batch_search
    assert search is not None, "only a search finds batches"
    largest = []
    for first in first_points(search, plan.points):
        points = [first, *series_search(search, first, statuses).probes]
        fitting = [point for point in points if statuses.get(point.point_id) is Status.OK]
        if fitting:
            largest.append(max(fitting, key=lambda point: point.batch_size or 0))
    return largest


def first_points(search: BatchSearch, points: Sequence[Point]) -> list[Point]:
    """Return the first point of the search of each series."""
    firsts = (with_batch(point, search.start) for point in points)
    return list({first.point_id: first for first in firsts}.values())


def series_search(
    search: BatchSearch, first: Point, statuses: Mapping[str, Status]
) -> SeriesSearch:
    """Return the state of the search that began with `first`, from the status of each point_id."""
    batches_per_step = _batches_per_step(first)
    # The global batch, `batches_per_step` times the batch, must fit into a result table.
    most = min(search.max or _MOST_BATCH, _INT64_MAX // batches_per_step)
    outcomes: dict[int, Status] = {}
    # Replay the search to find the batches that it has tried. A point that is neither ok nor oom
    # was oom when the search went on from this point, and was retried later.
    original_outcomes: dict[int, Status] = {}
    tried: Step = search.start
    while isinstance(tried, int):  # until the search has ended
        status = statuses.get(with_batch(first, tried).point_id)
        if status is None:  # not tried yet
            break
        outcomes[tried] = status
        original_outcomes[tried] = Status.OK if status is Status.OK else Status.OOM
        tried = next_batch(search.start, most, original_outcomes)
    # With the true statuses, a point that is neither ok nor oom may end the search.
    next_step = next_batch(search.start, most, outcomes)
    batches = list(outcomes)
    if isinstance(next_step, int) and next_step not in outcomes:
        batches.append(next_step)
    probes = [with_batch(first, batch) for batch in batches if batch != search.start]
    return SeriesSearch(probes=probes, step=next_step)


def _batches_per_step(point: Point) -> int:
    """Return how many batches of `batch_size` form the global batch."""
    assert point.global_batch_size is not None
    assert point.batch_size is not None
    return point.global_batch_size // point.batch_size


def with_batch(point: Point, batch_size: int) -> Point:
    """Return the point of the same series with this batch size."""
    global_batch_size = batch_size * _batches_per_step(point)
    return replace(point, batch_size=batch_size, global_batch_size=global_batch_size)
