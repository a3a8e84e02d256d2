"""Faults for a health check that are injected by a workload in the place of a built-in one."""

from __future__ import annotations

from typing import Any

from raybench.workloads.base import Context
from raybench.workloads.gemm import Gemm
from raybench.workloads.same_bits import SameBits

FLIPPED_BITS = f"{__name__}:FlippedBits"
FEW_SMS = f"{__name__}:FewSms"
# Of the 132 of an H200.
_SMS = 99
_contexts: dict[int, Any] = {}


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


class FewSms(Gemm):
    """The last rank multiplies on three quarters of its device."""

    def __init__(self, context: Context, *, m: int = 8192, n: int = 8192, k: int = 8192) -> None:
        super().__init__(context, m=m, n=n, k=k)
        self._confined = None
        if context.rank == context.world_size - 1:
            # One for the life of the process: cuBLAS keeps what it made in it.
            index = context.device.index
            self._confined = _contexts.setdefault(index, _create_context(index))
            self._confined.set_context()

    def close(self) -> None:
        if self._confined is not None:
            self._confined.pop_context()


def _create_context(index: int) -> Any:
    from torch.cuda.green_contexts import GreenContext

    return _contexts.get(index) or GreenContext.create(num_sms=_SMS, device_id=index)
