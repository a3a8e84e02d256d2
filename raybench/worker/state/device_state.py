"""What a CUDA device remembers for a process: settings, caches, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from raybench.worker.state.setting import Setting

_C: Any = torch._C  # the CUDA part is missing from torch's types
# torch's allocator takes memory for small blocks from the device in segments of 2 MiB.
_SMALL_SEGMENT_BYTES = 2 * 2**20
_MIB = 2**20


def device_settings(device: torch.device) -> Iterator[Setting]:
    """Those of a CUDA device; of a CPU there are none."""
    if device.type != "cuda":
        return
    cuda = torch.cuda
    yield Setting("current stream", lambda: cuda.current_stream(device), cuda.set_stream)
    yield Setting("CUDA sync debug mode", cuda.get_sync_debug_mode, cuda.set_sync_debug_mode)
    yield Setting(
        "limit of device memory",
        lambda: cuda.memory.get_per_process_memory_fraction(device),
        lambda before: cuda.memory.set_per_process_memory_fraction(before, device),
    )
    yield Setting("history of device memory", _C._cuda_isHistoryEnabled, _stop_history)
    plans = torch.backends.cuda.cufft_plan_cache[device]
    yield Setting(
        "size of the cuFFT plan cache",
        lambda: plans.max_size,
        lambda before: setattr(plans, "max_size", before),
    )


class DeviceMemory:
    """The caches and the memory of a device as they were when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.release()
        self._reserved_bytes = self._now_bytes()

    def release(self) -> None:
        """Wait for the device, drop what libraries cache on it, give free memory back."""
        if self._device.type != "cuda":
            return
        torch.cuda.synchronize(self._device)
        _C._cuda_clearCublasWorkspaces()
        torch.backends.cuda.cufft_plan_cache[self._device].clear()
        torch.cuda.empty_cache()

    def still_held(self) -> tuple[str, ...]:
        """Name the memory that somebody holds on to, a noun phrase, when there is some."""
        held_bytes = self._now_bytes() - self._reserved_bytes
        if held_bytes <= _SMALL_SEGMENT_BYTES:
            return ()
        return (f"{held_bytes / _MIB:,.0f} MiB of device memory",)

    def _now_bytes(self) -> int:
        # Reserved, not allocated: the pool of a living CUDA graph is no room for others either.
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0


def _stop_history(before: bool) -> None:
    if not before:
        torch.cuda.memory._record_memory_history(enabled=None)
