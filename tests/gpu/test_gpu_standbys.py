"""A standby beside GPUs holds nothing of them, and takes the GPU of a worker that was killed."""

import os
import time

import ray
import torch

from raybench.job.model import Measure
from raybench.job.point import Precision
from raybench.records import Failure, Task
from tests.cluster_contract import failures
from tests.gpu.gpus import TWO_GPUS, private_ray
from tests.unit.fakes import make_point

pytestmark = TWO_GPUS


def run(cluster, **params):
    point = make_point(
        workload="tests.gpu.gpu_workloads:GpuProbe",
        params=params,
        world_size=2,
        precision=Precision.BF16,
    )
    settings = Measure(warmup=3, iterations=20, timeout_s=60.0)
    return cluster.run(Task(point=point, settings=settings), (0, 1))


def standbys(cluster):
    (there,) = cluster._workers._standbys._by_node.values()
    assert len(there) == 2
    return there


def test_a_standby_has_no_cuda_context_and_takes_the_gpu_of_a_killed_worker(capsys):
    with private_ray(2) as cluster:
        before = cluster.devices[1]
        asked = [
            standby.__ray_call__.remote(lambda _: (os.getpid(), torch.cuda.is_initialized()))
            for standby in standbys(cluster)
        ]
        has_context = dict(ray.get(asked))
        assert list(has_context.values()) == [False, False]
        assert failures(run(cluster)) == []
        started_s = time.monotonic()
        assert isinstance(run(cluster, fault="kill")[1], Failure)
        took_s = time.monotonic() - started_s
        after = cluster.devices[1]
        with capsys.disabled():
            print(f"\nkilled: next point started after {took_s:.2f} s, {after.process_id=}")
        assert after.process_id in has_context
        assert (after.uuid, after.index) == (before.uuid, before.index)
        assert after.environment == before.environment
        assert after.other_processes == before.other_processes
        assert failures(run(cluster)) == []
        assert took_s < 6
