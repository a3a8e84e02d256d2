"""Peaks of memory and what they are made of, on allocators that count what the test says."""

import pytest
import torch
from collective_steps import CPU
from torch import nn

from raybench.measure.instruments import MemoryUse
from raybench.measure.marks import watch_peak
from raybench.workloads.base import Workload

# Far above what models of other tests may still hold.
BEGIN, PEAK = 10**9, 5 * 10**9
PARAMETERS = 4 * 4 * 4
# Two moments, and a step counter of one float32.
STATE = 2 * PARAMETERS + 4


class Allocator:
    """What torch's functions say: allocated now, and the most since the last reset."""

    def __init__(self) -> None:
        self.most = BEGIN


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
def test_gradients_are_those_that_are_there_when_memory_is_largest(allocator, where, gradients):
    trains = Trains(allocator, where)
    found = watch_peak(trains.step, CPU)
    assert found.optimizer_bytes == STATE
    assert found.gradients_bytes == gradients
    assert found.activations_bytes == PEAK - BEGIN - gradients
    assert found.parameters_bytes + found.other_bytes == BEGIN - STATE
    assert found.total_bytes == PEAK
    assert not any(p._post_accumulate_grad_hooks for p in trains.model.parameters())


class Bare(Workload):
    def step(self) -> None: ...


def parameter_bytes(workload: Workload) -> int:
    found = watch_peak(workload.step, CPU)
    return found.parameters_bytes if found else 0


@pytest.mark.usefixtures("allocator")
def test_a_model_is_found_wherever_a_workload_holds_it():
    class Infers(Bare):
        def __init__(self) -> None:
            model = nn.Linear(4, 4, bias=False)
            self._steps = [lambda: model]

    others = parameter_bytes(Bare())
    assert parameter_bytes(Infers()) - others == PARAMETERS
    # It is gone with its workload.
    assert parameter_bytes(Bare()) == others


class TorchAllocator:
    """torch's counters: what is allocated and reserved now, and the peaks since the last reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = {"allocated": 0, "reserved": 0}
        self._peak = dict(self._now)
        for kind in self._now:
            monkeypatch.setattr(
                torch.cuda, f"max_memory_{kind}", lambda device, kind=kind: self._peak[kind]
            )
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)

    def use(self, *allocated_gib: int) -> None:
        for gib in allocated_gib:
            self._now = {"allocated": gib, "reserved": max(gib, self._now["reserved"])}
            self._peak = {kind: max(self._peak[kind], self._now[kind]) for kind in self._now}

    def _reset(self, device: torch.device) -> None:
        self._peak = dict(self._now)


def test_what_only_warm_ups_and_checks_allocate_counts_as_reserved_alone(monkeypatch):
    memory, peak = TorchAllocator(monkeypatch), MemoryUse(torch.device("cuda", 0))
    for timed in (6, 5):  # two repeats
        memory.use(8, 2)
        peak.restart()
        memory.use(timed)
        with peak.paused():
            memory.use(9, 2)
        with peak.paused():
            pass
    assert (peak.allocated_bytes, peak.reserved_bytes) == (6, 9)


def test_calls_of_the_allocator_are_those_inside_the_blocks(monkeypatch):
    counts = {"num_alloc_retries": 3, "num_device_alloc": 40}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: dict(counts))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    calls = MemoryUse(torch.device("cuda", 0))
    for retries, allocs in ((1, 2), (0, 5)):
        with calls.counting():
            counts["num_alloc_retries"] += retries
            counts["num_device_alloc"] += allocs
        counts["num_device_alloc"] += 100
    assert (calls.retries, calls.device_allocs) == (1, 7)
