"""Ranks slowed on purpose, and steps shared out unevenly: Ray and gloo, to the row of a point."""

from dataclasses import replace

import pytest

from raybench.job.model import Measure
from raybench.records.doubts import DoubtKind
from raybench.records.measurement import Failure
from raybench.records.task import Task
from raybench.results.point_row import is_slowed_by_one_rank
from tests.cluster_contract import PROBE, failures, process_ids, run
from tests.measured_points import measure_row
from tests.unit.fakes import make_point

EXAMPLE = "docs.examples.convnet:ConvNet"
OTHER = "tests.integration.probe_workloads:OtherProbe"
DELAY_MS = 60.0


@pytest.fixture
def cluster(three_workers):
    """Points are on the first two."""
    return three_workers


def measured(cluster, workload=PROBE, *, profile=False, **params):
    """The row of one point of two ranks."""
    if workload == PROBE:
        params = {"hidden": 256, "layers": 4, "sums": False, **params}
    point = make_point(workload=workload, params=params, world_size=2)
    settings = Measure(warmup=3, iterations=15)
    return measure_row(cluster, Task(point=point, settings=settings, profile=profile))


UNEVEN = make_point(
    params={"grad_accumulation": 2, "hidden": 128, "layers": 2},
    world_size=3,
    batch_size=16,
    global_batch_size=96,
    slow_ratio=0.4,
)


def shared_out(cluster, **settings):
    """The row of a point of three ranks, the last of which is slow."""
    point = replace(UNEVEN, **settings)
    measure = Measure(warmup=3, iterations=15)
    return measure_row(cluster, Task(point=point, settings=measure))


@pytest.mark.long
def test_slow_rank_without_share_is_left_out(three_workers):
    row = shared_out(three_workers, shares="fast")
    assert row.share_by_rank == (48, 48, 0)
    assert len(row.local_step_ms_by_rank) == 2
    assert row.gradient_error < 1e-5
    assert row.comm_ms > 0


def test_workers_are_as_before_after_an_uneven_point(three_workers):
    shared_out(three_workers, shares="64/20/12")
    point = replace(UNEVEN, slow_ratio=1.0)
    task = Task(point=point, settings=Measure(warmup=3, iterations=15))
    for answer in three_workers.run(task, (0, 1, 2)):
        assert not isinstance(answer, Failure), answer
        assert answer.share is None
        assert answer.items_per_step == 32


@pytest.mark.long
def test_only_another_class_gets_new_processes(cluster):
    used = []
    for workload, worker_ids in ((OTHER, [0]), (PROBE, [0, 1, 2]), (PROBE, [0, 1, 2])):
        assert failures(run(cluster, *worker_ids, workload=workload)) == []
        used.append(process_ids(cluster)[0])
    first, second, third = used
    assert first != second == third


@pytest.mark.long
@pytest.mark.parametrize("slow_rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_slow_rank_is_named_with_its_delay(cluster, slow_rank):
    # Other work on the host may delay the other rank now and then.
    for _ in range(3):
        row = measured(cluster, faulty_rank=slow_rank, delay_ms=DELAY_MS)
        if is_slowed_by_one_rank(row):
            break
    assert is_slowed_by_one_rank(row)
    assert row.slowest_rank == slow_rank
    assert row.straggler_ms == pytest.approx(DELAY_MS, rel=0.2)
    assert [ms >= DELAY_MS for ms in row.local_step_ms_by_rank] == [
        rank == slow_rank for rank in (0, 1)
    ]
    (doubt,) = (doubt for doubt in row.doubts if doubt.kind is DoubtKind.SLOW_RANK)
    assert doubt.subject == f"rank {slow_rank}"
    assert doubt.value == pytest.approx(DELAY_MS / row.step_ms_p50, rel=0.2)
    # Every step takes as long as the slow rank alone needs: that is no communication.
    assert row.local_step_ms >= DELAY_MS
    assert row.comm_ms < DELAY_MS / 2
    assert row.comm_exposed_ms < DELAY_MS / 2
    assert row.optimizer_ms > 0
    assert row.host_bound is None
    assert "noop_hook" in row.methods["comm_exposed_ms"]


def test_of_equal_ranks_none_is_slow(cluster):
    row = measured(cluster)
    assert not is_slowed_by_one_rank(row)
    assert row.slowest_rank is None
    assert row.straggler_ms < DELAY_MS / 3
    assert row.comm_ms > 0
    assert row.compute_ms > 0


SMALL = {"channels": 4, "image_size": 8}
PARTS = ("compute_ms", "comm_ms", "comm_exposed_ms", "straggler_ms", "optimizer_ms")


@pytest.mark.long
def test_documented_example_has_a_breakdown_even_compiled(cluster):
    row = measured(cluster, EXAMPLE, **SMALL)
    assert all(getattr(row, name) is not None for name in PARTS), row
    assert row.throughput > 0
    compiled = measured(cluster, EXAMPLE, **SMALL, compile=True)
    assert all(getattr(compiled, name) is not None for name in PARTS if name != "comm_ms"), compiled
    # For its gradients DDP's hook would compile another model.
    assert "local copies" in compiled.methods["comm_exposed_ms"]
    assert compiled.throughput > 0
    # The next point is not taken for compiled, too.
    assert "noop_hook" in measured(cluster, EXAMPLE, **SMALL).methods["comm_exposed_ms"]


@pytest.mark.long
def test_a_profiled_process_is_replaced(cluster):
    measured(cluster)  # another class would have new processes
    before = process_ids(cluster)[:2]
    measured(cluster, profile=True)
    measured(cluster)
    assert not set(before) & set(process_ids(cluster))
