"""The clock at which a point ran, from the telemetry of the time in which it ran."""

from __future__ import annotations

import numpy as np
import pandas as pd

from raybench.analysis.point_changes import PointChange, point_changes, with_clocks
from raybench.results.metrics.parts import BREAKDOWN

START = pd.Timestamp("2026-11-21 10:00:00.000001", tz="UTC")


def points(*spans):
    return pd.DataFrame(
        {
            "run_id": "run",
            "point_id": [f"p{number}" for number in range(len(spans))],
            "attempt": 1,
            "started_at": pd.Series([START + pd.Timedelta(since, "s") for since, _ in spans]),
            "duration_s": [duration for _, duration in spans],
        }
    ).astype({"started_at": "datetime64[us, UTC]"})


def telemetry(*samples):
    times = pd.Series([START + pd.Timedelta(since, "s") for since, _, _ in samples])
    return pd.DataFrame(
        {
            "time": times.astype("datetime64[us, UTC]"),
            "sm_clock_mhz": [clock for _, clock, _ in samples],
            "gpu_utilization_pct": [busy for _, _, busy in samples],
        }
    )


def test_the_clock_is_the_median_of_busy_samples_between_start_and_end():
    samples = telemetry((1, 1980, 90), (2, 1410, 90), (3, 345, 0), (2.5, 1500, 99), (9, 1000, 99))
    clocks = with_clocks(points((0, 3.0)), samples)["clock_mhz"]
    assert clocks.tolist() == [1500.0]


def test_a_point_without_a_sample_has_no_clock_and_durations_need_not_be_whole_microseconds():
    clocks = with_clocks(points((0, 1 / 3), (1, 1.23456789)), telemetry((2, 1980, 90)))["clock_mhz"]
    assert np.isnan(clocks[0])
    assert clocks[1] == 1980.0


def broken_down(step_ms, compute_ms):
    nothing = dict.fromkeys((*BREAKDOWN, "throttled", "host_bound"), np.nan)
    return {**nothing, "step_ms_p50": step_ms, "device_type": "cuda", "compute_ms": compute_ms}


def test_a_part_is_told_unless_the_breakdown_contradicts_its_step():
    base = broken_down(8.0, 7.0)
    [part] = point_changes(base, broken_down(10.0, 9.0))
    assert part == PointChange(name="compute", base=7.0, new=9.0, unit="ms")
    assert point_changes(base, broken_down(10.0, 18.0)) == ()
    assert point_changes(broken_down(8.0, 18.0), broken_down(10.0, 9.0)) == ()


def test_the_part_that_moved_with_the_step_is_named():
    base = dict.fromkeys(BREAKDOWN, 1.0) | {"step_ms_p50": 8.0}
    base |= {"throttled": False, "host_bound": None}
    base |= {"device_type": "cuda", "local_step_ms": 8.0}
    new = base | {"step_ms_p50": 9.0, "comm_exposed_ms": 1.9, "compute_ms": 0.5, "throttled": True}
    found = point_changes({**base, "clock_mhz": 1980.0}, {**new, "clock_mhz": 1410.0})
    assert [one.name for one in found] == ["exposed communication", "throttled", "SM clock"]
    late = point_changes(base, base | {"step_ms_p50": 9.0, "straggler_ms": 2.0})
    assert [one.name for one in late] == ["one rank slower"]
