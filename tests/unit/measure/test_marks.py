"""Regions that a step names, from the step to the table; what its peak of memory is made of."""

from collections.abc import Sequence
from contextlib import suppress

import pytest
import region_workloads
import torch
from builders import make_context
from fakes import make_point, measure_here
from region_workloads import LONG_S, SHORT_S
from torch import nn

from raybench import load
from raybench.job.model import Measure
from raybench.measure import marks as moments
from raybench.measure import phases
from raybench.measure.breakdown import Extent, break_down
from raybench.measure.instruments import Timer
from raybench.measure.marks import Mark, RegionMarks, watch_peak
from raybench.records.doubts import NotMeasured
from raybench.workloads.base import Context, Workload

CPU = torch.device("cpu")
NAMES = ["forward", "attention", "back\nward"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A run of these workloads in this process."""
    workloads = ("region_workloads:Parts", "region_workloads:Numbered", "mlp")
    params = {"hidden": 16, "layers": 1}
    points = [make_point(workload=one, params=params if one == "mlp" else {}) for one in workloads]
    return measure_here(tmp_path_factory.mktemp("regions"), points, warmup=2, iterations=4)


def test_each_region_has_a_row_with_its_share(results):
    points = load(results, "points").set_index("workload")
    found = load(results, "regions")
    assert set(found["point_id"]) == {points.loc["region_workloads:Parts"]["point_id"]}
    assert found["region"].tolist() == NAMES
    assert found["calls"].tolist() == [1, 2, 1]
    forward, attention, backward = found["region_ms"]
    # Not how much longer: the machine may be busy.
    assert attention >= 2 * SHORT_S * 1e3
    assert forward >= LONG_S * 1e3 + attention * 0.9
    assert backward >= LONG_S * 1e3
    step_ms = found["region_ms"] / found["share_pct"] * 100
    assert step_ms.max() - step_ms.min() < 1e-6 * step_ms.max()
    # Medians, which add up to more than all where the machine is busy.
    assert 50 < found["share_pct"][0] + found["share_pct"][2] <= 130
    assert "host clock" in points.loc["region_workloads:Parts"]["methods"]["regions"]
    assert "regions" not in points.loc["mlp"]["methods"]
    numbered = points.loc["region_workloads:Numbered"]
    assert numbered["status"] == "error"
    assert numbered["error_message"].endswith("the name of a region must be a text, given 5")


@pytest.fixture
def marks(monkeypatch):
    """Each mark that a region makes; the clock goes on by one with each."""
    made: list[int] = []

    def mark() -> Mark:
        made.append(len(made))
        return len(made) * 1_000_000

    monkeypatch.setattr(moments, "make_marker", lambda device: mark)
    return made


def test_only_the_breakdown_marks_regions(marks):
    context = make_context()
    for is_asked in (False, True):
        settings = Measure(warmup=2, iterations=4, breakdown=is_asked)
        phases.measure(lambda: region_workloads.Parts(context), context, settings)
        assert bool(marks) is is_asked


def test_only_steps_with_regions_run_again_for_them():
    class Counted(Workload):
        def __init__(self, context: Context, names: Sequence[str]) -> None:
            self.steps, self._context, self._names = 0, context, names

        def step(self) -> None:
            self.steps += 1
            for name in self._names:
                with self._context.region(name):
                    pass

    steps = {}
    for names in ((), ("part",)):
        context = make_context()
        workload = Counted(context, names)
        workload.step()
        found = break_down(workload, Timer(CPU), context, Extent(samples=3))
        assert [region.name for region in found.regions] == list(names)
        steps[names] = workload.steps
    # One to warm up, two that are not timed, and three.
    assert steps["part",] == steps[()] + 6


def test_repeated_regions_add_up_and_outer_contain_inner(marks):
    timed = RegionMarks(CPU)

    def step(times: int) -> None:
        with timed.region("outer"):
            for _ in range(times):
                with timed.region("inner"):
                    pass
        timed.end_step()

    for times in (1, 2, 0):
        step(times)
    outer, inner = timed.take(3, step_ms=10.0)
    # A mark is 1 ms: each inner region takes one, and makes the outer one two longer.
    assert (outer.name, outer.calls, outer.ms, outer.share) == ("outer", 1, 3.0, 0.3)
    assert (inner.name, inner.calls, inner.ms) == ("inner", 2, 1.0)


def test_a_caught_error_ends_its_region(marks):
    timed = RegionMarks(CPU)
    with suppress(StopIteration), timed.region("data"):
        next(iter(()))
    timed.end_step()
    [found] = timed.take(1, step_ms=10.0)
    assert (found.name, found.ms) == ("data", 1.0)


def test_regions_in_compiled_code_are_omitted_and_named():
    context = make_context()
    workload = region_workloads.Compiled(context)
    workload.step()
    found = break_down(workload, Timer(CPU), context, Extent(samples=3))
    assert [region.name for region in found.regions] == ["around"]
    assert found.regions[0].ms >= SHORT_S * 1e3
    assert found.methods["regions"].endswith("torch.compile: inside")
    assert found.not_measured["optimizer_ms"] is NotMeasured.NO_OPTIMIZER


# Far above what models of other tests may still hold.
BEGIN, PEAK = 10**9, 5 * 10**9
PARAMETERS = 4 * 4 * 4
# Two moments, and a step counter of one float32.
STATE = 2 * PARAMETERS + 4


class Allocator:
    """What torch's functions say: allocated now, and the most since the last reset."""

    most = BEGIN


@pytest.fixture
def allocator(monkeypatch) -> Allocator:
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: BEGIN)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: allocator.most)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda _: setattr(allocator, "most", BEGIN)
    )
    return allocator


