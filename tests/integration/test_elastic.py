"""Sweeps on a cluster that Ray's own autoscaler makes bigger and smaller, with its fake nodes."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from raybench.cluster.device_reservation import FOLDER_VARIABLE
from tests.integration.sweeps import begin, cpu_sweep, table, wait_for, write_text

PATIENCE_S = 280
RAY = Path(sys.executable).with_name("ray")
COMMANDS = (
    *("initialization", "setup", "head_setup", "worker_setup"),
    *("head_start_ray", "worker_start_ray"),
)
# As `AutoscalingCluster` of ray.cluster_utils makes it, which begins by ending every Ray of the
# host, and whose example is not in the package.
CONFIG = {
    "cluster_name": "fake",
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
JOB = """\
workload: {kind: mlp, hidden: 32, layers: 1}
matrix: {world_size: %d, batch_size: 8}
baseline: {}
measure: {warmup: 2, iterations: 20}
"""

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


@contextmanager
def start_head(max_workers):
    """A head with one CPU slot, to which the autoscaler adds so many nodes of one at most."""
    with tempfile.TemporaryDirectory(prefix="as-", dir="/tmp") as folder:
        import ray.util

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        address = f"{ray.util.get_node_ip_address()}:{port}"
        provider = {**PROVIDER, "gcs_address": address}
        # A user's sweep would join a cluster whose address it finds in its folder.
        Path(folder, "r").mkdir()
        Path(folder, "r", "ray_current_cluster").symlink_to(os.devnull)
        config = Path(folder, "config.json")
        config.write_text(json.dumps({**CONFIG, "max_workers": max_workers, "provider": provider}))
        options = [f"--port={port}", f"--temp-dir={folder}/r", "--num-cpus=1", "--num-gpus=0"]
        settings = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        head = subprocess.Popen(
            [RAY, "start", "--head", "--block", f"--autoscaling-config={config}", *options],
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


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    for name, value in NO_TOKEN.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def full():
    """The address of a cluster that cannot grow."""
    with start_head(max_workers=0) as address:
        yield address


def asked_for(address):
    """How many devices the autoscaler is asked for, in what it has told `ray status` last."""
    from ray._raylet import GcsClient

    told = GcsClient(address=address).internal_kv_get(b"__autoscaling_status", None)
    load = json.loads(told or "{}").get("load_metrics_report", {})
    return sum(count for _, count in (*load.get("pg_demand", ()), *load.get("request_demand", ())))


@contextmanager
def waiting_sweep(folder, address, workers):
    """A sweep that waits for so many workers, with locks of its own."""
    folder.mkdir()
    write_text(folder, JOB % workers)
    environment = {**os.environ, FOLDER_VARIABLE: str(folder / "locks")}
    options = ("--address", address, "--wait", str(PATIENCE_S))
    with begin(folder, *options, env=environment) as sweep:
        try:
            yield sweep
        finally:
            sweep.kill()


def test_nodes_come_for_the_biggest_point(tmp_path):
    write_text(tmp_path, JOB % 3)
    with start_head(max_workers=2) as address:
        ended = cpu_sweep(tmp_path, "--address", address, "--wait", PATIENCE_S, timeout_s=400)
        assert ended.returncode == 0, ended.stderr
        assert list(table(tmp_path)["node_count"]) == [3]
        wait_for(lambda: asked_for(address) == 0, 30)


def test_a_killed_waiting_sweep_asks_for_nothing(full, tmp_path):
    with waiting_sweep(tmp_path / "killed", full, 3):
        wait_for(lambda: asked_for(full) > 0, PATIENCE_S)
    wait_for(lambda: asked_for(full) == 0, 60)


def test_waiting_sweeps_keep_their_own_requests(full, tmp_path):
    with (
        waiting_sweep(tmp_path / "first", full, 2) as first,
        waiting_sweep(tmp_path / "second", full, 3) as second,
    ):
        wait_for(lambda: asked_for(full) == 3, PATIENCE_S)
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
        wait_for(lambda: asked_for(full) == 2, 30)
        second.send_signal(signal.SIGTERM)
        second.communicate(timeout=60)
        wait_for(lambda: asked_for(full) == 0, 30)
