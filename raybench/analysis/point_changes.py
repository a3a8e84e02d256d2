"""What else is not as it was at a point that two runs measured: parts of its step, clocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raybench.records import Status
from raybench.results.breakdown import why_no_breakdown
from raybench.results.point_row import PointRow

_PARTS = {
    "compute_ms": "compute",
    "optimizer_ms": "optimizer",
    "comm_exposed_ms": "exposed communication",
    "straggler_ms": "one rank slower",
    "data_ms": "waiting for data",
    "host_gap_ms": "device idle",
}
_STATES = {"throttled": "throttled", "host_bound": "host-bound"}
# A part is told where it explains at least this share of the change of the step.
_LEAST_SHARE = 0.25
# Clocks move by a few steps of 15 MHz from run to run.
_LEAST_CLOCK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChange:
    """A figure or a state of a point in two runs. unit: empty for a state."""

    name: str
    base: float | bool
    new: float | bool
    unit: str = ""


def point_changes(base: PointRow, new: PointRow) -> tuple[PointChange, ...]:
    """Return the parts of the step that moved the way the step did, the largest first, then states.

    No part where one of the two breakdowns contradicts its step. The states are throttled and
    host-bound, and the SM clock where it moved by 2 % or more.
    """
    step_ms = (new.step_ms_p50 or 0.0) - (base.step_ms_p50 or 0.0)
    is_broken_down = not (why_no_breakdown(base) or why_no_breakdown(new))
    parts = []
    for column, name in _PARTS.items():
        before, now = getattr(base, column), getattr(new, column)
        is_known = is_broken_down and before is not None and now is not None
        if is_known and step_ms and (now - before) / step_ms >= _LEAST_SHARE:
            parts.append(PointChange(name=name, base=before, new=now, unit="ms"))
    parts.sort(key=lambda part: -abs(part.new - part.base))
    states = [
        PointChange(name=name, base=before, new=now)
        for column, name in _STATES.items()
        if (before := getattr(base, column)) is not None
        and (now := getattr(new, column)) is not None
        and before != now
    ]
    before, now = base.sm_clock_mhz_p50, new.sm_clock_mhz_p50
    if before and now and abs(now / before - 1) >= _LEAST_CLOCK:
        states.append(PointChange(name="SM clock", base=before, new=now, unit="MHz"))
    return (*parts, *states)


def all_point_changes(
    base: Sequence[PointRow], new: Sequence[PointRow]
) -> dict[str, tuple[PointChange, ...]]:
    """Return point_id -> `point_changes` of the points that are ok in both runs.

    base, new: one row a point (`mean_of_rounds`).
    """
    of_base = {row.point_id: row for row in base if row.status is Status.OK}
    return {
        row.point_id: point_changes(of_base[row.point_id], row)
        for row in new
        if row.status is Status.OK and row.point_id in of_base
    }
