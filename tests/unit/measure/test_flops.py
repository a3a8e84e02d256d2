"""Operations of one step, counted on meta tensors, and the rate that a device sustains."""

import gc
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import make_context
from torch import nn

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.measure.profiling import step_flops, tflops_sustained
from raybench.workloads.base import Context, Workload

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


def test_training_costs_three_forward_passes_less_the_gradient_of_the_input():
    counted = step_flops(Stack, {"hidden": HIDDEN, "layers": LAYERS}, context())
    assert counted.flops == TRAINING
    assert isinstance(counted.flops, float)
    shared = type("Shared", (Stack,), {"shares_work": True})
    assert step_flops(shared, {}, context()).flops == TRAINING / 2
    assert "meta" in counted.method


def test_the_workload_is_built_for_one_rank_on_the_meta_device_and_closed():
    Stack.contexts.clear()
    Stack.closed = 0
    step_flops(Stack, {}, context())
    (built,) = Stack.contexts
    assert built.device.type == "meta"
    assert (built.rank, built.local_rank, built.world_size) == (0, 0, 1)
    assert (built.precision, built.cuda_graph) == (Precision.FP32, False)
    assert (built.batch_size, built.seed) == (BATCH, 7)
    assert Stack.closed == 1


def test_a_compiled_model_is_counted_without_compiling_it():
    assert step_flops(Compiled, {}, context()).flops == TRAINING


def test_causal_attention_counts_as_full():
    assert step_flops(CausalAttention, {}, context()).flops == 2 * 2 * (2 * 4 * 64 * 64 * 8)


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (Messy, "RuntimeError: first line"),
        (Reading, "the step needs values, and where it is counted (torch's meta device) tensors"),
        (Lonely, "not counted: needs at least 2 ranks; set flops_per_step in the class to tell it"),
        (Copying, "none that the counter knows"),
    ],
)
def test_what_cannot_be_counted_is_unknown_with_a_reason_of_one_line(workload, reason):
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
        monkeypatch.setattr(
            torch, "Generator", lambda _: SimpleNamespace(manual_seed=lambda seed: None)
        )
        for name in ("randn", "empty"):
            monkeypatch.setattr(torch, name, lambda *_, **__: None)

    def _product(self, left: None, right: None, out: None) -> None:
        self.products += 1
        self.now_ms += 1.0 if self.now_ms < 150 else 2.0

    def _event(self) -> SimpleNamespace:
        event = SimpleNamespace(at_ms=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at_ms", self.now_ms)
        event.elapsed_time = lambda end: end.at_ms - event.at_ms
        return event


def test_a_product_is_as_fast_as_under_the_power_limit_not_as_in_its_first_moments(monkeypatch):
    limited = Limited(monkeypatch)
    found = tflops_sustained(torch.device("cuda", 0), [Precision.BF16])
    assert found == {Precision.BF16: pytest.approx(PRODUCT_TFLOP / 2e-3)}
    assert limited.now_ms > 400


def test_a_cpu_and_a_device_without_room_for_the_matrices_have_no_rate(monkeypatch):
    limited = Limited(monkeypatch)
    assert tflops_sustained(torch.device("cpu"), list(Precision)) == dict.fromkeys(Precision)
    assert limited.products == 0

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "randn", full)
    assert tflops_sustained(torch.device("cuda", 0), [Precision.FP32]) == {Precision.FP32: None}
