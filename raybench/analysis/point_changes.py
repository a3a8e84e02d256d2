"""What else is not as it was at a point that two runs measured: parts of its step, clocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.rounds import ATTEMPT_COLUMNS, mean_of_rounds, records
from raybench.results.quality import BREAKDOWN, why_no_breakdown

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

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChange:
    """Two values of a point; unit: empty where there is none."""

    name: str
    base: float | bool
    new: float | bool
    unit: str = ""


def point_changes(base: Row, new: Row) -> tuple[PointChange, ...]:
    """Find the parts of the step that moved the way the step did, the largest first, then states.

    No part where one of the two breakdowns contradicts its step.

    base, new: rows of `points` of one point, with `clock_mhz` of `with_clocks` where it is known.
    """
    step = new["step_ms_p50"] - base["step_ms_p50"]
    is_broken_down = not (why_no_breakdown(base) or why_no_breakdown(new))
    parts = [
        PointChange(name=name, base=base[column], new=new[column], unit="ms")
        for column, name in (_PARTS.items() if is_broken_down else ())
        if abs(step) > 0 and (new[column] - base[column]) / step >= _LEAST_SHARE
    ]
    parts.sort(key=lambda part: -abs(part.new - part.base))
    states = [
        PointChange(name=name, base=bool(base[column]), new=bool(new[column]))
        for column, name in _STATES.items()
        if pd.notna(base[column]) and pd.notna(new[column]) and base[column] != new[column]
    ]
    return (*parts, *states, *_clock(base.get("clock_mhz"), new.get("clock_mhz")))


def all_point_changes(base: pd.DataFrame, new: pd.DataFrame) -> dict[str, tuple[PointChange, ...]]:
    """point_id -> `point_changes` of the points whose latest attempt is ok in both runs."""
    of_base, of_new = (
        {str(row["point_id"]): row for row in records(mean_of_rounds(points))}
        for points in (base, new)
    )
    return {
        point_id: point_changes(of_base[point_id], row)
        for point_id, row in of_new.items()
        if point_id in of_base and row["status"] == of_base[point_id]["status"] == "ok"
    }


def with_clocks(points: pd.DataFrame, telemetry: pd.DataFrame) -> pd.DataFrame:
    """Add clock_mhz to the latest attempts: the median SM clock of busy devices meanwhile.

    points, telemetry: rows of these tables of one run; of `telemetry` CLOCK_COLUMNS are enough.
    NaN where no sample was taken in time.
    """
    latest = mean_of_rounds(points)
    is_busy = telemetry["gpu_utilization_pct"] >= _BUSY_PCT
    busy = telemetry[is_busy & telemetry["sm_clock_mhz"].notna()].sort_values("time")
    clocks = busy["sm_clock_mhz"].to_numpy(np.float64)
    until = latest["started_at"] + pd.to_timedelta(latest["duration_s"], unit="s")
    until = until.dt.as_unit(busy["time"].dt.unit)
    firsts = busy["time"].searchsorted(latest["started_at"], side="left")
    lasts = busy["time"].searchsorted(until, side="right")
    medians = [
        float(np.median(clocks[first:last])) if first < last else np.nan
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return latest.assign(clock_mhz=medians)


def _clock(base: Any, new: Any) -> tuple[PointChange, ...]:
    if pd.isna(base) or pd.isna(new) or abs(new / base - 1) < _LEAST_CLOCK:
        return ()
    return (PointChange(name="SM clock", base=float(base), new=float(new), unit="MHz"),)
