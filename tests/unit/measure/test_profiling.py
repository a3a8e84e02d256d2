"""Times of modules, traces, kernels of attention; operations of a step, and a device's rate."""

import gc
import gzip
import json
import random
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from builders import make_context
from torch import Tensor, library, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.measure import profiling
from raybench.measure.profiling import (
    attention_kernels,
    module_times,
    profile,
    step_flops,
    tflops_sustained,
)
from raybench.records.measurement import ModuleTime
from raybench.workloads.base import Context, Workload
from raybench.workloads.language_models import LanguageModel
from raybench.workloads.networks import Mlp
from raybench.workloads.shapes import DecoderShape

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
    def forward(self, x):
        return _Sleep.apply(x)


class Named(nn.Sequential):
    def forward(self, x):
        return self[0](x=x)


def times_of(model: nn.Module, inputs: Tensor, steps: int = 3) -> dict[str, ModuleTime]:
    def step() -> None:
        model.zero_grad()
        model(inputs).sum().backward()

    return {found.name: found for found in module_times(model, step, CPU, steps)}


def test_each_module_has_forward_and_backward_times():
    model = nn.Sequential(nn.Linear(4, 4), Sleepy(), nn.Linear(4, 1), Sleepy(), Sleepy())
    found = times_of(model, torch.ones(2, 4))
    kinds = ["Sequential", "Linear", "Sleepy", "Linear", "Sleepy", "Sleepy"]
    assert [(one.kind, one.calls) for one in found.values()] == [(kind, 1) for kind in kinds]
    assert (found[""].forward_ms, found[""].backward_ms) == (12, 24)
    assert (found["0"].forward_ms, found["0"].backward_ms) == (0, 0)
    assert (found["1"].forward_ms, found["1"].backward_ms) == (4, 8)
    assert (found["2"].forward_ms, found["2"].backward_ms) == (0, 0)
    # So has one whose input has a name.
    model = nn.Sequential(nn.Linear(4, 4), Named(Sleepy()))
    found = times_of(model, torch.ones(2, 4))
    assert (found["1.0"].forward_ms, found["1.0"].backward_ms) == (4, 8)
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

        def forward(self, x):
            return checkpoint(self.second, self.first(x), use_reentrant=False)

    found = times_of(Checkpointed(), torch.ones(2, 4))
    assert found["first"].calls == 1
    assert found["second.0"].calls == 2
    assert found["second.0"].backward_ms is not None


def test_compiled_modules_are_timed_without_recompiling():
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
def test_a_fully_compiled_model_has_no_modules():
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


def test_a_model_that_is_no_module_is_traced():
    workload = Copying(make_context())
    for workload.model in (None, "large"):
        found = profile(workload, make_context(), 1)
        assert found.modules == ()
        assert b"aten::clone" in gzip.decompress(found.trace)


TOKENS = torch.ones(1, 2, 8, 16, requires_grad=True)


def attend(query: torch.Tensor = TOKENS) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, TOKENS, TOKENS)


@library.custom_op("raybench_tests::attend", mutates_args=())
def attend_by_own_operator(query: torch.Tensor) -> torch.Tensor:
    return attend(query)


def test_the_attention_kernel_is_named_forward_and_backward():
    for backend, kernel in ((SDPBackend.MATH, "math"), (SDPBackend.FLASH_ATTENTION, "flash")):
        with sdpa_kernel(backend):
            assert attention_kernels(attend) == (kernel,)
            assert attention_kernels(lambda: attend().sum().backward()) == (kernel,)
    assert attention_kernels(lambda: TOKENS + 1) == ()


def test_kernels_inside_custom_operators_are_named_too():
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


BATCH, HIDDEN, LAYERS = 16, 32, 3
FORWARD = 2 * BATCH * HIDDEN * HIDDEN * LAYERS
# The first layer's input needs no gradient.
TRAINING = 3 * FORWARD - 2 * BATCH * HIDDEN * HIDDEN


def context(**changes) -> Context:
    settings = {"batch_size": BATCH, "precision": Precision.BF16, "cuda_graph": True, **changes}
    return make_context(1, 2, **settings)


class Stack(Workload):
    """A stack of linear layers, trained."""

    contexts: list[Context] = []
    closed = 0

    def __init__(self, context: Context, *, hidden: int = HIDDEN, layers: int = LAYERS) -> None:
        type(self).contexts.append(context)
        torch.manual_seed(context.seed)
        with context.device:
            stack = [nn.Linear(hidden, hidden) for _ in range(layers)]
            self.model = nn.Sequential(*stack)
            self.inputs = torch.randn(context.batch_size, hidden)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.model(self.inputs).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        type(self).closed += 1


class Compiled(Stack):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.model = torch.compile(self.model, backend=_refuse)


