"""Steps without their peers, on two GPUs: `pytest -m gpu tests/gpu/test_gpu_twin.py`."""

import pytest

from raybench.job.model import Measure
from raybench.job.point import Precision
from raybench.records import Task
from tests.gpu.gpus import TWO_GPUS, cluster_of
from tests.measured_points import measure_row
from tests.unit.fakes import make_point

pytestmark = TWO_GPUS
OWN_DDP, REDUCE = "tests.gpu.gpu_workloads:OwnDdp", "tests.gpu.gpu_workloads:Reduce"
SHOWN = (
    *("step_ms_p50", "local_step_ms", "compute_ms", "comm_ms", "comm_exposed_ms", "host_gap_ms"),
    *("peak_mem_allocated_bytes", "mem_parameters_bytes", "mem_gradients_bytes"),
    *("mem_optimizer_bytes", "mem_activations_bytes", "mem_other_bytes"),
    *("comm_calls", "comm_bytes", "comm_busbw_gb_s"),
)
cluster = cluster_of(2)


def row_of(cluster, workload, *, batch_size=1, world_size=2, env=None, **params):
    settings = {"precision": Precision.BF16, "batch_size": batch_size}
    if workload == "collective":
        settings = dict.fromkeys(("batch_size", "global_batch_size", "scaling"))
    point = make_point(
        env=env or {}, workload=workload, params=params, world_size=world_size, **settings
    )
    # Steps of 1.5 ms: the clock of an idle device needs some 0.3 s to settle.
    measure = Measure(warmup=200 if workload == REDUCE else 10, iterations=60)
    row = measure_row(cluster, Task(point=point, settings=measure))
    # Shown with -rP: these are figures to look at, not only to pass.
    print(workload, params, {name: getattr(row, name) for name in SHOWN}, row.warnings)
    return row


def test_a_ddp_step_alone_takes_as_long_by_copies_as_by_its_hook(cluster):
    # Of 8 layers of 8192 x 8192, which the devices bound: some 50 ms.
    by_hook, by_copies = (
        row_of(cluster, OWN_DDP, batch_size=4096, by_context=by_context)
        for by_context in (True, False)
    )
    assert "noop_hook" in by_hook.methods["local_step_ms"]
    assert "noop_hook" not in by_copies.methods["local_step_ms"]
    assert by_copies.local_step_ms == pytest.approx(by_hook.local_step_ms, rel=0.01)
    assert by_copies.comm_bytes == by_hook.comm_bytes


def test_exposed_communication_is_what_the_collective_takes_alone(cluster):
    alone = row_of(cluster, REDUCE, world_size=1)
    row = row_of(cluster, REDUCE)
    collective = row_of(cluster, "collective", operation="all_reduce", size_bytes=512 * 2**20)
    assert row.local_step_ms == pytest.approx(alone.step_ms_p50, rel=0.05)
    assert row.comm_exposed_ms == pytest.approx(collective.step_ms_p50, rel=0.15)
    assert row.comm_bytes == {"all_reduce": 512 * 2**20}


def test_the_memory_at_the_peak_is_made_of_what_the_model_needs(cluster):
    row = row_of(cluster, OWN_DDP, batch_size=1024, world_size=1, by_context=True)
    parameters = 8 * (8192 * 8192 + 8192) * 4
    assert row.mem_parameters_bytes == parameters
    assert row.mem_optimizer_bytes == pytest.approx(2 * parameters, rel=0.01)
    assert 0 < row.mem_gradients_bytes <= 1.01 * parameters
    names = ("parameters", "gradients", "optimizer", "activations", "other")
    total = sum(getattr(row, f"mem_{name}_bytes") for name in names)
    assert total == pytest.approx(row.peak_mem_allocated_bytes, rel=0.02)


# A real fault: NCCL is left a single channel of the many that it spreads a message over.
SLOWED = {"NCCL_MAX_NCHANNELS": "1"}


def test_a_slow_collective_is_found_to_be_communication_and_nothing_else(cluster):
    sound, slow = (row_of(cluster, REDUCE, env=env) for env in ({}, SLOWED))
    more_ms = slow.step_ms_p50 - sound.step_ms_p50
    assert more_ms > 2 * sound.comm_exposed_ms
    assert slow.comm_exposed_ms - sound.comm_exposed_ms == pytest.approx(more_ms, rel=0.1)
    assert abs(slow.local_step_ms - sound.local_step_ms) < more_ms / 10
    assert slow.slowest_rank is None
    assert slow.host_bound is not True
