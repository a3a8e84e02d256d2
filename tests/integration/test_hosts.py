"""Several hosts, each with an address, a name and processes of its own, and `ray start` on them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

import raybench
from tests.cluster_contract import PROBE
from tests.integration.fault_injection import harmed_sweep
from tests.integration.fault_runs import rows
from tests.integration.fault_runs import write_job as write_faults
from tests.integration.health_runs import BETWEEN, CHECK, ill
from tests.integration.namespaces import (
    HEAD,
    hosts,
    lossy_link,
    needs_hosts,
    needs_tc,
    only_child,
    plug_cable,
    pull_cable,
    ray_hosts,
    slow_link,
)
from tests.integration.sweeps import sweep_command, table, wait_for, write_text

PYTHON = Path(sys.executable)
SWEEP = [PYTHON.with_name("raybench"), "sweep"]

pytestmark = needs_hosts


@pytest.fixture(scope="module")
def nodes():
    """Two hosts that are one Ray cluster of four CPU slots, and one without Ray."""
    with ray_hosts(2, without_ray=1) as made:
        yield made


@pytest.fixture
def lone():
    """A host on which nothing runs."""
    with hosts(1) as (made,):
        yield made


def write_job(folder, strategy="spread", world_sizes="[1, 2, 3]"):
    job = folder / "job.yaml"
    job.write_text(
        f"version: 1\nname: hosts\nworkload: {{kind: '{PROBE}', folder: {folder}}}\n"
        f"matrix: {{world_size: {world_sizes}, batch_size: 4}}\n"
        f"placement: {{strategy: {strategy}}}\n"
        "measure: {warmup: 2, iterations: 5, timeout_s: 30}\n"
    )
    return job


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "driver", "address", "workers_of_hosts", "node_counts"),
    [
        ("spread", 0, "auto", [1, 2], [1, 2, 2]),
        ("pack", 1, "10.99.0.10:6379", [1, 2], [1, 1, 2]),
    ],
)
def test_sweep_spans_hosts_with_loopback_names(
    nodes, tmp_path, strategy, driver, address, workers_of_hosts, node_counts
):
    job = write_job(tmp_path, strategy)
    command = [*SWEEP, job, "--address", address, "-o", tmp_path / "results"]
    users = {"NCCL_DEBUG": "WARN", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    done = nodes[driver].run(command, **users)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nRay cluster at 10.99.0.10:6379, up to 4 CPU workers" in done.stderr
    points = pd.read_parquet(tmp_path / "results" / "points")
    assert list(points["status"]) == ["ok", "ok", "ok"]
    assert list(points["node_count"]) == node_counts
    devices = pd.read_parquet(tmp_path / "results" / "devices")
    assert sorted(Counter(devices["host"]).values()) == workers_of_hosts
    addresses = {host.name: host.address for host in nodes}
    assert list(devices["address"]) == [addresses[name] for name in devices["host"]]
    for each in devices["environment"]:
        # Set by the user for the sweep, and so for the workers of all hosts; chosen by raybench.
        chosen = {"GLOO_SOCKET_IFNAME": "net0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        assert (users | chosen).items() <= dict(each).items()
    told = [json.loads((tmp_path / f"3-{rank}.json").read_text()) for rank in range(3)]
    assert sorted({one["host"] for one in told}) == sorted(set(devices["host"]))
    assert {one["sum"] for one in told} == {6}


@pytest.mark.long
@pytest.mark.parametrize("given", ["--address ", "RAY_ADDRESS="])
def test_host_outside_the_cluster_is_refused_at_once(nodes, tmp_path, given):
    command = [*SWEEP, write_job(tmp_path), "-o", tmp_path / "out"]
    address = "10.99.0.10:6379"
    is_option = given.startswith("--")
    options, variables = (
        (["--address", address], {}) if is_option else ([], {"RAY_ADDRESS": address})
    )
    done = nodes[2].run([*command, *options], timeout_s=90, **variables)
    assert done.returncode == 3
    *_, line = done.stderr.splitlines()
    assert line.startswith(f"{given}{address}: no node of that cluster runs on this host")


HOLD = """\
import ray, time
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
held = ray.util.placement_group([{"CPU": 2}, {"CPU": 1}])
assert held.wait(30)
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_wait_for_used_slots_can_be_interrupted(nodes, tmp_path):
    head = nodes[0]
    hold = head.command([PYTHON, "-c", HOLD])
    sweep = head.command([*SWEEP, write_job(tmp_path), "-o", tmp_path / "results"])
    with subprocess.Popen(hold, env=head.environment, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with subprocess.Popen(
                sweep, env=head.environment, stderr=subprocess.PIPE, text=True
            ) as waiting:
                assert "up to 4 CPU workers" in waiting.stderr.readline()
                time.sleep(2)
                os.kill(only_child(waiting.pid), signal.SIGINT)
                _, stderr = waiting.communicate(timeout=30)
        finally:
            os.kill(only_child(holder.pid), signal.SIGKILL)
    assert waiting.returncode == 130, stderr
    assert "Traceback" not in stderr


# Without a token, with a wrong one, and with one that cannot be read.
NO_TOKENS = [
    {},
    {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64},
    {"RAY_AUTH_TOKEN_PATH": "/nowhere"},
]


@pytest.mark.long
def test_token_and_version_errors_are_one_line(lone, tmp_path):
    """`ray start` asks for the token of ~/.ray/auth_token wherever there is one."""
    (tmp_path / "numpy-9.9.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n"
    (tmp_path / "numpy-9.9.9.dist-info" / "METADATA").write_text(metadata)
    token = Path(lone.environment["HOME"]) / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("a" * 64)
    lone.start_ray(*HEAD, PYTHONPATH=str(tmp_path))
    command = [*SWEEP, write_job(tmp_path, world_sizes="[1]"), "-o", tmp_path / "results"]
    for variables in NO_TOKENS:
        address = () if "RAY_AUTH_TOKEN_PATH" in variables else ("--address", "10.99.0.10:6379")
        done = lone.run([*command, *address], **variables)
        assert done.returncode == 3
        *_, line = done.stderr.splitlines()
        assert "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in line
    done = lone.run(command)
    assert done.returncode == 3
    *_, last = done.stderr.splitlines()
    assert "\nRay cluster at 10.99.0.10:6379" in done.stderr
    assert "9.9.9 on node0 (10.99.0.10): install the same version on every node" in last
    check = ("health", "--only", "environment", "--device", "cpu", "-o", tmp_path / "results")
    refused = lone.run([*SWEEP[:1], *check])
    assert refused.returncode == 3
    assert "numpy is" in refused.stderr.splitlines()[-1]


@pytest.mark.long
def test_missing_raybench_on_host_is_one_line(lone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "site" / "raybench"
    elsewhere.mkdir(parents=True)
    (elsewhere / "__init__.py").touch()
    lone.start_ray(*HEAD, PYTHONPATH=str(elsewhere.parent))
    job = tmp_path / "job.yaml"
    job.write_text("version: 1\nname: x\nworkload: {kind: mlp}\nmatrix: {batch_size: 4}\n")
    done = lone.run([*SWEEP, job, "-o", tmp_path / "results"])
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "10.99.0.10" in last
    assert "No module named 'raybench" in last
    assert last.endswith("; install the same packages on every node")


@pytest.fixture
def three():
    """Three hosts with one CPU worker each, in one Ray cluster."""
    with ray_hosts(3, cpus=1) as made:
        yield made


@pytest.mark.long
@needs_tc
def test_cut_cable_loses_points_until_host_returns(three, tmp_path):
    head, _, victim = three
    write_faults(
        tmp_path, [("none", 0), ("wait", 0), ("none", 0), ("none", 0)], [3, 3, 2, 3], timeout_s=90
    )
    command = sweep_command(tmp_path, "--device", "cpu", address=f"{head.address}:6379")

    def cut(*_):
        pull_cable(head, victim)

    ended = harmed_sweep(head.command(command), tmp_path, 1, 3, cut, stay_s=5.0)
    first = {row["number"]: row for row in rows(tmp_path) if row["attempt"] == 1}
    statuses = [first[number]["status"] for number in range(4)]
    assert statuses == ["ok", "lost", "ok", "lost"]
    assert first[1]["error_host"] == victim.name
    assert f"node {victim.name} does not answer" in first[1]["error_message"]
    assert f"lost: node {victim.name}" in first[3]["error_message"]
    assert ended.code == 1
    assert f"node {victim.name} does not answer: 1 worker is lost" in ended.said
    assert ended.end_s < 60

    # Ray has given the host up: its admin starts Ray anew there, once what was left has ended.
    plug_cable(head, victim)
    victim.run([PYTHON.with_name("ray"), "stop", "--force"])
    victim.join(head, cpus=1)
    (run_id,) = table(tmp_path, "runs")["run_id"]
    (tmp_path / "harmed").touch()
    again = head.run([*command, "--resume", run_id, "--wait", "60"], timeout_s=200)
    assert again.returncode == 0, again.stderr
    last = raybench.load(tmp_path / "results", "points").groupby("point_id").last()
    assert list(last["status"]) == ["ok"] * 4


@pytest.mark.long
def test_a_resumed_run_leaves_out_another_model(tmp_path):
    write_text(
        tmp_path,
        "workload: {kind: mlp, hidden: 32, layers: 1}\n"
        "matrix: {world_size: [1, 2], batch_size: 8}\nmeasure: {warmup: 2, iterations: 10}\n",
    )
    with ray_hosts(1, without_ray=2, cpus=1) as (head, strange, usual):
        command = sweep_command(tmp_path, "--device", "cpu", address=f"{head.address}:6379")
        head.run(command, timeout_s=200)
        assert list(table(tmp_path)["status"]) == ["ok", "skipped"]
        (run_id,) = table(tmp_path, "runs")["run_id"]
        processors = tmp_path / "cpuinfo"
        processors.write_text("model name : Other CPU\n")
        strange.run(["mount", "--bind", processors, "/proc/cpuinfo"])
        said = tmp_path / "said"
        with (
            said.open("w") as file,
            subprocess.Popen(
                head.command([*command, "--resume", run_id, "--wait", "250"]),
                env=head.environment,
                stderr=file,
            ) as resumed,
        ):
            try:
                wait_for(lambda: "1 of 2 workers are there" in said.read_text(), 200)
                strange.join(head, cpus=1)
                wait_for(lambda: "left out: node1 has Other CPU" in said.read_text(), 200)
                usual.join(head, cpus=1)
                assert resumed.wait(200) == 0, said.read_text()
            finally:
                resumed.kill()
    last = raybench.load(tmp_path / "results", "points").groupby("point_id").last()
    assert list(last["status"]) == ["ok"] * 2
    assert "Other CPU" not in set(table(tmp_path, "devices")["name"])


def kill_head(head, _):
    head.run(["pkill", "-9", "gcs_server"])


@pytest.mark.long
@pytest.mark.parametrize("harm", [kill_head, pull_cable])
def test_lost_head_ends_the_sweep_in_seconds(tmp_path, harm):
    with ray_hosts(2, cpus=1) as (head, other):
        write_faults(tmp_path, [("none", 0), ("wait", 0), ("none", 0)], 2, timeout_s=90.0)
        command = sweep_command(tmp_path, "--device", "cpu", address=f"{head.address}:6379")
        ended = harmed_sweep(
            other.command(command), tmp_path, 1, 2, lambda *_: harm(head, other), stay_s=5.0
        )
    assert ended.code == 3, ended.said
    assert ended.said.endswith(f"the head of the Ray cluster at {head.address}:6379 is gone\n")
    assert ended.end_s < 25
    assert [row["status"] for row in rows(tmp_path)] == ["ok", "lost"]


def all_reduces(head, folder):
    """Busbw of an all_reduce of 1 MiB over the three hosts, in MB/s, of a sweep from the first."""
    folder.mkdir()
    write_text(
        folder,
        "workload: {kind: collective, operation: all_reduce, size_bytes: 1048576}\n"
        "matrix: {world_size: 3}\nbaseline: {}\nmeasure: {warmup: 3, iterations: 10}\n",
    )
    command = sweep_command(folder, "--device", "cpu", address=f"{head.address}:6379")
    done = head.run(command, timeout_s=200)
    assert done.returncode == 0, done.stderr
    (point,) = raybench.load(folder / "results", "points").to_dict("records")
    assert point["node_count"] == 3
    return point["busbw_gb_s"] * 1000


# 25 MB/s; what a host sends in an all_reduce of three is 4/3 of the message, as busbw counts.
@pytest.mark.long
@needs_tc
@pytest.mark.parametrize(
    ("harm", "most_mb_s"), [(lambda host: slow_link(host, "200mbit"), 40), (lossy_link, 150)]
)
def test_bad_link_slows_sweep_and_host_is_named(three, tmp_path, harm, most_mb_s):
    head, _, victim = three
    usual = all_reduces(head, tmp_path / "usual")
    harm(victim)
    assert all_reduces(head, tmp_path / "harmed") < min(most_mb_s, 0.7 * usual)
    variables = {"HEALTH_ADDRESS": f"{head.address}:6379", "HEALTH_TESTS": BETWEEN}
    done = head.run([*CHECK, tmp_path / "health", "pairs"], timeout_s=200, **variables)
    assert done.returncode == 0, done.stderr
    found = ill(json.loads(done.stdout))
    assert found
    assert all(victim.name in name for name in found), found
