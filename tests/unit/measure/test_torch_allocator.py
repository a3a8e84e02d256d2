"""Peaks of memory in the timed steps, and the calls of the allocator in them."""

from __future__ import annotations

import pytest
import torch

from raybench.measure.memory import AllocatorCalls, PeakMemory


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

    def use(self, *allocated_gib: int) -> None:
        for gib in allocated_gib:
            self._now = {"allocated": gib, "reserved": max(gib, self._now["reserved"])}
            self._peak = {kind: max(self._peak[kind], self._now[kind]) for kind in self._now}

    def _reset(self, device: torch.device) -> None:
        self._peak = dict(self._now)


def test_what_only_warm_ups_and_checks_allocate_counts_as_reserved_alone(monkeypatch):
    memory, peak = Allocator(monkeypatch), PeakMemory(torch.device("cuda", 0))
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
    calls = AllocatorCalls(torch.device("cuda", 0))
    for retries, allocs in ((1, 2), (0, 5)):
        with calls.counting():
            counts["num_alloc_retries"] += retries
            counts["num_device_alloc"] += allocs
        counts["num_device_alloc"] += 100
    assert (calls.retries, calls.device_allocs) == (1, 7)


def test_a_cpu_has_neither():
    peak, calls = PeakMemory(torch.device("cpu")), AllocatorCalls(torch.device("cpu"))
    with calls.counting():
        peak.restart()
        with peak.paused():
            pass
    assert (peak.allocated_bytes, peak.reserved_bytes) == (None, None)
    assert (calls.retries, calls.device_allocs) == (None, None)
