"""Where the time and the memory of a step go on GPUs, from the workers to the row."""

import gzip
import json

import pytest

from raybench.job.model import Measure
from raybench.job.point import Precision
from raybench.records.task import Task
from raybench.results.record_rows import point_row
from tests.gpu.gpus import GPU, cluster_of, needs_two
from tests.measured_points import measure_record
from tests.unit.fakes import make_point

pytestmark = GPU
SLOWED = "tests.gpu.gpu_workloads:SlowedMlp"
OWN_DDP, REDUCE = "tests.gpu.gpu_workloads:OwnDdp", "tests.gpu.gpu_workloads:Reduce"
EXAMPLE = "docs.examples.convnet:ConvNet"
DELAY_MS = 10.0
# A real fault: NCCL is left a single channel of the many that it spreads a message over.
ONE_CHANNEL = {"NCCL_MAX_NCHANNELS": "1"}
# Steps of 1.5 ms: the clock of an idle device needs some 0.3 s to settle.
IDLE_CLOCK = {"warmup": 200, "batch_size": 1}
cluster = cluster_of(2)


def record_of(cluster, workload="mlp", *, profile=False, warmup=10, **given):
    names = ("world_size", "batch_size", "precision", "env")
    settings = {"precision": Precision.BF16, "batch_size": 64}
    settings |= {name: given.pop(name) for name in names if name in given}
    if workload == "collective":
        settings = dict.fromkeys(("batch_size", "global_batch_size", "scaling"))
        settings["world_size"] = 2
    point = make_point(workload=workload, params=given, **settings)
    measure = Measure(warmup=warmup, iterations=60)
    return measure_record(cluster, Task(point=point, settings=measure, profile=profile))


def row_of(cluster, workload="mlp", **settings):
    row = point_row("run-a", record_of(cluster, workload, **settings), Measure())
    # Shown with -rP: these are figures to look at, not only to pass.
    told = {name: value for name, value in vars(row).items() if name.endswith(("_ms", "_bytes"))}
    print(workload, settings, told, row.host_bound, row.slowest_rank, row.doubts)
    return row


@needs_two
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_slow_rank_is_named_with_its_delay(cluster, slow_rank):
    # Large enough that the other rank waits for nothing else: a slow host takes 4 ms for the step.
    slowed = {"slow_rank": slow_rank, "delay_ms": DELAY_MS}
    row = row_of(cluster, SLOWED, world_size=2, batch_size=16384, **slowed)
    assert row.slowest_rank == slow_rank
    assert row.straggler_ms == pytest.approx(DELAY_MS, rel=0.2)
    assert row.straggler_device_ms == pytest.approx(DELAY_MS, rel=0.2)
    assert row.comm_ms < DELAY_MS / 2
    assert row.local_step_ms > DELAY_MS


@needs_two
@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_the_example_of_the_documents_is_taken_apart(cluster, precision):
    row = row_of(cluster, EXAMPLE, world_size=2, batch_size=256, precision=precision)
    parts = ("compute_ms", "comm_ms", "comm_exposed_ms", "straggler_ms", "optimizer_ms")
    assert all(getattr(row, name) is not None for name in parts)
    assert 0 < row.comm_ms < row.step_ms_p50
    assert row.compute_ms + row.optimizer_ms < 1.1 * row.step_ms_p50
    assert row.throughput > 0


@pytest.mark.parametrize(
    ("settings", "host_bound"),
    [
        ({"hidden": 64, "layers": 24, "batch_size": 8}, True),
        ({"hidden": 8192, "layers": 8, "batch_size": 4096}, False),
    ],
    ids=["tiny", "big"],
)
def test_the_host_holds_up_a_tiny_model_only(cluster, settings, host_bound):
    row = row_of(cluster, **settings)
    assert row.host_bound is host_bound
    assert 0 < row.optimizer_ms < row.local_step_ms
    parts_ms = row.compute_ms + row.optimizer_ms + row.host_gap_ms
    assert parts_ms == pytest.approx(row.local_step_ms, rel=0.1)
    # Python's own speed drifts by tens of percent from one second to the next.
    drift = 0.5 if host_bound else 0.15
    assert row.local_step_ms == pytest.approx(row.step_ms_p50, rel=drift)
    assert row.comm_ms is None


@needs_two
def test_local_ddp_steps_agree_between_copies_and_hook(cluster):
    # Of 8 layers of 8192 x 8192, which the devices bound: some 50 ms.
    by_hook, by_copies = (
        row_of(cluster, OWN_DDP, world_size=2, batch_size=4096, by_context=by_context)
        for by_context in (True, False)
    )
    assert "noop_hook" in by_hook.methods["local_step_ms"]
    assert "noop_hook" not in by_copies.methods["local_step_ms"]
    assert by_copies.local_step_ms == pytest.approx(by_hook.local_step_ms, rel=0.01)
    assert by_copies.comm_bytes == by_hook.comm_bytes


@needs_two
def test_exposed_communication_is_what_the_collective_takes_alone(cluster):
    alone, row = (
        row_of(cluster, REDUCE, world_size=world_size, **IDLE_CLOCK) for world_size in (1, 2)
    )
    message = {"operation": "all_reduce", "size_bytes": 512 * 2**20}
    collective = row_of(cluster, "collective", **message)
    # At its power limit a device's step drifts by some percent from one second to the next.
    assert row.local_step_ms == pytest.approx(alone.step_ms_p50, rel=0.1)
    assert row.comm_exposed_ms == pytest.approx(collective.step_ms_p50, rel=0.15)
    assert row.comm_bytes == {"all_reduce": 512 * 2**20}


def test_peak_memory_is_split_into_its_parts(cluster):
    row = row_of(cluster, OWN_DDP, batch_size=1024, by_context=True)
    parameters = 8 * (8192 * 8192 + 8192) * 4
    assert row.mem_parameters_bytes == parameters
    assert row.mem_optimizer_bytes == pytest.approx(2 * parameters, rel=0.01)
    assert 0 < row.mem_gradients_bytes <= 1.01 * parameters
    names = ("parameters", "gradients", "optimizer", "activations", "other")
    total = sum(getattr(row, f"mem_{name}_bytes") for name in names)
    assert total == pytest.approx(row.peak_mem_allocated_bytes, rel=0.02)


@needs_two
def test_a_slow_collective_adds_only_exposed_communication(cluster):
    sound, slow = (
        row_of(cluster, REDUCE, world_size=2, env=env, **IDLE_CLOCK) for env in ({}, ONE_CHANNEL)
    )
    more_ms = slow.step_ms_p50 - sound.step_ms_p50
    assert more_ms > 2 * sound.comm_exposed_ms
    assert slow.comm_exposed_ms - sound.comm_exposed_ms == pytest.approx(more_ms, rel=0.1)
    assert abs(slow.local_step_ms - sound.local_step_ms) < more_ms / 10
    assert slow.slowest_rank is None
    assert slow.host_bound is not True


# The last one: it replaces the processes.
@needs_two
def test_a_profile_has_kernels_and_times_by_module(cluster):
    record = record_of(cluster, world_size=2, hidden=1024, layers=4, profile=True)
    for measurement in record.measurements:
        assert measurement.worker_reusable is False
        events = json.loads(gzip.decompress(measurement.profile.trace))["traceEvents"]
        kernels = {event["name"] for event in events if event.get("cat") == "kernel"}
        assert any("nccl" in name.lower() for name in kernels)
        modules = {module.name: module for module in measurement.profile.modules}
        assert modules[""].backward_ms > modules["0"].forward_ms > 0
        print({name: (m.forward_ms, m.backward_ms) for name, m in modules.items()})
