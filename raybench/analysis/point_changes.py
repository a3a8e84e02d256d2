"""What else is not as it was at a point that two runs measured: parts of its step, clocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pandas as pd

from raybench.analysis.rounds import ATTEMPT_COLUMNS, mean_of_rounds
from raybench.records import Status
from raybench.results.metrics.parts import BREAKDOWN, why_no_breakdown
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
_BUSY_PCT = 50
# What this module needs of the tables `points` and `telemetry`.
POINT_COLUMNS = (
    *ATTEMPT_COLUMNS,
    *("duration_s", "step_ms_p50", "device_type"),
    *BREAKDOWN,
    *_STATES,
)
CLOCK_COLUMNS = ("time", "gpu_utilization_pct", "sm_clock_mhz")


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChange:
    """Two values of a point; unit: empty where there is none."""

    name: str
    base: float | bool
    new: float | bool
    unit: str = ""


def point_changes(
    base: PointRow, new: PointRow, clocks_mhz: tuple[float | None, float | None] = (None, None)
) -> tuple[PointChange, ...]:
    """Return the parts of the step that moved the way the step did, the largest first, then states.

    No part where one of the two breakdowns contradicts its step. clocks_mhz: the SM clock at the
    two points, as `busy_clocks` finds it.
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
    before, now = clocks_mhz
    if before and now and abs(now / before - 1) >= _LEAST_CLOCK:
        states.append(PointChange(name="SM clock", base=before, new=now, unit="MHz"))
    return (*parts, *states)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointsWithClocks:
    """The points of a run, and the SM clock of busy devices at each of them, by point_id."""

    points: Sequence[PointRow]
    clocks_mhz: Mapping[str, float]


def with_clocks(points: Sequence[PointRow], telemetry: pd.DataFrame) -> PointsWithClocks:
    """Return the latest attempts with the median SM clock of busy devices meanwhile.

    points: of one run. telemetry: rows of that table of the run, of which CLOCK_COLUMNS are enough.
    A point during which no sample was taken has no clock.
    """
    latest = mean_of_rounds(points)
    is_busy = telemetry["gpu_utilization_pct"] >= _BUSY_PCT
    busy = telemetry[is_busy & telemetry["sm_clock_mhz"].notna()].sort_values("time")
    times, clocks = busy["time"], busy["sm_clock_mhz"].to_numpy(np.float64)
    found: dict[str, float] = {}
    for row in latest:
        if row.duration_s is None:
            continue
        first = int(times.searchsorted(pd.Timestamp(row.started_at), side="left"))
        until = row.started_at + timedelta(seconds=row.duration_s)
        last = int(times.searchsorted(pd.Timestamp(until), side="right"))
        if first < last:
            found[row.point_id] = float(np.median(clocks[first:last]))
    return PointsWithClocks(points=latest, clocks_mhz=found)


def all_point_changes(
    base: PointsWithClocks, new: PointsWithClocks
) -> dict[str, tuple[PointChange, ...]]:
    """Return point_id -> `point_changes` of the points that are ok in both runs."""
    of_base = {row.point_id: row for row in base.points if row.status is Status.OK}
    return {
        row.point_id: point_changes(
            of_base[row.point_id],
            row,
            (base.clocks_mhz.get(row.point_id), new.clocks_mhz.get(row.point_id)),
        )
        for row in new.points
        if row.status is Status.OK and row.point_id in of_base
    }
