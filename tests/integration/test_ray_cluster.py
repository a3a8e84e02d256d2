"""Groups across the nodes of a real Ray cluster, and what faults do to them."""

import json
import os
import signal
import time
from collections import Counter

import pytest
import ray

from raybench.cluster import find_kind
from raybench.cluster.ray_cluster.actor import start_worker
from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.placements import free_devices, hold_devices
from raybench.cluster.ray_cluster.start import Connection, connect_ray
from raybench.errors import ClusterError
from raybench.job.model import Measure
from raybench.records.task import Task
from tests.cluster_contract import PROBE, failures, process_ids
from tests.integration.clusters import start_cluster
from tests.integration.sweeps import descendants
from tests.local_cluster import choose_workers
from tests.unit import fakes


@pytest.fixture
def cluster(three_workers):
    return three_workers


def run(cluster, folder, world_size, strategy="pack"):
    """The answers of a point that writes to the folder, and the workers that gave them."""
    worker_ids = choose_workers(cluster.devices, world_size, strategy)
    params = {"folder": str(folder)}
    point = fakes.make_point(workload=PROBE, params=params, world_size=world_size)
    settings = Measure(warmup=2, iterations=4, timeout_s=60.0)
    return cluster.run(Task(point=point, settings=settings), worker_ids), worker_ids


def facts(folder, world_size):
    return [json.loads((folder / f"{world_size}-{n}.json").read_text()) for n in range(world_size)]


def test_workers_have_own_devices_in_node_order(cluster):
    assert cluster.capacity == 6
    assert len({device.uuid for device in cluster.devices}) == 3
    nodes = [(device.rack, device.node_id) for device in cluster.devices]
    assert nodes == sorted(nodes)
    assert len(set(nodes)) == 2
    assert {(one.niceness, one.omp_num_threads) for one in cluster.devices} == {(0, 1)}


@pytest.mark.parametrize(
    ("strategy", "world_size", "local_ranks", "node_ranks"),
    [("pack", 2, "01", "00"), ("spread", 2, "00", "01"), ("pack", 3, "001", "01")],
)
def test_group_sums_its_ranks_and_numbers_them(
    cluster, tmp_path, strategy, world_size, local_ranks, node_ranks
):
    answers, worker_ids = run(cluster, tmp_path, world_size, strategy)
    assert failures(answers) == []
    told = facts(tmp_path, world_size)
    assert {one["sum"] for one in told} == {world_size * (world_size + 1) // 2}
    places = [one["environment"] for one in told]
    assert [place["RANK"] for place in places] == [str(rank) for rank in range(world_size)]
    # Which of the nodes has two of three depends on their ids.
    assert "".join(sorted(place["LOCAL_RANK"] for place in places)) == local_ranks
    assert {place["GROUP_RANK"] for place in places} == set(node_ranks)
    assert {(place["PROBE_GIVEN"], place["PROBE_KEPT"]) for place in places} == {("1", None)}
    assert [one["pid"] for one in told] == [process_ids(cluster)[n] for n in worker_ids]
    assert {one["niceness"] for one in told} == {0}


def test_process_group_is_kept_for_same_workers(cluster, tmp_path):
    known = []
    for number, world_size in enumerate([2, 2, 3, 2]):
        (folder := tmp_path / str(number)).mkdir()
        run(cluster, folder, world_size)
        known.append(facts(folder, world_size)[0]["known_group"])
    assert known == [False, True, False, False]


@pytest.mark.long
def test_killed_store_is_replaced_without_new_workers(cluster, tmp_path):
    titles = descendants(os.getpid()).items()
    # Ray gives the process of an actor its class as title.
    [store] = [pid for pid, title in titles if title.startswith("ray::_Store")]
    os.kill(store, signal.SIGKILL)
    before = process_ids(cluster)
    started_s = time.monotonic()
    answers, _ = run(cluster, tmp_path, 3)
    print(f"store killed: next point done {time.monotonic() - started_s:.1f} s later")
    assert failures(answers) == []
    assert process_ids(cluster) == before


class Unreadable:
    """Its bytes are read by no worker."""

    def __reduce__(self):
        return int, ("not a number",)


def test_ray_error_is_named_without_the_actor(cluster):
    point = fakes.make_point(workload=PROBE, params={"folder": Unreadable()})
    task = Task(point=point, settings=Measure())
    [answer] = cluster.run(task, choose_workers(cluster.devices, 1, "pack"))
    assert answer.error_type == "RaySystemError"
    assert answer.message.startswith("System error: invalid literal for int()")


def test_start_skips_mute_nodes_and_needs_one_worker(cluster, monkeypatch):
    monkeypatch.setattr("raybench.cluster.timeouts.FIRST_DEVICE_S", 2.0)
    monkeypatch.setattr("raybench.cluster.timeouts.PLACEMENT_S", 0.9)
    free = free_devices("cpu")
    slots = hold_devices("cpu", {"frozen-node": 1, **free})
    assert Counter(slot.node_id for slot in slots) == free
    connection = Connection(where="here", needed={}, kind="cpu", capacity=6)
    others = RayCluster(connection)
    with pytest.raises(ClusterError, match="no CPU could be had from the cluster in 2 s: others"):
        others.start(1, "pack")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_next_process_gets_gpu_of_dead_worker():
    def index_of_gpu(worker):
        return ray.get(worker.__ray_call__.remote(lambda _: ray.get_gpu_ids()))

    ray.shutdown()
    host = start_cluster(num_cpus=2, num_gpus=2)
    try:
        assert find_kind(host.address, "auto") == "cuda"
        connect_ray(host.address, "cuda", wanted=2)
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
