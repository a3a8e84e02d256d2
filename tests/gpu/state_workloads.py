"""Workloads that leave the CUDA side of their process in a mess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch.nn import functional

from raybench.worker.state.torch_settings import device_settings
from raybench.workloads.base import Context
from tests.unit.state_changes import STATE_CHANGES, STATE_CHANGES_WITH_CUDA, seen

# Such hooks and a ban of them cannot be had together.
_LEFT_OUT = "ban of saved-tensor hooks"
_kept: list[object] = []


class GpuMess:
    """Uses the libraries of CUDA, then leaves everything in the chosen state."""

    def __init__(
        self,
        context: Context,
        *,
        folder: Annotated[str, Field(description="where it writes what it saw")],
        mess: Literal["none", "settings", "memory"] = "none",
    ) -> None:
        self.items_per_step = 1
        self.flops_per_step = 1.0  # not counted: the counting would build it once more
        self._device, self._mess = context.device, mess
        facts = {
            "seen": repr(seen()),
            "device": [repr(setting.read()) for setting in device_settings(context.device)],
            "allocated_bytes": torch.cuda.memory_allocated(context.device),
            "random": torch.rand(3, device=context.device).tolist(),
        }
        Path(folder, "seen.json").write_text(json.dumps(facts))
        self._matrix = torch.randn(512, 512, device=context.device)
        self._image = torch.randn(8, 3, 64, 64, device=context.device)
        self._filter = torch.randn(8, 3, 3, 3, device=context.device)

    def step(self) -> None:
        (self._matrix @ self._matrix).sum()
        torch.fft.fft2(self._matrix)
        torch.nn.functional.conv2d(self._image, self._filter)

    def close(self) -> None:
        if self._mess == "memory":
            _kept.append(torch.empty(512 * 2**20, dtype=torch.uint8, device=self._device))
        if self._mess == "settings":
            _mess_up_device(self._device)
            for name, change in (STATE_CHANGES_WITH_CUDA | STATE_CHANGES).items():
                if name != _LEFT_OUT:
                    change()


def _mess_up_device(device: torch.device) -> None:
    torch.cuda.set_sync_debug_mode("warn")
    torch.cuda.set_per_process_memory_fraction(0.5, device)
    torch.cuda.memory._record_memory_history()
    torch.backends.cuda.cufft_plan_cache[device].max_size = 3
    stream = torch.cuda.Stream(device)
    torch.cuda.set_stream(stream)
    # A workspace of cuBLAS for the new stream, and cached blocks.
    torch.randn(512, 512, device=device) @ torch.randn(512, 512, device=device)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"


class Attention:
    """Writes which kernel of attention torch takes."""

    def __init__(
        self,
        context: Context,
        *,
        folder: Annotated[str, Field(description="where it writes what it saw")],
    ) -> None:
        self.items_per_step = 1
        # Not counted: once a process the counting would build it, and write, on the meta device.
        self.flops_per_step = 1.0
        self._tokens = torch.randn(1, 24, 1024, 128, device=context.device, dtype=torch.bfloat16)
        choice = torch._fused_sdp_choice(self._tokens, self._tokens, self._tokens)
        Path(folder, "choice.json").write_text(json.dumps(choice))

    def step(self) -> None:
        functional.scaled_dot_product_attention(self._tokens, self._tokens, self._tokens)
