"""Hot is as good as fresh, on one GPU: after a mess, and against new processes."""

import json
import statistics

import pytest

from raybench.job.model import Measure, Span
from raybench.job.point import Precision
from raybench.records.doubts import DoubtKind
from raybench.records.measurement import Measurement
from raybench.records.task import Task
from tests.gpu.gpus import GPU, cluster_of
from tests.unit.fakes import make_point

pytestmark = GPU

GPU_MESS = "tests.gpu.state_workloads:GpuMess"
MLP = {"hidden": 4096, "layers": 8}
cluster = cluster_of(1)


def run(cluster, workload, params, precision=Precision.BF16, *, cuda_graph=False, **measure):
    batch_size = {"mlp": 1024, "transformer": 4}.get(workload, 64)
    asked = {"precision": precision, "cuda_graph": cuda_graph, "batch_size": batch_size}
    point = make_point(workload=workload, params=params, **asked)
    lengths = {"warmup": Span(min=20, max=20), "iterations": 50}
    settings = Measure(**{**lengths, "breakdown": False, **measure})
    (answer,) = cluster.run(Task(point=point, settings=settings), (0,))
    assert isinstance(answer, Measurement), answer.detail or answer.message
    return answer


def run_mess(cluster, folder, mess):
    short = {"warmup": Span(min=2, max=2), "iterations": 2}
    params = {"folder": str(folder), "mess": mess}
    answer = run(cluster, GPU_MESS, params, Precision.FP32, **short)
    return json.loads((folder / "seen.json").read_text()), answer


def step_ms(measurement):
    (repetition,) = measurement.repetitions
    return statistics.median(repetition.timed.step_ns) / 1e6


def test_changed_settings_do_not_reach_the_next_point(cluster, tmp_path):
    before, _ = run_mess(cluster, tmp_path, "none")
    _, messy = run_mess(cluster, tmp_path, "settings")
    after, _ = run_mess(cluster, tmp_path, "none")
    # Told is only the precision that it had at the end.
    assert [doubt.kind for doubt in messy.doubts] == [DoubtKind.OTHER_PRECISION]
    assert messy.worker_reusable
    assert after == before


def test_points_of_a_process_choose_the_same_kernel(cluster, tmp_path):
    workload, params = "tests.gpu.state_workloads:Attention", {"folder": str(tmp_path)}
    choices = []
    for fresh_workers in (True, False, False):
        run(cluster, workload, params, fresh_workers=fresh_workers)
        choices.append(json.loads((tmp_path / "choice.json").read_text()))
    assert len(set(choices)) == 1, choices


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_earlier_points_change_neither_time_nor_memory(cluster, precision, capsys):
    first = run(cluster, "mlp", MLP, precision)
    process_id = cluster.devices[0].process_id
    run(cluster, "transformer", {"attention": "math"}, Precision.TF32)
    after_others = run(cluster, "mlp", MLP, precision)
    assert cluster.devices[0].process_id == process_id
    fresh = run(cluster, "mlp", MLP, precision, fresh_workers=True)
    assert cluster.devices[0].process_id != process_id
    with capsys.disabled():
        told = [f"{step_ms(one):.3f}" for one in (first, after_others, fresh)]
        print(f"\n{precision}: first, after others, fresh: {', '.join(told)} ms")
    for other in (after_others, fresh):
        assert step_ms(other) == pytest.approx(step_ms(first), rel=0.03)
        assert other.peak_mem_allocated_bytes == first.peak_mem_allocated_bytes
        assert other.peak_mem_reserved_bytes == first.peak_mem_reserved_bytes


def test_kept_device_memory_is_reported_and_ends_processes(cluster, tmp_path):
    run_mess(cluster, tmp_path, "none")
    process_id = cluster.devices[0].process_id
    _, greedy = run_mess(cluster, tmp_path, "memory")
    assert greedy.doubts[0].kind is DoubtKind.LEFT_BEHIND
    assert greedy.doubts[0].subject == "512 MiB of device memory"
    assert cluster.devices[0].process_id != process_id
    seen, _ = run_mess(cluster, tmp_path, "none")
    assert seen["allocated_bytes"] < 2**20


@pytest.mark.parametrize(
    ("workload", "params", "cuda_graph"),
    [
        ("mlp", {**MLP, "compile": True}, False),
        ("mlp", MLP, True),
        ("linear", {"data": "dataloader", "num_workers": 2, "pin_memory": True}, False),
        ("transformer", {}, False),
    ],
)
def test_the_built_in_workloads_leave_nothing_behind(cluster, workload, params, cuda_graph):
    run(cluster, "mlp", MLP)
    process_id = cluster.devices[0].process_id
    answer = run(cluster, workload, params, cuda_graph=cuda_graph)
    assert answer.doubts == ()
    assert answer.worker_reusable
    assert cluster.devices[0].process_id == process_id
