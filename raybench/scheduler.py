"""Which point runs next, and on which workers. Pure decisions over the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raybench.cluster.ranks import Strategy, choose_seats
from raybench.plan import Plan
from raybench.point import Point
from raybench.records import Device, Latest, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Run the point on the workers of these seats, in rank order."""

    seats: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Do not run the point; the reason goes into its row."""

    error_type: str
    reason: str


Decision = Assign | Skip


def attempts_left(
    plan: Plan, latest: Mapping[str, Latest], *, retry_failed: bool
) -> dict[str, int]:
    """What a resumed run has to do: point_id -> number of the attempt to make.

    latest: by point_id. A point that was skipped or cancelled is tried again, one that failed
    only with `retry_failed`, one that is ok never.
    """
    again = {Status.SKIPPED, Status.CANCELLED}
    if retry_failed:
        again = set(Status) - {Status.OK}
    ids = (point.point_id for point in plan.points)
    return {
        point_id: latest[point_id].attempt + 1 if point_id in latest else 1
        for point_id in ids
        if point_id not in latest or latest[point_id].status in again
    }


def is_tried_again(status: Status, tries: int) -> bool:
    """Whether the same sweep tries a point again, of which the last of `tries` ended so.

    What is lost fell to its machine and seldom to the point, so that one more try is worth it.
    """
    return status is Status.LOST and tries == 1


def workers_needed(plan: Plan, capacity: int) -> int:
    """Workers for the biggest point that fits; 0 when none does."""
    return max(
        (point.world_size for point in plan.points if point.world_size <= capacity), default=0
    )


def decide(
    point: Point,
    devices: Sequence[Device],
    capacity: int,
    strategy: Strategy,
    stopped_by: str | None,
    ran_out: Sequence[Point] = (),
) -> Decision:
    """What to do with the next point of the plan.

    devices: those that have a worker, enough for every point that the cluster's capacity allows.
    stopped_by: the point_id whose failure ended a run that has `on_error: stop`.
    ran_out: points that ran out of device memory: what needs more than one of them is not tried.
    """
    if stopped_by is not None:
        return Skip(error_type="Stopped", reason=f"on_error: stop, after point {stopped_by} failed")
    if point.world_size > len(devices):
        reason = f"needs {point.world_size} devices, the cluster has {capacity}"
        return Skip(error_type="TooFewDevices", reason=reason)
    if point.cuda_graph and any(device.kind != "cuda" for device in devices):
        return Skip(error_type="NeedsCuda", reason="cuda_graph: true needs CUDA devices")
    if (batch_size := _batch_that_ran_out(point, ran_out)) is not None:
        return Skip(error_type="OutOfMemoryBefore", reason=f"oom at batch_size {batch_size}")
    return Assign(seats=choose_seats(devices, point.world_size, strategy))


def _batch_that_ran_out(point: Point, ran_out: Sequence[Point]) -> int | None:
    """The smallest batch that ran out of memory in the same series and is below this point's."""
    series = _without_batch(point)
    batches = [
        before.batch_size
        for before in ran_out
        if before.batch_size is not None and _without_batch(before) == series
    ]
    smallest = min(batches, default=None)
    if smallest is None or point.batch_size is None or smallest >= point.batch_size:
        return None
    return smallest


def _without_batch(point: Point) -> Point:
    return replace(point, batch_size=None, global_batch_size=None)
