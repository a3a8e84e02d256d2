"""`raybench history` over runs of which neighbours resemble each other."""

import json
from datetime import timedelta

import numpy as np
from builders import START, make_point, make_record
from compared import write
from noise import autocorrelated

RUNS, POINTS = 40, 10


def test_history_takes_no_memory_for_steps(tmp_path, command):
    noise = autocorrelated(np.random.default_rng(3), runs=POINTS, count=RUNS, phi=0.6)
    points = [make_point(world_size=1, batch_size=number + 1) for number in range(POINTS)]
    for run in range(RUNS):
        started_at = START + timedelta(days=run)
        steps_ms = 8.0 * np.exp(0.015 * noise[:, run])
        records = [
            make_record(point, step_ms=step_ms, started_at=started_at)
            for point, step_ms in zip(points, steps_ms.tolist(), strict=True)
        ]
        write(tmp_path, f"run{run:02}", records, started_at=started_at)
    rows = json.loads(command("history", "--json").out)["points"]
    assert len(rows) == RUNS * POINTS
    with_step = {row["point_id"] for row in rows if row["step"] is not None}
    assert len(with_step) <= 1


def test_two_slow_last_runs_are_no_step(tmp_path, command):
    noise = 1 + 0.005 * np.random.default_rng(1).standard_normal(20)
    noise[-2:] *= 1.1
    for run, factor in enumerate(noise.tolist()):
        started_at = START + timedelta(days=run)
        record = make_record(make_point(), step_ms=8.0 * factor, started_at=started_at)
        write(tmp_path, f"run{run:02}", [record], started_at=started_at)
    rows = json.loads(command("history", "--json").out)["points"]
    assert [row["run_id"] for row in rows if row["step"] is not None] == []
