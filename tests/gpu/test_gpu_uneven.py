"""Uneven steps on two GPUs over NCCL: `pytest -m gpu tests/gpu/test_gpu_uneven.py`."""

import pytest

from raybench.job.model import Measure
from raybench.job.point import SlowBy
from raybench.records.doubts import DoubtKind
from raybench.records.task import Task
from tests.gpu.gpus import TWO_GPUS, cluster_of
from tests.measured_points import measure_row
from tests.unit.fakes import make_point

pytestmark = TWO_GPUS
DOUBLE = "tests.gpu.gpu_workloads:Double"
PASSES = 8
# 20 ms of products in fp32, which no power cap slows down.
MLP = {"hidden": 1024, "layers": 4}
cluster = cluster_of(2)


def measured(cluster, workload, *, batch_size, passes, **settings):
    point = make_point(
        workload=workload,
        params={"grad_accumulation": passes, **(MLP if workload == "mlp" else {})},
        world_size=2,
        batch_size=batch_size,
        global_batch_size=2 * batch_size * passes,
        **settings,
    )
    measure = Measure(warmup=5, iterations=20, max_seconds=4)
    row = measure_row(cluster, Task(point=point, settings=measure))
    # Shown with -rP: these are figures to look at, not only to pass.
    told = {name: value for name, value in vars(row).items() if "_ms" in name or "share" in name}
    print(settings, told, row.slow_ratio_by_rank, row.gradient_error, row.setup_s, row.doubts)
    return row


# Shares as given, of no powers of two: weights are rounded then.
@pytest.mark.parametrize("shares", ["22000/10768", "by_speed_accumulation"])
def test_uneven_gradients_equal_those_of_one_process(cluster, shares):
    row = measured(cluster, DOUBLE, batch_size=2048, passes=PASSES, shares=shares, slow_ratio=0.33)
    first, second = row.share_by_rank
    assert first + second == 2 * 2048 * PASSES
    assert first > second > 0
    assert row.gradient_error <= 1e-12


def test_extra_compute_slows_a_device_as_requested(cluster):
    row = measured(cluster, "mlp", batch_size=16384, passes=1, slow_ratio=0.33)
    fast, slow = row.slow_ratio_by_rank
    assert fast is None
    assert slow == pytest.approx(0.33, rel=0.1)
    own = row.local_step_ms_by_rank
    assert own[0] / own[1] == pytest.approx(slow, rel=0.05)


def test_half_the_multiprocessors_emulate_a_slower_device(cluster):
    row = measured(cluster, "mlp", batch_size=16384, passes=1, slow_ratio=0.5, slow_by=SlowBy.SMS)
    assert 0.4 < row.slow_ratio_by_rank[1] < 0.8
    (doubt,) = (doubt for doubt in row.doubts if doubt.kind is DoubtKind.EMULATED)
    assert (doubt.subject, doubt.limit) == ("rank 1", 0.5)
    assert doubt.value == row.slow_ratio_by_rank[1]


def test_passes_by_speed_shorten_the_step_as_predicted(cluster):
    equal, by_speed = (
        measured(cluster, "mlp", batch_size=4096, passes=PASSES, shares=shares, slow_ratio=0.5)
        for shares in ("equal", "by_speed_accumulation")
    )
    assert by_speed.step_ms_p50 < 0.85 * equal.step_ms_p50
    for row in (equal, by_speed):
        assert row.predicted_step_ms == pytest.approx(row.step_ms_p50, rel=0.05)
