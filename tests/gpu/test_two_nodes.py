"""Two nodes of Ray with one GPU each on one host, between which NCCL takes the network.

A rank with an NCCL_HOSTID of its own is on another host for NCCL: neither peer-to-peer nor shared
memory is tried, and without an adapter for RDMA the bytes go by TCP.
"""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.gpu.gpus import TWO_GPUS
from tests.integration.sweeps import raybench, sweep_command, table, write_text

REPOSITORY = Path(__file__).parents[2]
RAY_START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
LOOPBACK = "127.0.0.1"
TRAINING = """\
workload: {kind: mlp, hidden: 4096, layers: 8}
matrix: {world_size: [1, 2], precision: [bf16], batch_size: [1024]}
measure: {warmup: 3, iterations: 10}
"""
SUMS = """\
workload: {kind: collective, operation: all_reduce, dtype: float32}
matrix: {world_size: 2, size_bytes: [32768, 16777216, 268435456]}
baseline: {}
measure: {warmup: 5, iterations: 20}
"""

pytestmark = [
    *TWO_GPUS,
    pytest.mark.skipif("NCCL_HOSTID" in os.environ, reason="the user says which host this is"),
]


@pytest.fixture(scope="module")
def two_nodes():
    """The address of a Ray cluster of two nodes, each with a GPU that the other does not see."""
    first, second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    with (
        ray_node(first, "--head", f"--port={port}", "--include-dashboard=false"),
        ray_node(second, f"--address={LOOPBACK}:{port}"),
    ):
        yield f"{LOOPBACK}:{port}"


@contextmanager
def ray_node(gpu, *words):
    """Be a node of Ray with this GPU, which NCCL takes for a host, while the `with` block runs."""
    command = [*RAY_START, *words, "--num-cpus=2", "--num-gpus=1", f"--node-ip-address={LOOPBACK}"]
    environment = {"CUDA_VISIBLE_DEVICES": gpu, "NCCL_HOSTID": f"host-of-gpu-{gpu}"}
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True
    ) as node:
        assert node.stdout is not None
        assert any("Ray runtime started" in line for line in node.stdout)
        try:
            yield
        finally:
            node.terminate()
            node.communicate(timeout=40)


def sweep(job, folder, address):
    """The points of a sweep of the job, all of them ok."""
    folder.mkdir(exist_ok=True)
    write_text(folder, job)
    words = sweep_command(folder, "--device", "cuda", address=address)[3:]
    done = raybench(*words, cwd=REPOSITORY, timeout_s=150)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    points = table(folder)
    assert set(points["status"]) == {"ok"}
    return points


def report(folder):
    words = ("report", "latest", "--full", "--results", folder / "results")
    done = raybench(*words, timeout_s=60)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_training_over_two_nodes_reports_network_and_cost(two_nodes, tmp_path):
    by_network = sweep(TRAINING, tmp_path, two_nodes).set_index("world_size").sort_index()
    assert list(by_network["node_count"]) == [1, 2]
    devices = table(tmp_path, "devices")
    assert devices["uuid"].nunique() == devices["node_id"].nunique() == 2
    hosts = [dict(each)["NCCL_HOSTID"] for each in devices["environment"]]
    assert len(set(hosts)) == 2
    (way,) = by_network.loc[2, "transports"]
    # Which one it is depends on the machine; loopback would be none.
    assert way.startswith("NET/")
    assert " on lo " not in way
    step_ms, exposed_ms = by_network.loc[2, "step_ms_p50"], by_network.loc[2, "comm_exposed_ms"]
    assert 0 < exposed_ms < step_ms
    assert exposed_ms == pytest.approx(step_ms - by_network.loc[1, "step_ms_p50"], rel=0.2)
    told = report(tmp_path)
    assert "on 2 nodes" in told
    assert way in told
    assert "exposed communication" in told


def test_sums_are_slower_over_two_nodes(two_nodes, tmp_path):
    across = sweep(SUMS, tmp_path / "across", two_nodes)
    within = sweep(SUMS, tmp_path / "within", "local")
    ways = [{way for each in one["transports"] for way in each} for one in (across, within)]
    assert all(way.startswith("NET/") for way in ways[0])
    assert all(way.startswith(("P2P/", "SHM/")) for way in ways[1])
    assert max(across["busbw_gb_s"]) < 0.5 * max(within["busbw_gb_s"])