class Trains(Workload):
    """A step whose memory is largest before its backward pass, or in its optimizer."""

    def __init__(self, allocator: Allocator, where: str) -> None:
        self._allocator, self._where = allocator, where
        self.model = nn.Linear(4, 4, bias=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-12, foreach=False)

    def step(self) -> None:
        loss = self.model(torch.ones(2, 4)).sum()
        self._reach(PEAK if self._where == "forward" else BEGIN + 10)
        loss.backward()
        self.optimizer.register_step_pre_hook(lambda *_: self._reach(BEGIN + 20))
        self.optimizer.step()
        self._reach(PEAK if self._where == "optimizer" else BEGIN)
        self.optimizer.zero_grad()

    def _reach(self, most: int) -> None:
        self._allocator.most = max(self._allocator.most, most)


@pytest.mark.parametrize(("where", "gradients"), [("forward", 0), ("optimizer", PARAMETERS)])
def test_gradients_are_counted_at_the_memory_peak(allocator, where, gradients):
    trains = Trains(allocator, where)
    found = watch_peak(trains.step, CPU)
    assert found.optimizer_bytes == STATE
    assert found.gradients_bytes == gradients
    assert found.activations_bytes == PEAK - BEGIN - gradients
    assert found.parameters_bytes + found.other_bytes == BEGIN - STATE
    assert not any(p._post_accumulate_grad_hooks for p in trains.model.parameters())


def test_a_rank_without_a_model_also_steps_twice():
    steps: list[None] = []
    assert watch_peak(lambda: steps.append(None), torch.device("cpu", 7)) is None
    assert len(steps) == 2


class Bare(Workload):
    def step(self) -> None: ...


def parameter_bytes(workload: Workload) -> int:
    found = watch_peak(workload.step, CPU)
    return found.parameters_bytes if found else 0


@pytest.mark.usefixtures("allocator")
def test_a_model_is_found_anywhere_in_its_workload():
    class Infers(Bare):
        def __init__(self) -> None:
            model = nn.Linear(4, 4, bias=False)
            self._steps = [lambda: model]

    others = parameter_bytes(Bare())
    assert parameter_bytes(Infers()) - others == PARAMETERS
    # It is gone with its workload.
    assert parameter_bytes(Bare()) == others
