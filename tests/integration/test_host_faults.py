"""Three hosts, and a link of one that is cut, slow or lossy: rows, names, and what goes on."""

import json
import sys
from pathlib import Path

import pytest

import raybench
from tests.integration.fault_injection import harmed_sweep
from tests.integration.fault_runs import rows, write_job
from tests.integration.health_runs import BETWEEN, CHECK, ill
from tests.integration.namespaces import (
    lossy_link,
    needs_hosts,
    needs_tc,
    plug_cable,
    pull_cable,
    ray_hosts,
    slow_link,
)
from tests.integration.sweeps import sweep_command, table, write_text

RAY = Path(sys.executable).with_name("ray")

pytestmark = [pytest.mark.long, needs_hosts, needs_tc]


@pytest.fixture
def three():
    """Three hosts with one CPU worker each, in one Ray cluster."""
    with ray_hosts(3, cpus=1) as made:
        yield made


def test_a_cut_cable_costs_the_points_that_need_its_host_and_a_host_that_is_back_runs_them(
    three, tmp_path
):
    head, _, victim = three
    write_job(
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
    assert f"node {victim.name} was lost" in first[3]["error_message"]
    assert ended.code == 1
    assert f"node {victim.name} does not answer: 1 worker is lost" in ended.said
    assert ended.end_s < 60

    # Ray has given the host up: its admin starts Ray anew there, once what was left has ended.
    plug_cable(head, victim)
    victim.run([RAY, "stop", "--force"])
    victim.join(head, cpus=1)
    (run_id,) = table(tmp_path, "runs")["run_id"]
    (tmp_path / "harmed").touch()
    again = head.run([*command, "--resume", run_id, "--wait", "60"], timeout_s=200)
    assert again.returncode == 0, again.stderr
    last = raybench.load(tmp_path / "results", "points").groupby("point_id").last()
    assert list(last["status"]) == ["ok"] * 4


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
@pytest.mark.parametrize(
    ("harm", "most_mb_s"), [(lambda host: slow_link(host, "200mbit"), 40), (lossy_link, 150)]
)
def test_a_slow_or_lossy_link_slows_the_sweep_and_the_health_check_names_its_host(
    three, tmp_path, harm, most_mb_s
):
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
