"""Tests and a user's sweeps on one host: neither joins a cluster or sees locks of the other."""

import os
import subprocess
import sys

import pytest

from raybench.cluster.device_reservation import CPU, FOLDER_VARIABLE, DeviceLocks, this_process
from raybench.cluster.ray_cluster.start import find_own_cluster
from tests.integration.sweeps import cpu_sweep, table, write_text

JOB = """\
workload: {kind: mlp, hidden: 8, layers: 1}
matrix: {batch_size: 4}
baseline: {}
measure: {warmup: 1, iterations: 3, breakdown: false}
"""
A_TEST = """\
from pathlib import Path
from tests.integration.sweeps import cpu_sweep

def test_sweep():
    done = cpu_sweep(Path(__file__).parent, "--address", "auto")
    assert done.returncode == 0, done.stderr
    assert "private Ray on this host, " in done.stderr
"""


@pytest.mark.long
def test_a_users_sweep_joins_no_test_cluster(three_nodes, tmp_path):
    if find_own_cluster()[0] not in ("", three_nodes):
        pytest.skip("the sweep would join the Ray cluster that the user has on this host")
    write_text(tmp_path, JOB)
    theirs = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    theirs[FOLDER_VARIABLE] = str(tmp_path / "locks")
    done = cpu_sweep(tmp_path, "--address", "auto", env=theirs)
    assert done.returncode == 0, done.stderr
    assert "private Ray on this host, " in done.stderr


def test_a_test_neither_joins_nor_sees_the_users(tmp_path, monkeypatch):
    write_text(tmp_path, JOB)
    (tmp_path / "test_a_sweep.py").write_text(A_TEST)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    locks = DeviceLocks()
    locks.lock([CPU], this_process("run theirs-1"), shared=False)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest"]
    done = subprocess.run(
        [*command, tmp_path / "test_a_sweep.py"], capture_output=True, text=True, timeout=240
    )
    locks.close()
    assert done.returncode == 0, done.stdout + done.stderr
    [neighbours] = table(tmp_path)["neighbours"]
    assert not [one for one in neighbours if "theirs-1" in one]
