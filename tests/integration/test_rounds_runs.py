"""Rounds on real processes: fresh ones in each, and a driver that is killed in the second."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raybench import load
from raybench.results.reader import logs

JOB = """\
version: 1
name: rounds
workload: {kind: "tests.integration.probe_workloads:SaysItsProcess"}
matrix: {world_size: [1, 2], batch_size: [4, 8]}
measure: {rounds: 2, warmup: 3, iterations: 100, breakdown: false}
"""
TRIALS_A_ROUND = 6  # four points and a control at the end of each block


def command(folder: Path, *options: str) -> list[str]:
    where = ["--address", "local", "--device", "cpu", "--shared", "-o", str(folder / "results")]
    return [sys.executable, "-m", "raybench", "sweep", str(folder / "job.yaml"), *where, *options]


def processes(folder: Path, run_id: str, attempts: set[tuple[str, int]]) -> set[str]:
    """The processes that ran these attempts (point_id, attempt)."""
    texts = [
        log.text
        for log in logs(folder / "results", run_id)
        if (log.point_id, log.attempt) in attempts
    ]
    assert len(texts) >= len(attempts)
    return {pid for text in texts for pid in re.findall(r"process (\d+)", text)}


@pytest.mark.long
def test_a_run_that_is_killed_in_its_second_round_goes_on_there(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    with subprocess.Popen(
        command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as killed:
        deadline_s = time.monotonic() + 240
        while len(list(tmp_path.glob("results/points/*/[!.]*.parquet"))) < TRIALS_A_ROUND + 1:
            assert time.monotonic() < deadline_s
            assert killed.poll() is None
            time.sleep(0.02)
        killed.kill()
    resumed = subprocess.run(
        command(tmp_path, "--resume", "latest"), capture_output=True, text=True, timeout=240
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "round 2 of 2" in resumed.stderr
    assert "round 1 of 2" not in resumed.stderr
    points = load(tmp_path / "results", "points")
    assert set(points["status"]) == {"ok"}
    # A control is left out where its block was over when the driver was killed.
    assert points["control_of"].isna().sum() == 8
    assert len(points) >= 2 * TRIALS_A_ROUND - 1
    assert not points.duplicated(["point_id", "round", "control_of"]).any()
    assert not points.duplicated(["point_id", "attempt"]).any()
    run_id = str(points["run_id"].iloc[0])
    first, second = (
        processes(
            tmp_path,
            run_id,
            {(row.point_id, row.attempt) for row in points[points["round"] == n].itertuples()},
        )
        for n in (1, 2)
    )
    assert len(first) == 2
    assert not first & second
    assert (load(tmp_path / "results", "scaling")["world_size"] == [1, 1, 2, 2]).all()
