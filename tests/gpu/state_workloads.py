"""Workloads that leave the CUDA side of their process in a mess."""

import json
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch.nn import functional

from raybench.workloads.base import Context
from tests.unit.state_changes import SET_BEFORE_EACH_BUILD, STATE_CHANGES, seen

_kept: list[object] = []


class GpuMess:
    """Uses the libraries of CUDA, then leaves its process in the chosen mess."""

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
            "allocated_bytes": torch.cuda.memory_allocated(context.device),
            "random": torch.rand(3, device=context.device).tolist(),
        }
        Path(folder, "seen.json").write_text(json.dumps(facts))
        self._matrix = torch.randn(512, 512, device=context.device)
        self._image = torch.randn(8, 3, 64, 64, device=context.device)
        self._filter = torch.randn(8, 3, 3, 3, device=context.device)

    def step(self) -> None:
        (self._matrix @ self._matrix).sum()
        torch.nn.functional.conv2d(self._image, self._filter)

    def close(self) -> None:
        if self._mess == "memory":
            _kept.append(torch.empty(512 * 2**20, dtype=torch.uint8, device=self._device))
        if self._mess == "settings":
            # A workspace of cuBLAS for a stream of its own, and cached blocks.
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                self._matrix @ self._matrix
            for change in (SET_BEFORE_EACH_BUILD | STATE_CHANGES).values():
                change()


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
