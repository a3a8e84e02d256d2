"""What the tests on GPUs share: when they run, a private Ray, and the context of a lone rank."""

from contextlib import contextmanager

import pytest
import torch

from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.start import connect_ray
from raybench.job.point import Precision
from raybench.workloads.base import Context, apply_precision

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
GPU = [
    pytest.mark.gpu,
    # Ray's own sockets and log files, closed by its threads after the test.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
TWO_GPUS = [*GPU, needs_two]


@contextmanager
def private_ray(count):
    """Start so many workers, each with a GPU."""
    cluster = RayCluster(connect_ray("local", "cuda", wanted=count))
    try:
        cluster.start(count, "pack")
        yield cluster
    finally:
        cluster.close()


def cluster_of(most=None):
    """Return the fixture `cluster` of a module: workers on all GPUs, or on `most` of them."""

    @pytest.fixture(scope="module", name="cluster")
    def started():
        count = torch.cuda.device_count()
        with private_ray(min(count, most or count)) as joined:
            yield joined

    return started


def make_context(mode=Precision.FP32, **changes):
    """Be the only rank, on the first device, and multiply in this precision."""
    apply_precision(mode)
    alone = {"rank": 0, "world_size": 1, "local_rank": 0, "batch_size": 8}
    return Context(device=torch.device("cuda", 0), precision=mode, **{**alone, **changes})
