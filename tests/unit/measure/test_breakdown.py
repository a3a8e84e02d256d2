"""What the instrumented steps say. Two ranks are in test_workloads_ddp and tests/integration."""

import time
from dataclasses import replace
from itertools import chain, count, cycle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from builders import make_context
from forked import gloo, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from raybench.measure import breakdown, marks
from raybench.measure.breakdown import Extent, break_down
from raybench.measure.instruments import Timer
from raybench.measure.marks import OptimizerMarks, ScriptMarks, comm_ms, tail_ms
from raybench.records.doubts import NotMeasured
from raybench.workloads.base import Workload
from raybench.workloads.wall_clock import WallTimes

CPU = torch.device("cpu")
ALONE = make_context()


class Slow(Workload):
    """A step of sleeps: 6 ms, of which the optimizer takes 4."""

    def __init__(self) -> None:
        self.steps = 0
        self._optimizer = SlowOptimizer([nn.Parameter(torch.zeros(1))], {})

    def step(self) -> None:
        self.steps += 1
        time.sleep(0.002)
        self._optimizer.step()


class SlowOptimizer(torch.optim.Optimizer):
    def step(self, closure=None) -> None:
        time.sleep(0.004)


@pytest.mark.parametrize(
    ("buckets", "comm", "tail"),
    [
        pytest.param([(0, 5)], 5, 5, id="one bucket"),
        pytest.param([(0, 3), (10, 12)], 5, 2, id="a pause between two collectives is none"),
        pytest.param([(0, 8), (2, 11)], 11, 9, id="the second waits for the first to end"),
        pytest.param([(0, 8), (8, 8)], 8, 0, id="reduced at once"),
        pytest.param([(0, 9), (1, 4), (2, 10)], 10, 8, id="the second ends before the first"),
    ],
)
def test_collectives_run_one_after_the_other(buckets, comm, tail):
    assert comm_ms(buckets) == pytest.approx(comm)
    assert tail_ms(buckets) == pytest.approx(tail)


def test_a_cpu_rank_reports_local_step_and_optimizer():
    workload = Slow()
    found = break_down(workload, Timer(CPU), ALONE, Extent(samples=5))
    assert [len(block) for block in found.local_ms] == [3, 3]
    # Not how much longer: the machine may be busy.
    assert found.optimizer_ms >= 4
    assert min(chain(*found.local_ms)) >= 6
    assert found.device_ms is None
    assert found.comm_ms == found.tail_ms == ()
    assert found.not_measured["host_gap_ms"] is NotMeasured.GAP_OF_CPU
    assert found.methods["local_step_ms"] == "the step as it is"
    assert found.peak is None
    assert found.not_measured["mem_activations_bytes"] is NotMeasured.MEMORY_OF_CPU
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks


class Uneven(Workload):
    """Sums over the ranks; steps of rank 0 take 1 to 21 ms, of rank 1 always 5."""

    def __init__(self, rank: int) -> None:
        self._pauses_s = cycle([0.001, 0.021, 0.006, 0.016, 0.011] if rank == 0 else [0.005])

    def step(self) -> None:
        time.sleep(next(self._pauses_s))
        dist.all_reduce(torch.ones(1))


def blocks_of_rank(rank: int, store: str) -> list[int]:
    """The sizes of the blocks of local steps on this rank."""
    with gloo(rank, 2, store):
        extent = Extent(samples=6, most_local_samples=40)
        found = break_down(Uneven(rank), Timer(CPU), make_context(rank, 2), extent)
    return [len(block) for block in found.local_ms]


def test_all_ranks_repeat_for_an_unsure_one(tmp_path):
    unsure, sure = run_ranks(blocks_of_rank, 2, str(tmp_path / "store"))
    assert unsure == sure == [3] * 14


def test_only_outermost_optimizers_of_a_step_add_up(monkeypatch):
    monkeypatch.setattr(marks, "make_marker", lambda _: count(step=1_000_000).__next__)
    found = OptimizerMarks(CPU)
    begin, end = found.begin, found.end
    for moments in ((begin, end, begin, end), (end,), (begin, begin, end, end)):
        for note in moments:
            note()
        found.end_step()
    assert found.take() == [2, None, 2]


def test_gradient_hooks_of_a_ddp_subclass_are_found():
    model = type("Own", (DistributedDataParallel,), {"__init__": nn.Module.__init__})()
    model._comm_hooks = ["its own"]
    assert ScriptMarks.find_ddp_models(SimpleNamespace()) is NotMeasured.SCRIPT_OWN_HOOK


def test_no_marks_are_read_without_steps():
    assert ScriptMarks.take(SimpleNamespace(), 0) == {}


def test_a_cuda_graph_is_not_broken_down():
    workload = Slow()
    context = replace(ALONE, cuda_graph=True)
    found = break_down(workload, Timer(CPU), context, Extent(samples=5))
    assert workload.steps == 0
    assert found.local_ms == found.comm_ms == ()
    assert found.methods == {}
    assert set(found.not_measured.values()) == {NotMeasured.CUDA_GRAPH}
    names = {"compute_ms", "comm_exposed_ms", "wait_ms", "mem_other_bytes"}
    assert set(found.not_measured) >= names


@pytest.fixture
def spins(monkeypatch):
    """A device as fast as the host, whose spin kernel counts 1000 cycles in a millisecond."""
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(breakdown, "make_marker", lambda _: time.perf_counter_ns)
    monkeypatch.setattr(breakdown, "cycles_per_ms", lambda: 1000.0)
    monkeypatch.setattr(torch.cuda, "_sleep", asked.append)
    return asked


def test_the_device_is_delayed_if_the_host_lags(spins):
    breakdown.time_queued_steps(lambda: None, OptimizerMarks(CPU), 400, steps=3)
    assert spins == []
    device_ms = breakdown.time_queued_steps(
        lambda: time.sleep(0.004), OptimizerMarks(CPU), local_ms=4.0, steps=3
    )
    assert device_ms >= 4
    assert [cycles >= 6000 for cycles in spins] == [True] * 3


@pytest.mark.parametrize(("issue_ms", "others_ns"), [(0.0, 1_100_000_000), (1000.0, 0)])
def test_no_rank_runs_queued_steps_where_one_cannot(spins, monkeypatch, issue_ms, others_ns):
    issued = WallTimes(unsynced_ms=issue_ms, synced_ms=issue_ms)
    monkeypatch.setattr(breakdown, "time_by_wall_clock", lambda *_: issued)
    monkeypatch.setattr(breakdown, "max_over_ranks", lambda own, _: [max(*own, others_ns)])
    assert breakdown.time_queued_steps(lambda: None, OptimizerMarks(CPU), 700, steps=3) is None
    monkeypatch.setattr(breakdown, "watch_peak", lambda *_: None)
    context = replace(ALONE, device=torch.device("cuda", 0))
    found = break_down(Slow(), Timer(CPU), context, Extent(samples=3))
    assert found.not_measured["optimizer_ms"] is NotMeasured.HOST_TOO_SLOW
    assert spins == []
