"""Nodes of a real Ray cluster that are killed, freeze, come late and come back."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from ray.util import placement_group_table

from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.placements import free_devices
from raybench.cluster.ray_cluster.start import connect_ray
from raybench.records.measurement import Failure
from raybench.records.status import Status
from tests.cluster_contract import failures, run
from tests.integration.clusters import start_cluster
from tests.integration.sweeps import wait_for

# A node is lost after 20 s. A machine that does other things too has more time, though less than
# the 90 s after which the point itself would be given up.
NODE_S = 20.0
SLACK_S = 40.0
# Of --wait. Ray notices within this time that a node is dead.
WAIT_S = 8

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def head():
    """A Ray cluster of one node with one CPU slot, to which a test adds a node of its own."""
    cluster = start_cluster(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def node(head):
    """A second node with two slots."""
    added = head.add_node(num_cpus=2, num_gpus=0)
    yield added
    for process in family(raylet_of(added)):
        os.kill(process, signal.SIGKILL)
    head.remove_node(added, allow_graceful=False)


@pytest.fixture
def told():
    """The lines for the user."""
    return []


@pytest.fixture
def cluster(head, node, told):
    """A worker on the head, and two on the other node."""
    joined = RayCluster(connect_ray(head.address, "cpu", wanted=3), told.append)
    joined.start(3, "pack")
    yield joined
    joined.close()


def raylet_of(node):
    return int(node.all_processes["raylet"][0].process.pid)


def family(process):
    """The process, if it is there, and its children."""
    children = Path(f"/proc/{process}/task/{process}/children")
    return [process, *map(int, children.read_text().split())] if children.exists() else []


def freeze(raylet):
    for process in family(raylet):
        os.kill(process, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("fault", "harm"),
    [
        ("raylet killed", lambda raylet: os.kill(raylet, signal.SIGKILL)),
        pytest.param("node frozen", freeze, marks=pytest.mark.long),
    ],
)
def test_lost_node_costs_only_its_own_workers(cluster, node, told, fault, harm):
    processes = family(raylet_of(node))
    here = {number for number in range(3) if cluster.devices[number].process_id in processes}
    assert len(here) == 2
    left = tuple({0, 1, 2} - here)
    harmed_s = []

    def strike():
        harmed_s.append(time.monotonic())
        harm(raylet_of(node))

    threading.Timer(2.0, strike).start()
    answers = run(cluster, 0, 1, 2, fault="sleep", rank=0, timeout_s=90.0)
    ended_s = time.monotonic() - harmed_s[0]
    lost = [answers[worker_id] for worker_id in sorted(here)]
    assert all(isinstance(answer, Failure) for answer in answers)
    assert {(one.status, one.error_type) for one in lost} == {(Status.LOST, "NodeLost")}
    assert lost[0].message == f"node {cluster.devices[min(here)].host} does not answer"
    assert cluster.lost == here
    assert failures(run(cluster, *left)) == []
    spent_s = time.monotonic() - harmed_s[0]
    print(f"{fault}: point ended {ended_s:.1f} s after, next point done {spent_s:.1f} s after")
    assert spent_s < NODE_S + SLACK_S
    assert told == [f"{lost[0].message}: 2 workers are lost"]
    assert [type(answer) for answer in run(cluster, 0, 1, 2)] == [Failure] * 3


def asked_for():
    """How many devices Ray is asked for in vain."""
    return sum(group["state"] == "PENDING" for group in placement_group_table().values())


@pytest.mark.long
def test_a_lost_node_is_waited_for_anew(head, node, told):
    cluster = RayCluster(connect_ray(head.address, "cpu", wanted=3, wait_s=WAIT_S), told.append)
    try:
        cluster.start(3, "pack")
        time.sleep(WAIT_S)
        cluster.refresh(0.0)
        while cluster.pending:
            cluster.refresh(0.5)
        assert (len(cluster.devices), cluster.pending, asked_for()) == (3, 0, 0)
        os.kill(raylet_of(node), signal.SIGKILL)
        while not cluster.lost:
            cluster.refresh(0.0)
            time.sleep(0.1)
        assert cluster.pending == 2
        assert told[-1] == (
            f"node {cluster.devices[2].host} does not answer: 2 workers are lost; waiting up to "
            f"{WAIT_S} s for others"
        )
        while cluster.pending and asked_for() < 2:
            cluster.refresh(0.1)
        assert (cluster.pending, asked_for()) == (2, 2)
        while cluster.pending:
            cluster.refresh(0.1)
        wait_for(lambda: asked_for() == 0, 5)
    finally:
        cluster.close()


@pytest.mark.long
def test_a_refused_late_worker_gives_its_device_back(head, told):
    connection = connect_ray(head.address, "cpu", wanted=2, wait_s=120)
    cluster = RayCluster(connection, told.append, models={"another CPU"})
    node = None
    try:
        cluster.start(2, "pack")
        node = head.add_node(num_cpus=1, num_gpus=0)

        def is_refused():
            cluster.refresh(0.1)
            return any("left out" in line for line in told)

        wait_for(is_refused, 60)
        used = cluster.devices[0]
        assert told[-1] == (
            f"a worker is left out: {used.host} has {used.name}, this run was "
            "measured on another CPU"
        )
        wait_for(lambda: free_devices("cpu") == {node.node_id: 1}, 20)
        assert failures(run(cluster, 0)) == []
    finally:
        cluster.close()
        if node is not None:
            head.remove_node(node, allow_graceful=False)


@pytest.mark.long
def test_late_and_thawed_nodes_get_workers(head, told):
    cluster = RayCluster(connect_ray(head.address, "cpu", wanted=3, wait_s=120), told.append)
    node = None
    try:
        cluster.start(3, "pack")
        assert (len(cluster.devices), cluster.pending, cluster.capacity) == (1, 2, 3)
        assert failures(run(cluster, 0)) == []
        cluster.refresh(0.0)
        assert (cluster.pending, asked_for()) == (2, 2)
        node = head.add_node(num_cpus=2, num_gpus=0)
        started_s = time.monotonic()
        while cluster.pending and time.monotonic() < started_s + 60:
            cluster.refresh(1.0)
        print(f"a late node's workers are there {time.monotonic() - started_s:.1f} s later")
        assert (len(cluster.devices), cluster.pending) == (3, 0)
        assert failures(run(cluster, 0, 1, 2)) == []
        freeze(raylet_of(node))
        while not cluster.lost:
            cluster.refresh(0.0)
            time.sleep(0.5)
        assert cluster.lost == {1, 2}
        for process in family(raylet_of(node)):
            os.kill(process, signal.SIGCONT)
        started_s = time.monotonic()
        while len(cluster.devices) < 5 and time.monotonic() < started_s + 60:
            cluster.refresh(1.0)
        assert failures(run(cluster, 0, 3, 4)) == []
    finally:
        cluster.close()
        if node is not None:
            head.remove_node(node, allow_graceful=False)
