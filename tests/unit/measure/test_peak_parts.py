"""What the memory of a step is made of, on an allocator that counts what the test says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from collective_steps import CPU, context_of
from torch import nn

from raybench.measure.memory import peak_parts, watch_peak
from raybench.workloads.base import Workload

BEGIN, PEAK = 1000, 5000
PARAMETERS = 4 * 4 * 4
# Two moments, and a step counter of one float32.
STATE = 2 * PARAMETERS + 4


class Allocator:
    def __init__(self) -> None:
        self.now = BEGIN
        self.most = BEGIN

    def allocated(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.now


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
def test_gradients_are_those_that_are_there_when_memory_is_largest(where, gradients):
    allocator = Allocator()
    trains = Trains(allocator, where)
    found = watch_peak(trains, CPU, allocator)
    assert found is not None
    assert (found.parameters_bytes, found.optimizer_bytes) == (PARAMETERS, STATE)
    assert found.gradients_bytes == gradients
    assert found.activations_bytes == PEAK - BEGIN - gradients
    assert found.other_bytes == BEGIN - PARAMETERS - STATE
    assert found.total_bytes == PEAK
    assert not any(p._post_accumulate_grad_hooks for p in trains.model.parameters())


@dataclass(slots=True)
class Holder:
    models: dict[str, nn.Module]


def closure(model: nn.Module) -> object:
    return lambda: model


@pytest.mark.parametrize(
    "hold", [lambda model: [Holder(models={"one": model})], closure, partial(partial, print)]
)
def test_a_model_is_found_where_a_workload_holds_it(hold):
    class Infers(Workload):
        def __init__(self) -> None:
            self._steps = hold(nn.Linear(4, 4, bias=False))

        def step(self) -> None: ...

    found = watch_peak(Infers(), CPU, Allocator())
    assert found is not None
    assert (found.parameters_bytes, found.optimizer_bytes) == (PARAMETERS, 0)


def test_without_a_model_or_on_a_cpu_nothing_is_told():
    class Bare(Workload):
        def step(self) -> None: ...

    assert watch_peak(Bare(), CPU, Allocator()) is None
    assert "CPU" in str(peak_parts(Trains(Allocator(), "forward"), context_of(0)))
