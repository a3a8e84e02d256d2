"""Groups across the nodes of a real Ray cluster, and what faults do to them."""

import json
import os
import signal
import time

import pytest
import ray
from ray.cluster_utils import Cluster

from raybench.cluster.allocator import choose_workers
from raybench.cluster.ray_cluster.actors import start_worker
from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.pool import free_devices, hold_devices
from raybench.cluster.ray_cluster.start import Connection, connect
from raybench.cluster.timeouts import ClusterTimeouts
from raybench.errors import ClusterError
from raybench.job.model import Measure
from raybench.records import Failure, Status, Task
from tests.cluster_contract import failures
from tests.integration.sweeps import descendants
from tests.unit import fakes

PROBE = "tests.integration.probe_workloads:Probe"
FAULTY = "tests.integration.probe_workloads:Failing"


@pytest.fixture(scope="module")
def cluster(three_nodes):
    joined = RayCluster(connect(three_nodes, "cpu", wanted=6))
    joined.start(6, "pack")
    yield joined
    joined.close()


def test_racks_are_the_labels_of_nodes_and_rails_the_indices_of_workers(cluster):
    def places(world_size, strategy):
        chosen = choose_workers(cluster.devices, world_size, strategy)
        return [(cluster.devices[one].rack, cluster.devices[one].index) for one in chosen]

    assert places(4, "pack") == [("left", 0), ("left", 1)] * 2
    assert places(2, "rail") == [("left", 0), ("left", 0)]
    assert places(2, "spread") == [("left", 0), ("right", 0)]
    assert places(6, "rail")[4:] == [("right", 0), ("right", 1)]


def make_point(workload, world_size, **params):
    return fakes.make_point(workload=workload, params=params, world_size=world_size)


def run(cluster, point, *, strategy="pack", timeout_s=60.0):
    worker_ids = choose_workers(cluster.devices, point.world_size, strategy)
    settings = Measure(warmup=2, iterations=4, timeout_s=timeout_s)
    return worker_ids, cluster.run(Task(point=point, settings=settings), worker_ids)


def facts(folder, world_size):
    return [
        json.loads((folder / f"{world_size}-{rank}.json").read_text()) for rank in range(world_size)
    ]


def test_every_worker_has_its_own_device_and_they_stand_in_node_order(cluster):
    assert cluster.capacity == 6
    assert len({device.uuid for device in cluster.devices}) == 6
    nodes = [(device.rack, device.node_id) for device in cluster.devices]
    assert nodes == sorted(nodes)
    assert len(set(nodes)) == 3
    assert {device.niceness for device in cluster.devices} == {0}
    assert {device.omp_num_threads for device in cluster.devices} == {1}


@pytest.mark.parametrize(
    ("strategy", "world_size", "local_ranks", "node_ranks"),
    [
        ("pack", 2, ["0", "1"], ["0", "0"]),
        ("spread", 2, ["0", "0"], ["0", "1"]),
        ("pack", 4, ["0", "1", "0", "1"], ["0", "0", "1", "1"]),
        ("spread", 3, ["0", "0", "0"], ["0", "1", "2"]),
        ("pack", 6, ["0", "1"] * 3, ["0", "0", "1", "1", "2", "2"]),
    ],
)
def test_a_group_sums_its_ranks_and_knows_its_places(
    cluster, tmp_path, strategy, world_size, local_ranks, node_ranks
):
    point = make_point(PROBE, world_size, folder=str(tmp_path))
    worker_ids, answers = run(cluster, point, strategy=strategy)
    assert failures(answers) == []
    told = facts(tmp_path, world_size)
    assert {one["sum"] for one in told} == {world_size * (world_size + 1) // 2}
    assert [one["environment"]["LOCAL_RANK"] for one in told] == local_ranks
    assert [one["environment"]["GROUP_RANK"] for one in told] == node_ranks
    assert [one["environment"]["RANK"] for one in told] == [str(r) for r in range(world_size)]
    assert [one["pid"] for one in told] == [
        cluster.devices[worker_id].process_id for worker_id in worker_ids
    ]
    assert {one["niceness"] for one in told} == {0}


def test_the_process_group_is_kept_while_the_same_workers_are_used(cluster, tmp_path):
    known = []
    for number, world_size in enumerate([2, 2, 3, 2]):
        folder = tmp_path / str(number)
        folder.mkdir()
        run(cluster, make_point(PROBE, world_size, folder=str(folder)))
        known.append(facts(folder, world_size)[0]["known_group"])
    assert known == [False, True, False, False]


def test_an_exception_that_cannot_travel_is_told_and_the_next_point_runs(cluster):
    _, answers = run(cluster, make_point(FAULTY, 2, fault="unpicklable", faulty_rank=1))
    failure = answers[1]
    assert isinstance(failure, Failure)
    assert (failure.status, failure.error_type) == (Status.ERROR, "_Unpicklable")
    assert "holds what cannot travel" in failure.message
    assert "\n" not in failure.message
    _, answers = run(cluster, make_point(FAULTY, 2))
    assert failures(answers) == []


def test_no_worker_at_all_is_one_clear_error(cluster):
    connection = Connection(where="here", needed={}, kind="cpu", capacity=6)
    others = RayCluster(connection, timeouts=ClusterTimeouts(first_device_s=2.0))
    with pytest.raises(ClusterError, match="no CPU could be had from the cluster in 2 s: others"):
        others.start(1, "pack")


def test_a_store_that_was_killed_is_replaced_and_the_workers_are_kept(cluster):
    titles = descendants(os.getpid()).items()
    # Ray gives the process of an actor its class as title.
    [store] = [pid for pid, title in titles if title.startswith("ray::_Store")]
    os.kill(store, signal.SIGKILL)
    before = [device.process_id for device in cluster.devices]
    started_s = time.monotonic()
    _, answers = run(cluster, make_point(FAULTY, 2))
    print(f"store killed: next point done {time.monotonic() - started_s:.1f} s later")
    assert failures(answers) == []
    assert [device.process_id for device in cluster.devices] == before


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_ray_keeps_the_gpu_of_a_dead_worker_for_its_next_process():
    def index_of_gpu(worker):
        return ray.get(worker.__ray_call__.remote(lambda _: ray.get_gpu_ids()))

    ray.shutdown()
    host = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2})
    try:
        connect(host.address, "cuda", wanted=2)
        (node_id,) = free_devices("cuda")
        slots = hold_devices("cuda", {node_id: 2})
        workers = [start_worker("cuda", slot) for slot in slots]
        indices = [index_of_gpu(worker) for worker in workers]
        assert sorted(indices) == [[0], [1]]
        for worker in workers:
            ray.kill(worker)
            time.sleep(1)
        assert free_devices("cuda") == {}
        for slot, index in reversed(list(zip(slots, indices, strict=True))):
            assert index_of_gpu(start_worker("cuda", slot)) == index
    finally:
        ray.shutdown()
        host.shutdown()
