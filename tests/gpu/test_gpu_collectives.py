"""Collectives, matrix products and memory on CUDA devices: `pytest -s -m gpu tests/gpu`."""

import pytest

from raybench.job.model import Measure, Span
from raybench.job.point import Precision
from raybench.records.task import Task
from raybench.results.record_rows import point_metrics
from tests.gpu.gpus import GPU, cluster_of, needs_two
from tests.measured_points import measure_record
from tests.unit.fakes import make_point

pytestmark = GPU

OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv"]
SOME = Span(min=20, max=50)
SETTINGS = Measure(warmup=SOME, iterations=50, max_seconds=5, breakdown=False)
cluster = cluster_of()


def run(cluster, workload, world_size, **settings):
    """The numbers of one point. A wrong payload or product is a failure."""
    point = make_point(
        workload=workload,
        world_size=world_size,
        precision=Precision.FP32,
        cuda_graph=settings.pop("cuda_graph", False),
        params=settings,
        **dict.fromkeys(("batch_size", "global_batch_size", "scaling")),
    )
    return point_metrics(measure_record(cluster, Task(point=point, settings=SETTINGS)))


@needs_two
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_every_operation_moves_is_right(cluster, operation, cuda_graph):
    message = {"operation": operation, "size_bytes": 2**18 * 3, "cuda_graph": cuda_graph}
    for dtype in ("float32", "bfloat16", "int8"):
        found = run(cluster, "collective", len(cluster.devices), dtype=dtype, **message)
        print(f"{operation} {dtype} 768 KiB: {found['step_ms_p50'] * 1e3:.1f} us")
        assert 0 < found["step_ms_p50"] < 100


@needs_two
def test_a_large_all_reduce_uses_nvlink(cluster):
    message = {"operation": "all_reduce", "size_bytes": 2**30}
    found = run(cluster, "collective", len(cluster.devices), **message)
    print(f"all_reduce 1 GiB on {len(cluster.devices)}: busbw {found['busbw_gb_s']:.1f} GB/s")
    # PCIe 5.0 x16 ends at 64 GB/s; over NVLink 4 of H100 and H200 it is 350 and more on 4.
    assert 100 < found["busbw_gb_s"] < 1000


@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "graph"])
def test_a_triad_reaches_the_bandwidth_of_hbm(cluster, cuda_graph):
    found = run(cluster, "memory", 1, operation="triad", size_bytes=2**30, cuda_graph=cuda_graph)
    print(f"triad 3 x 1 GiB: {found['memory_gb_s']:.0f} GB/s")
    # The datasheet says 3350 for an H100 SXM and 4800 for an H200.
    assert 2000 < found["memory_gb_s"] < 4800
