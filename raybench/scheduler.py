"""Which point runs next, and on which workers. Pure decisions over the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raybench.cluster.ranks import Strategy, choose_seats
from raybench.plan import Plan, Point
from raybench.records import Device


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
) -> Decision:
    """What to do with the next point of the plan.

    devices: those that have a worker, enough for every point that the cluster's capacity allows.
    stopped_by: the point_id whose failure ended a run that has `on_error: stop`.
    """
    if stopped_by is not None:
        return Skip(error_type="Stopped", reason=f"on_error: stop, after point {stopped_by} failed")
    if point.world_size > len(devices):
        reason = f"needs {point.world_size} devices, the cluster has {capacity}"
        return Skip(error_type="TooFewDevices", reason=reason)
    if point.cuda_graph and any(device.kind != "cuda" for device in devices):
        return Skip(error_type="NeedsCuda", reason="cuda_graph: true needs CUDA devices")
    return Assign(seats=choose_seats(devices, point.world_size, strategy))
