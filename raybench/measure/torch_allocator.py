"""What torch's allocator had to do in the timed steps, and the memory that they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class AllocatorCalls:
    """What torch's allocator had to do in the timed blocks; None on a CPU.

    retries: allocations that failed until what the allocator kept was given back. device_allocs:
    calls of cudaMalloc. Both stop the device, and a step in a steady state needs neither.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_counted = device.type == "cuda"
        self.retries: int | None = 0 if is_counted else None
        self.device_allocs: int | None = 0 if is_counted else None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add what is done inside the `with` block."""
        before = self._read()
        yield
        after = self._read()
        if before is not None and after is not None:
            self.retries = (self.retries or 0) + after[0] - before[0]
            self.device_allocs = (self.device_allocs or 0) + after[1] - before[1]

    def _read(self) -> tuple[int, int] | None:
        if self._device.type != "cuda":
            return None
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats["num_alloc_retries"], stats["num_device_alloc"]


class PeakMemory:
    """Peak memory of torch's allocator in the timed steps, in bytes; None on a CPU.

    allocated_bytes: without what `forget` leaves out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allocated_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self._reset()

    def read(self) -> None:
        """Take in what was used until now."""
        self._read_reserved()
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
            self.allocated_bytes = max(allocated, self.allocated_bytes or 0)

    def forget(self) -> None:
        """Leave out what was allocated since the last look; call it when a warm-up is over.

        DDP makes its buckets anew in the second step. NCCL keeps the first ones until its watchdog,
        which looks ten times a second, has seen the end of what used them: gradients count twice
        for some steps, more or fewer of them from start to start.
        """
        self._read_reserved()
        self._reset()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is used inside; what stays allocated counts afterwards."""
        self.read()
        yield
        self._reset()

    def _read_reserved(self) -> None:
        if self._device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(self._device)
            self.reserved_bytes = max(reserved, self.reserved_bytes or 0)

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
