from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pandas as pd
from builders import START, make_measurement, make_point, make_record, make_row

from raybench.analysis.step_times import busy_pct, repeat_step_times, step_times
from raybench.results.tables import sample_columns
from raybench.stats.summary import step_time

MS = 1_000_000


def samples_of(*ranks, warmup=2):
    measurements = tuple(
        make_measurement(rank, [[ms * MS for ms in repeat] for repeat in repeats], warmup=warmup)
        for rank, repeats in enumerate(ranks)
    )
    record = make_record(make_point(world_size=len(ranks)), measurements=measurements)
    return pd.DataFrame(sample_columns("run-a", record))


def test_ranks_apart_give_the_slowest_of_them_repeat_by_repeat_without_warm_up():
    found = step_times(samples_of([[1, 5, 3], [2, 2, 2]], [[4, 2, 4], [1, 9, 9]]))
    assert found.tolist() == [4.0, 2.0, 4.0, 1.0, 9.0, 9.0]


def test_the_median_is_the_step_time_of_the_row():
    ranks = [[[100, 108, 103]], [[101, 104, 102]]]
    assert np.median(step_times(samples_of(*ranks))) == step_time([steps for [steps] in ranks])


def test_attempts_are_told_apart_and_what_a_rank_lacks_is_left_out():
    first = samples_of([[7, 7, 7]], [[7, 7, 7]])
    second = samples_of([[8, 8, 8]], [[8, 8, 8]]).assign(attempt=2)
    torn = second[~((second["rank"] == 1) & (second["iteration"] == second["iteration"].max()))]
    found = dict(repeat_step_times(pd.concat([torn, first]), ["point_id", "attempt"]))
    assert [(attempt, list(ms)) for (_, attempt, _), ms in found.items()] == [
        (1, [7.0, 7.0, 7.0]),
        (2, [8.0, 8.0]),
    ]


def test_devices_are_as_busy_as_the_least_of_those_that_worked_was_while_it_was_timed():
    # Device 2 did not work; 10 s of set-up and warm-up, in which nobody did, are before 5 s timed.
    used = {0: 80.0, 1: 60.0, 2: 0.0}
    telemetry = pd.DataFrame(
        [
            {
                "node_id": "node",
                "index": index,
                "time": START + timedelta(seconds=second),
                "gpu_utilization_pct": pct if second >= 10 else 0.0,
            }
            for second in range(16)
            for index, pct in used.items()
        ]
    )
    second = 1000 * MS
    samples = pd.DataFrame(
        {
            "is_warmup": [True] * 5 + [False] * 5,
            "start_ns": [(5 + place) * second for place in range(10)],
            "step_ns": [second] * 10,
        }
    )
    point = make_row(duration_s=20.0, world_size=2)
    assert busy_pct(telemetry, samples, point) == 60.0
    assert busy_pct(telemetry, samples, replace(point, world_size=4)) is None
    assert busy_pct(telemetry[:0], samples, point) is None
    assert busy_pct(telemetry, samples[:0], point) is None
