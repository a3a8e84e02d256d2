"""Peak memory of a device, with torch's counters played."""

from __future__ import annotations

import pytest
import torch

from raybench.hardware.counters import PeakMemory

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
