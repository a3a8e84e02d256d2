"""Sweeps on one host: a second one is refused, or says in its rows who was there."""

import os
import signal
import subprocess
import time

import pytest

from raybench.cluster import find_kind
from raybench.cluster.device_reservation import CPU, FOLDER_VARIABLE, DeviceLocks, this_process
from raybench.errors import ClusterError
from tests.integration.orphans import hanging_sweep, lives, orphans_in
from tests.integration.sweeps import begin, cpu_sweep, raybench, table, wait_for, write_text

JOB = """\
workload: {kind: mlp, hidden: 32, layers: 1}
matrix: {world_size: 2, batch_size: [8, 16]}
baseline: {world_size: 2}
placement: {strategy: spread}
measure: {warmup: 2, iterations: 20, max_seconds: 1}
"""
USED = "the processors of this host are used by run first-1 of "


@pytest.fixture
def first(tmp_path, monkeypatch):
    """A sweep that has the processors."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    write_text(tmp_path, JOB)
    locks = DeviceLocks()
    locks.lock([CPU, "GPU-1"], this_process("run first-1"), shared=False)
    yield locks
    locks.close()


def test_second_sweep_is_refused_without_leaving_a_run(first, tmp_path):
    begun_s = time.monotonic()
    second = cpu_sweep(tmp_path, timeout_s=60)
    assert time.monotonic() - begun_s < 40
    assert (second.returncode, second.stdout) == (3, "")
    *_, line = second.stderr.splitlines()
    assert line.startswith(USED)
    assert "--wait SECONDS" in line
    assert "--shared" in line
    assert not list((tmp_path / "results").glob("runs/*"))


@pytest.mark.long
def test_shared_sweep_is_visible_and_records_other_users(first, three_nodes, tmp_path):
    where = ("--address", three_nodes)
    with begin(tmp_path, "--shared", *where, stdout=subprocess.DEVNULL) as second:
        seen = set()
        while second.poll() is None:
            holders = DeviceLocks().other_users([CPU]).others.get(CPU, ())
            seen |= {holder.what for holder in holders}
            time.sleep(0.2)
        told = second.stderr.read()
    assert second.returncode == 0, told
    assert f"Ray cluster at {three_nodes}, up to 6 CPU workers" in told
    assert "not alone: the processors of" in told
    [run_id] = {what.removeprefix("run ") for what in seen} - {"first-1"}
    points = table(tmp_path)
    assert set(points["run_id"]) == {run_id}
    assert (set(points["node_count"]), set(points["strategy"])) == ({2}, {"spread"})
    assert set(table(tmp_path, "devices")["rack"]) <= {"left", "right"}
    for neighbours, doubts in zip(points["neighbours"], points["doubts"], strict=True):
        assert any(one.startswith("run first-1 of ") for one in neighbours)
        subjects = [doubt["subject"] for doubt in doubts if doubt["kind"] == "not_alone"]
        assert any(one.startswith("run first-1 of ") for one in subjects)
    for neighbours in points["node_neighbours"]:
        assert {one.partition(" used ")[2].partition(" of ")[0] for one in neighbours} == {
            "another GPU"
        }
    report = raybench("report", run_id, "--full", "--results", tmp_path / "results").stdout
    told = "other work used the same devices: run first-1 of "
    assert told in " ".join(report.split()), report
    first.close()
    # The agents of the sweep that has ended hold nothing any more, and have removed their files.
    assert not list((tmp_path / "locks").iterdir())


@pytest.mark.long
def test_killed_worker_or_driver_leaves_no_processes(tmp_path, three_nodes):
    with hanging_sweep(tmp_path, "--address", three_nodes) as driver:
        first, second = orphans_in(tmp_path)
        os.kill(first[0], signal.SIGKILL)
        child_s = wait_for(lambda: not any(map(lives, first)), 10)
        assert driver.poll() is None
        driver.kill()
        driver.wait()
        took_s = wait_for(lambda: not any(map(lives, second)), 15)
    print(f"gone: children of a killed worker {child_s:.1f} s; after the driver's {took_s:.1f} s")


def test_cluster_is_asked_for_gpus_before_joining(three_nodes):
    assert find_kind(three_nodes, "auto") == "cpu"
    with pytest.raises(ClusterError, match="no Ray cluster answers there"):
        find_kind("127.0.0.1:1", "auto")
