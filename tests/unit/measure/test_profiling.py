"""Times of modules, traces of steps, and what a trace tells of collectives and attention."""

import gzip
import json

import pytest
import torch
from builders import (
    make_context,
    make_device,
    make_measure,
    make_measurement,
    make_point,
)
from torch import Tensor, library, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from raybench.cli.sweep import select_ids
from raybench.errors import UsageError
from raybench.job.plan import Plan
from raybench.measure import profiling
from raybench.measure.profiling import (
    attention_kernels,
    module_times,
    profile,
)
from raybench.records import Answer, Group, ModuleTime, RankInfo, Task
from raybench.sweep.loop import SweepSettings, sweep
from raybench.sweep.scheduler import Rounds
from raybench.workloads.base import Workload
from raybench.workloads.language_models import LanguageModel
from raybench.workloads.networks import Mlp
from raybench.workloads.shapes import DecoderShape
from tests.local_cluster import LocalCluster

CPU = torch.device("cpu")


class Clock:
    """Stands still but where a module is said to take time."""

    now_ns = 0


@pytest.fixture(autouse=True)
def _still_clock(monkeypatch):
    # A busy machine would make any sleep longer.
    monkeypatch.setattr(profiling, "make_marker", lambda _: lambda: Clock.now_ns)


class _Sleep(torch.autograd.Function):
    """Takes 4 ms forward and 8 ms backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        Clock.now_ns += 4_000_000
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        Clock.now_ns += 8_000_000
        return grad


class Sleepy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(x)
        return slept


def times_of(model: nn.Module, inputs: Tensor, steps: int = 3) -> dict[str, ModuleTime]:
    def step() -> None:
        model.zero_grad()
        model(inputs).sum().backward()

    return {found.name: found for found in module_times(model, step, CPU, steps)}


def test_each_module_has_its_own_time_forward_and_backward():
    model = nn.Sequential(nn.Linear(4, 4), Sleepy(), nn.Linear(4, 1), Sleepy(), Sleepy())
    found = times_of(model, torch.ones(2, 4))
    kinds = ["Sequential", "Linear", "Sleepy", "Linear", "Sleepy", "Sleepy"]
    assert [(one.kind, one.calls) for one in found.values()] == [(kind, 1) for kind in kinds]
    assert (found[""].forward_ms, found[""].backward_ms) == (12, 24)
    assert (found["0"].forward_ms, found["0"].backward_ms) == (0, 0)
    assert (found["1"].forward_ms, found["1"].backward_ms) == (4, 8)
    assert (found["2"].forward_ms, found["2"].backward_ms) == (0, 0)
    # A module that runs twice is added up, and one without gradients has no backward.
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4), *[Sleepy()] * 2)
    found = times_of(model, torch.ones(2, 4))
    assert (found["2"].calls, found["2"].forward_ms, found["2"].backward_ms) == (2, 8, 16)
    assert found["0"].backward_ms is None
    for module in model.modules():
        assert not {**module._forward_hooks, **module._forward_pre_hooks}
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_modules_may_change_their_input_in_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    inputs = torch.randn(8, 4)
    model(inputs).sum().backward()
    usual = [parameter.grad for parameter in model.parameters()]
    assert len(times_of(model, inputs)) == 4
    for parameter, gradient in zip(model.parameters(), usual, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_recomputed_activations_count_as_forward():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.second, self.first(x), use_reentrant=False)
            return out

    found = times_of(Checkpointed(), torch.ones(2, 4))
    assert found["first"].calls == 1
    assert found["second.0"].calls == 2
    assert found["second.0"].backward_ms is not None


def test_compiled_modules_are_timed_as_a_whole_and_not_compiled_anew():
    model = nn.Sequential(nn.Linear(4, 4), *(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    for block in model[1:]:
        block.compile(backend="eager")
    inputs = torch.ones(2, 4)
    model(inputs).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        found = times_of(model, inputs)
        model(inputs)
    assert list(found) == ["", "0", "1", "2"]
    for one in found.values():
        assert one.calls == 1
        assert one.backward_ms is not None


# By torch.compile, which looks at what a hook was given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_model_that_is_compiled_whole_has_no_modules():
    model = LanguageModel(DecoderShape(layers=1, heads=1, width=8, vocabulary=16), seq_len=4)
    compiled, tokens = torch.compile(model, backend="eager"), torch.zeros(1, 4, dtype=torch.long)

    def step() -> None:
        compiled(tokens).sum().backward()

    step()
    assert module_times(model, step, CPU, 2) == ()


def test_the_trace_holds_the_steps_asked_for():
    workload = Mlp(make_context(), hidden=16, layers=2)
    trace = json.loads(gzip.decompress(profile(workload, make_context(), 3).trace))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    # Each as a range of the profiler's own.
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 3
    assert "aten::addmm" in names
    assert any(name.startswith("Optimizer.step") for name in names)


def test_a_workload_without_a_model_has_a_trace_and_no_modules():
    class Bare(Workload):
        def step(self) -> None:
            torch.ones(4).sum()

    found = profile(Bare(), make_context(), 1)
    assert found.modules == ()
    assert b"aten::sum" in gzip.decompress(found.trace)


def test_only_the_chosen_points_are_profiled():
    asked: list[Task] = []

    class Noting:
        def run(self, task: Task, place: RankInfo, group: Group | None) -> Answer:
            asked.append(task)
            return make_measurement(place.rank, [[1_000_000] * 6])

    cluster = LocalCluster([make_device()], lambda _: Noting())
    cluster.start(1, "pack")
    plan = Plan(points=tuple(make_point(batch_size=size) for size in (8, 16, 32)))
    settings = SweepSettings(
        measure=make_measure(),
        strategy="pack",
        stop_on_error=False,
        profiled=select_ids(plan, "batch_size > 8", "--profile"),
    )
    list(sweep(Rounds(plan=plan), settings, cluster, lambda *_: None))
    assert [task.profile for task in asked] == [False, True, True]
    with pytest.raises(UsageError, match=r"^--profile nonsense > 1: "):
        select_ids(plan, "nonsense > 1", "--profile")


TOKENS = torch.ones(1, 2, 8, 16, requires_grad=True)


def attend(query: torch.Tensor = TOKENS) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, TOKENS, TOKENS)


@library.custom_op("raybench_tests::attend", mutates_args=())
def attend_by_own_operator(query: torch.Tensor) -> torch.Tensor:
    return attend(query)


def test_the_kernel_that_torch_takes_is_named_forward_and_backward():
    for backend, kernel in ((SDPBackend.MATH, "math"), (SDPBackend.FLASH_ATTENTION, "flash")):
        with sdpa_kernel(backend):
            assert attention_kernels(attend) == (kernel,)
            assert attention_kernels(lambda: attend().sum().backward()) == (kernel,)
    assert attention_kernels(lambda: TOKENS + 1) == ()


def test_all_kernels_of_a_step_are_named_also_in_an_operator_of_ones_own():
    def step() -> None:
        attend_by_own_operator(TOKENS.detach())
        with sdpa_kernel(SDPBackend.MATH):
            attend()

    assert attention_kernels(step) == ("flash", "math")


def test_a_step_that_fails_leaves_no_profiler_behind():
    with pytest.raises(ZeroDivisionError):
        attention_kernels(lambda: 1 / 0)
    assert not torch._C._autograd._profiler_enabled()
    assert attention_kernels(attend) == ("flash",)
