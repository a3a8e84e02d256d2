"""Peak memory of torch's device allocator in the timed steps, without what is not part of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PeakMemory:
    """The peaks since it was made, in bytes; None on a CPU.

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
