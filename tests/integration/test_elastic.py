"""Sweeps on a cluster that Ray's own autoscaler makes bigger and smaller, with its fake nodes."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.start import connect
from tests.cluster_contract import failures, run
from tests.integration.sweeps import wait_for

PATIENCE_S = 280
COMMANDS = (
    *("initialization", "setup", "head_setup", "worker_setup"),
    *("head_start_ray", "worker_start_ray"),
)
# As `AutoscalingCluster` of ray.cluster_utils makes it, which begins by ending every Ray of the
# host, and whose example is not in the package.
CONFIG = {
    "cluster_name": "fake",
    "max_workers": 2,
    "upscaling_speed": 10.0,
    "idle_timeout_minutes": 0.1,
    "head_node_type": "ray.head.default",
    "auth": {"ssh_user": "nobody"},
    "file_mounts": {},
    "file_mounts_sync_continuously": False,
    **{f"{name}_commands": [] for name in COMMANDS},
    "cluster_synced_files": [],
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "worker": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2},
    },
}

# All nodes have one address, and are started by no commands.
PROVIDER = {
    "type": "fake_multinode",
    "use_node_id_as_ip": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
}
# Whatever lies in the user's folder.
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * PATIENCE_S)]


@pytest.fixture
def address():
    """A head with one CPU slot, to which the autoscaler adds two nodes of one at most."""
    with tempfile.TemporaryDirectory(prefix="as-", dir="/tmp") as folder:
        import ray.util

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        address = f"{ray.util.get_node_ip_address()}:{port}"
        provider = {**PROVIDER, "gcs_address": address}
        config = Path(folder, "config.json")
        config.write_text(json.dumps({**CONFIG, "provider": provider}))
        program = Path(sys.executable).with_name("ray")
        options = [f"--port={port}", f"--temp-dir={folder}/r", "--num-cpus=1", "--num-gpus=0"]
        settings = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        head = subprocess.Popen(
            [program, "start", "--head", "--block", f"--autoscaling-config={config}", *options],
            env={**os.environ, **NO_TOKEN, **settings},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_for(lambda: head.poll() is not None or can_connect(port), PATIENCE_S)
        assert head.poll() is None, "the head has ended"
        yield address
        ours = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
        for process in ours:
            process.kill()
        psutil.wait_procs(ours, timeout=20)
        head.wait()


def can_connect(port):
    import ray.util

    try:
        socket.create_connection((ray.util.get_node_ip_address(), port), 1.0).close()
    except OSError:
        return False
    return True


def test_nodes_come_for_the_biggest_point(address, monkeypatch):
    import ray

    def nodes():
        return sum(node["Alive"] for node in ray.nodes())

    for name, value in NO_TOKEN.items():
        monkeypatch.setenv(name, value)
    told = []
    cluster = RayCluster(connect(address, "cpu", wanted=3, wait_s=PATIENCE_S), told.append)
    try:
        cluster.start(3, "pack")
        deadline_s = time.monotonic() + PATIENCE_S
        while len(cluster.devices) < 3 and time.monotonic() < deadline_s:
            cluster.refresh(1.0)
        assert nodes() == 3
        assert failures(run(cluster, 0, 1, 2)) == []
    finally:
        cluster.close()
