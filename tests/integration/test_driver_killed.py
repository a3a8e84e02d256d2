"""SIGKILL of the driver, or of its Ray: real processes and signals, and the run goes on after it.

`benchmarks/killed_driver.py` does the same at ten moments.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import driver_faults
from tests.integration.driver_kills import KilledSweep

POINTS = 8


@pytest.mark.long
def test_after_each_sigkill_the_tables_are_whole_and_at_the_end_each_point_is_there_once(
    tmp_path: Path,
) -> None:
    seed = random.randrange(1000)
    print("seed", seed)
    chance = random.Random(seed)
    sweep = KilledSweep(tmp_path, POINTS)
    for _ in range(2):
        print(sweep.killed(chance))
    with sweep.started() as process:
        sweep.wait_for(process, rows=0)
        # Beside the first, which has the processors, or it would be refused for that.
        command = [*sweep.command, "--shared"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=120)
        process.kill()
    assert second.returncode == 2
    assert "is being written by another sweep" in second.stderr
    listed = subprocess.run(
        [sys.executable, "-m", "raybench", "list", "--results", str(sweep.results)],
        capture_output=True,
        text=True,
    )
    assert " interrupted " in listed.stdout
    sweep.finish()
    sweep.check_each_point_once(POINTS)


@pytest.mark.long
def test_when_its_own_raylet_is_killed_a_sweep_ends_in_seconds_and_can_be_resumed() -> None:
    found = driver_faults.harmed(
        "raylet of a private Ray killed",
        driver_faults.kill_raylet,
        wanted=["ok", "lost"],
        code=3,
        stay_s=None,
    )
    assert found["as_wanted"], found
    assert found["end_s"] < 20
