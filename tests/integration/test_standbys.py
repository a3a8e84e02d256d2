"""A standby takes the worker of a worker that died; what Ray keeps for us meanwhile."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest
import ray
from ray.util.placement_group import remove_placement_group

from raybench.cluster import reaper
from raybench.cluster.ray_cluster.actors import _index_of_gpu, start_standby, start_worker
from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.pool import free_devices, hold_devices
from raybench.cluster.ray_cluster.replacement import StandbyPolicy
from raybench.cluster.ray_cluster.start import connect
from raybench.records import Failure
from tests.cluster_contract import failures
from tests.cluster_contract import run as run_point
from tests.integration.sweeps import wait_for

# A new worker takes four seconds on an idle machine, a standby less than half of that.
SAVED = 0.75
DRIVER = """\
import os, sys, time
import ray
from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.replacement import StandbyPolicy
from raybench.cluster.ray_cluster.start import connect
cluster = RayCluster(connect(sys.argv[1], "cpu", wanted=1), standbys=StandbyPolicy(on_cpus=True))
cluster.start(1, "pack")
(((standby, _),),) = cluster._standbys._by_node.values()
print(ray.get(standby.__ray_call__.remote(lambda _: os.getpid())), flush=True)
time.sleep(600)
"""

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.long]


@pytest.fixture
def cluster(three_nodes):
    joined = RayCluster(connect(three_nodes, "cpu", wanted=3), standbys=StandbyPolicy(on_cpus=True))
    joined.start(3, "pack")
    yield joined
    joined.close()


def run(cluster, fault="none"):
    return run_point(cluster, 0, 1, 2, fault=fault, timeout_s=60)


def of_process(actor, ask):
    """What this function returns in the process of an actor."""
    return ray.get(actor.__ray_call__.remote(lambda _: ask()))


def standby_processes(cluster):
    """Node id -> the processes of its standbys, which are loaded when this returns."""
    standbys = cluster._standbys._by_node
    return {
        node_id: {of_process(standby, os.getpid) for standby, _ in there}
        for node_id, there in standbys.items()
    }


def wait_until_gone(process, within_s):
    return wait_for(lambda: not psutil.pid_exists(process), within_s)


def test_a_killed_rank_is_replaced_by_the_standby_of_its_node_and_by_a_new_worker_without(cluster):
    assert failures(run(cluster)) == []
    before = cluster.devices
    standbys = standby_processes(cluster)
    counts = Counter(device.node_id for device in before)
    assert {node_id: len(there) for node_id, there in standbys.items()} == {
        node_id: min(count, 2) for node_id, count in counts.items()
    }
    started_s = time.monotonic()
    assert isinstance(run(cluster, "kill")[1], Failure)
    quick_s = time.monotonic() - started_s
    after = cluster.devices
    assert after[1].process_id in standbys[before[1].node_id]
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1].environment == before[1].environment
    assert (after[1].niceness, after[1].omp_num_threads) == (0, before[1].omp_num_threads)
    assert failures(run(cluster)) == []

    dead = standby_processes(cluster)[before[1].node_id]
    assert after[1].process_id not in dead
    for process in dead:
        os.kill(process, signal.SIGKILL)
        wait_until_gone(process, 5)
    started_s = time.monotonic()
    assert isinstance(run(cluster, "kill")[1], Failure)
    slow_s = time.monotonic() - started_s
    print(f"next point starts {quick_s:.1f} s after with a standby, {slow_s:.1f} s without")
    assert cluster.devices[1].process_id not in {*dead, after[1].process_id}
    assert failures(run(cluster)) == []
    assert quick_s < SAVED * slow_s

    left = standby_processes(cluster)
    assert left.keys() == standbys.keys()
    assert all(len(left[node_id]) == len(standbys[node_id]) for node_id in left)
    cluster.close()
    for process in set().union(*left.values()):
        wait_until_gone(process, 10)


def test_a_standby_ends_with_its_driver(three_nodes):
    command = [sys.executable, "-c", DRIVER, three_nodes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            standby = int(driver.stdout.readline())
            assert psutil.pid_exists(standby)
        finally:
            driver.kill()
        print(f"gone {wait_until_gone(standby, 15):.1f} s after the driver's SIGKILL")


def test_ray_keeps_the_gpu_of_a_dead_worker_for_us_and_a_standby_sees_what_workers_see():
    from ray.cluster_utils import Cluster

    host = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2})
    try:
        connect(host.address, "cuda", wanted=2)
        (node_id,) = free_devices("cuda")
        slots = hold_devices("cuda", {node_id: 2})
        worker_ids = [start_worker("cuda", slot) for slot in slots]
        standby = start_standby(node_id)
        first, second = (facts(worker_id) for worker_id in worker_ids)
        assert {first[1], second[1]} == {0, 1}
        assert environment(standby) == first[0]
        for worker_id in worker_ids:
            ray.kill(worker_id)
            time.sleep(1)
        # Nobody else can have them, and a new worker gets the one that was there.
        assert free_devices("cuda") == {}
        for slot, (_, index) in zip(reversed(slots), (second, first), strict=True):
            assert facts(start_worker("cuda", slot))[1] == index
        remove_placement_group(slots[0].placement)
    finally:
        ray.shutdown()
        host.shutdown()


def facts(worker_id):
    """Its environment, and the index of the GPU that it would take."""
    return environment(worker_id), of_process(worker_id, _index_of_gpu)


def environment(worker_id):
    found = of_process(worker_id, lambda: dict(os.environ))
    return {name: value for name, value in found.items() if name != reaper.MARK}
