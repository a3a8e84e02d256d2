"""Where the time goes on GPUs, from the workers to the row: `pytest -m gpu tests/gpu`."""

import gzip
import json

import pytest

from raybench.job.model import Measure
from raybench.job.point import Precision
from raybench.records import Task
from raybench.results.tables import point_row
from tests.gpu.gpus import GPU, cluster_of, needs_two
from tests.measured_points import measure_record
from tests.unit.fakes import make_point

pytestmark = GPU
SLOWED = "tests.gpu.gpu_workloads:SlowedMlp"
EXAMPLE = "docs.examples.convnet:ConvNet"
DELAY_MS = 10.0
cluster = cluster_of(2)


def record_of(cluster, workload="mlp", *, profile=False, **given):
    names = ("world_size", "batch_size", "precision")
    settings = {"precision": Precision.BF16, "batch_size": 64}
    settings |= {name: given.pop(name) for name in names if name in given}
    point = make_point(workload=workload, params=given, **settings)
    measure = Measure(warmup=10, iterations=40)
    return measure_record(cluster, Task(point=point, settings=measure, profile=profile))


def row_of(cluster, workload="mlp", **settings):
    row = point_row("run-a", record_of(cluster, workload, **settings), Measure())
    columns = [name for name in vars(row) if name.endswith("_ms") or name == "step_ms_p50"]
    told = {name: getattr(row, name) for name in (*columns, "host_bound", "slowest_rank")}
    # Shown with -rP: these are figures to look at, not only to pass.
    print({name: round(value, 3) if value else value for name, value in told.items()})
    return row


@needs_two
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_slow_rank_is_named_with_its_delay(cluster, slow_rank):
    # Large enough that the other rank waits for nothing else: a slow host takes 4 ms for the step.
    row = row_of(
        cluster,
        SLOWED,
        world_size=2,
        batch_size=16384,
        slow_rank=slow_rank,
        delay_ms=DELAY_MS,
    )
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
