"""SIGKILL of the driver, or of its Ray: real processes and signals; the run goes on after it."""

import os
import random
import signal
import subprocess
import sys
from collections import Counter

import pytest

from tests.integration.driver_kills import KilledSweep
from tests.integration.fault_injection import harmed_sweep
from tests.integration.fault_runs import descendants, rows, start_sweep, sweep_command, write_job

POINTS = 8


@pytest.mark.long
def test_after_each_sigkill_the_tables_are_whole_and_at_the_end_each_point_is_there_once(tmp_path):
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
@pytest.mark.parametrize("name", ["/raylet/raylet", "gcs_server"])
def test_when_its_own_ray_is_killed_a_sweep_ends_in_seconds_and_can_be_resumed(name, tmp_path):
    def kill(process, _):
        # A raylet has the command lines of Ray's agents further on.
        [found] = [p for p, title in descendants(process.pid).items() if name in title.split()[0]]
        os.kill(found, signal.SIGKILL)

    write_job(tmp_path, [("none", 0), ("wait", 0), ("none", 0), ("none", 0)], 2, timeout_s=90.0)
    command = sweep_command(tmp_path, "--device", "cpu")
    ended = harmed_sweep(command, tmp_path, 1, 2, kill, stay_s=None)
    assert ended.code == 3, ended.said
    assert ended.end_s < 20
    assert ended.gone_s is not None, ended.left
    assert [row["status"] for row in rows(tmp_path)] == ["ok", "lost"]
    again = start_sweep([*command, "--resume", "latest"], tmp_path)
    _, said = again.communicate()
    assert again.returncode == 0, said
    count = Counter(row["number"] for row in rows(tmp_path) if row["status"] == "ok")
    assert count == dict.fromkeys(range(4), 1)
