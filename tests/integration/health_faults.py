"""Faults for a health check that are injected by a workload in the place of a built-in one."""

from __future__ import annotations

from raybench.workloads.base import Context
from raybench.workloads.same_bits import SameBits

FLIPPED_BITS = f"{__name__}:FlippedBits"


class FlippedBits(SameBits):
    """The last rank flips one bit of every product."""

    def __init__(self, context: Context, *, size: int = 256) -> None:
        super().__init__(context, size=size)
        self._is_faulty = context.rank == context.world_size - 1

    def step(self) -> None:
        import torch

        super().step()
        if self._is_faulty:
            self.product.view(torch.int32)[3, 4] ^= 1
