"""Two sweeps on one host: the second is refused, waits, or says in its rows who was there."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import raybench
from raybench.cluster.device_locks import CPU, FOLDER_VARIABLE, DeviceLocks, this_process

JOB = """
version: 1
name: beside
workload: {kind: mlp, hidden: 32, layers: 1}
matrix: {world_size: [1, 2], batch_size: [8]}
measure: {warmup: 2, iterations: 20, max_seconds: 1}
"""
SWEEP = [sys.executable, "-m", "raybench", "sweep"]


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def sweep(job: Path, *options: str) -> list[str]:
    where = ["--address", "local", "--device", "cpu", "-o", str(job.parent / "r")]
    return [*SWEEP, str(job), *where, *options]


def test_a_second_sweep_is_refused_before_anything_starts_and_leaves_no_run(job):
    locks = DeviceLocks()
    locks.claim([CPU], this_process("run first-1"), shared=False)
    begun_s = time.monotonic()
    second = subprocess.run(sweep(job), capture_output=True, text=True, timeout=60)
    assert time.monotonic() - begun_s < 40
    assert (second.returncode, second.stdout) == (3, "")
    [line] = second.stderr.splitlines()
    assert line.startswith("the processors of this host are used by run first-1 of ")
    assert "--wait SECONDS" in line
    assert "--shared" in line
    assert not (job.parent / "r" / "runs").exists() or not list((job.parent / "r/runs").iterdir())
    locks.close()


def test_a_tour_is_refused_at_once_and_not_job_by_job(job):
    locks = DeviceLocks()
    locks.claim([CPU], this_process("run first-1"), shared=False)
    _, *options = sweep(job)[len(SWEEP) :]
    tour = subprocess.run([*SWEEP, "--demo", *options], capture_output=True, text=True, timeout=60)
    assert (tour.returncode, tour.stdout) == (3, "")
    question, line = tour.stderr.splitlines()
    assert question.startswith("1 of ")
    assert line.startswith("the processors of this host are used by run first-1 of ")
    locks.close()


def test_a_shared_sweep_is_seen_by_others_and_its_rows_say_who_was_there(job):
    locks = DeviceLocks()
    locks.claim([CPU], this_process("run first-1"), shared=False)
    with subprocess.Popen(
        sweep(job, "--shared"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as second:
        seen: set[str] = set()
        while second.poll() is None:
            holders = DeviceLocks().others([CPU]).others.get(CPU, ())
            seen |= {holder.what for holder in holders}
            time.sleep(0.2)
        assert second.stderr is not None
        told = second.stderr.read()
    assert second.returncode == 0, told
    assert "not alone: the processors of" in told
    [run_id] = {what.removeprefix("run ") for what in seen} - {"first-1"}
    points = raybench.load(job.parent / "r", "points")
    assert set(points["run_id"]) == {run_id}
    for neighbours, warnings in zip(points["neighbours"], points["warnings"], strict=True):
        assert any(one.startswith("run first-1 of ") for one in neighbours)
        assert any(one.startswith("not alone: run first-1 of ") for one in warnings)
    locks.close()
    # The agents of the sweep that has ended hold nothing any more.
    deadline_s = time.monotonic() + 10
    while DeviceLocks().others([CPU]).others and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not DeviceLocks().others([CPU]).others
