"""Peaks of memory in the timed steps, and the calls of the allocator in them."""

from __future__ import annotations

import pytest
import torch

from raybench.measure.torch_allocator import AllocatorCalls, PeakMemory

GIB = 2**30


class Allocator:
    """torch's counters: what is allocated and reserved now, and the peaks since the last reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = {"allocated": 0, "reserved": 0}
        self._peak = dict(self._now)
        for kind in self._now:
            monkeypatch.setattr(
                torch.cuda, f"max_memory_{kind}", lambda device, kind=kind: self._peak[kind]
            )
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)

    def use(self, allocated: int) -> None:
        self._now["allocated"] = allocated
        self._now["reserved"] = max(allocated, self._now["reserved"])
        self._peak = {kind: max(self._peak[kind], self._now[kind]) for kind in self._now}

    def _reset(self, device: torch.device) -> None:
        self._peak = dict(self._now)


def test_what_only_the_warm_up_allocates_counts_as_reserved_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_memory = Allocator(monkeypatch)
    peak = PeakMemory(torch.device("cuda", 0))
    torch_memory.use(7 * GIB)  # the buckets before and after they were made anew
    torch_memory.use(2 * GIB)
    peak.forget()
    torch_memory.use(6 * GIB)
    peak.read()
    assert (peak.allocated_bytes, peak.reserved_bytes) == (6 * GIB, 7 * GIB)


def test_the_warm_up_of_a_repeat_leaves_the_peak_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_memory = Allocator(monkeypatch)
    peak = PeakMemory(torch.device("cuda", 0))
    for timed in (6, 5):
        torch_memory.use(8 * GIB)
        torch_memory.use(0)
        peak.forget()
        torch_memory.use(timed * GIB)
        peak.read()
    assert peak.allocated_bytes == 6 * GIB


def test_a_check_between_counts_as_reserved_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_memory = Allocator(monkeypatch)
    peak = PeakMemory(torch.device("cuda", 0))
    torch_memory.use(3 * GIB)
    with peak.paused():
        torch_memory.use(9 * GIB)
        torch_memory.use(2 * GIB)
    peak.read()
    assert peak.allocated_bytes == 3 * GIB


def test_a_cpu_has_no_peak() -> None:
    peak = PeakMemory(torch.device("cpu"))
    peak.forget()
    peak.read()
    assert (peak.allocated_bytes, peak.reserved_bytes) == (None, None)


def test_calls_of_the_allocator_are_those_inside_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = {"num_alloc_retries": 3, "num_device_alloc": 40}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: dict(counts))
    calls = AllocatorCalls(torch.device("cuda", 0))
    for retries, allocs in ((1, 2), (0, 5)):
        with calls.counting():
            counts["num_alloc_retries"] += retries
            counts["num_device_alloc"] += allocs
        counts["num_device_alloc"] += 100
    assert (calls.retries, calls.device_allocs) == (1, 7)


def test_a_cpu_has_no_such_calls() -> None:
    calls = AllocatorCalls(torch.device("cpu"))
    with calls.counting():
        pass
    assert (calls.retries, calls.device_allocs) == (None, None)