def _refuse(graph, inputs):
    raise AssertionError("compiled")


class CausalAttention(Workload):
    def __init__(self, context: Context) -> None:
        self.query = torch.empty(2, 4, 64, 8, device=context.device, requires_grad=True)

    def step(self) -> None:
        q = self.query
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


class Messy(Stack):
    """Leaves what a user's code can leave, and fails."""

    def step(self) -> None:
        super().step()
        random.random()
        np.random.random()
        torch.rand(3)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        raise RuntimeError("first line\nsecond line")


class Reading(Stack):
    def step(self) -> None:
        self.model(self.inputs).sum().item()


class Lonely:
    def __init__(self, context: Context) -> None:
        raise UsageError("needs at least 2 ranks")


class Copying(Workload):
    def __init__(self, context: Context) -> None:
        self.source = torch.empty(1000, device=context.device)

    def step(self) -> None:
        self.source.clone()


def test_training_flops_omit_the_gradient_of_the_input():
    counted = step_flops(Stack, {"hidden": HIDDEN, "layers": LAYERS}, context())
    assert counted.flops == TRAINING
    assert isinstance(counted.flops, float)
    shared = type("Shared", (Stack,), {"shares_work": True})
    assert step_flops(shared, {}, context()).flops == TRAINING / 2
    assert "meta" in counted.method


def test_flops_are_counted_on_meta_with_one_rank():
    Stack.contexts.clear()
    Stack.closed = 0
    step_flops(Stack, {}, context())
    (built,) = Stack.contexts
    assert built.device.type == "meta"
    assert (built.rank, built.local_rank, built.world_size) == (0, 0, 1)
    assert (built.precision, built.cuda_graph) == (Precision.FP32, False)
    assert (built.batch_size, built.seed) == (BATCH, 7)
    assert Stack.closed == 1


def test_flops_need_no_compilation_and_ignore_causal_masks():
    assert step_flops(Compiled, {}, context()).flops == TRAINING
    assert step_flops(CausalAttention, {}, context()).flops == 2 * 2 * (2 * 4 * 64 * 64 * 8)


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (Messy, "RuntimeError: first line"),
        (Reading, "the step needs values, but it is counted on torch's meta device, which has"),
        (Lonely, "not counted: needs at least 2 ranks; set flops_per_step in the class to tell it"),
        (Copying, "none that the counter knows"),
        (type("Choosy", (Stack,), {"ranks_per_item": lambda of: of["seed"]}), "KeyError"),
    ],
)
def test_uncountable_flops_have_a_reason_of_one_line(workload, reason):
    counted = step_flops(workload, {}, context())
    assert counted.flops is None
    assert counted.method.startswith("not counted: ")
    assert reason in counted.method
    assert "\n" not in counted.method


@pytest.mark.parametrize("workload", [Stack, Messy])
def test_counting_leaves_no_trace(workload):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    step_flops(workload, {}, context())
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert (np.random.get_state()[1] == state[2]).all()
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_default_device().type == "cpu"
    assert torch.utils._device.CURRENT_DEVICE is None
    assert gc.isenabled()
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


PRODUCT_TFLOP = 2.0 * 8192**3 / 1e12


class Limited:
    """A device whose products take 1 ms each for 0.15 s, and 2 ms once its power limit acts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms, self.products = 0.0, 0
        monkeypatch.setattr(torch, "mm", self._product)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: self._event())
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        for name in ("Generator", "randn", "empty"):
            monkeypatch.setattr(torch, name, Mock())

    def _product(self, left: None, right: None, out: None) -> None:
        self.products += 1
        self.now_ms += 1.0 if self.now_ms < 150 else 2.0

    def _event(self) -> SimpleNamespace:
        event = SimpleNamespace(at_ms=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at_ms", self.now_ms)
        event.elapsed_time = lambda end: end.at_ms - event.at_ms
        return event


def test_sustained_rate_is_measured_under_the_power_limit(monkeypatch):
    limited = Limited(monkeypatch)
    found = tflops_sustained(torch.device("cuda", 0), [Precision.BF16])
    assert found == {Precision.BF16: pytest.approx(PRODUCT_TFLOP / 2e-3)}
    assert limited.now_ms > 400


def test_unsupported_products_have_no_sustained_rate(monkeypatch):
    limited = Limited(monkeypatch)
    assert tflops_sustained(torch.device("cpu"), list(Precision)) == dict.fromkeys(Precision)
    assert limited.products == 0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert tflops_sustained(torch.device("cuda", 0), [Precision.FLOAT8]) == {Precision.FLOAT8: None}
    monkeypatch.setattr(torch, "randn", Mock(side_effect=torch.OutOfMemoryError("no memory")))
    assert tflops_sustained(torch.device("cuda", 0), [Precision.FP32]) == {Precision.FP32: None}
