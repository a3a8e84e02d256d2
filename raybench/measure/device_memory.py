"""Peak memory of torch's device allocator over a point, without what is not part of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PeakMemory:
    """The peak since it was made, in bytes; None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allocated_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self._reset()

    def read(self) -> None:
        """Take in what was used until now."""
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
            self.allocated_bytes = max(allocated, self.allocated_bytes or 0)
            self.reserved_bytes = max(reserved, self.reserved_bytes or 0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is used inside does not count; what stays allocated counts afterwards."""
        self.read()
        yield
        self._reset()

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
