"""A workload for the tests on GPUs: an all_reduce that is checked, and faults on demand."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from pydantic import Field

from raybench.workloads.base import Context

Fault = Literal["none", "raise", "oom", "kill", "stop", "hang", "skip", "late"]


class GpuProbe:
    """Sums the ranks by NCCL; may keep the device busy, and may fail on one rank."""

    def __init__(
        self,
        context: Context,
        *,
        fault: Fault = "none",
        faulty_rank: Annotated[int, Field(ge=0)] = 1,
        spin_ms: Annotated[float, Field(ge=0)] = 0.0,
    ) -> None:
        self.items_per_step = context.batch_size
        self._context = context
        self._fault = fault if context.rank == faulty_rank else "none"
        self._cycles = int(spin_ms * 1e-3 * 1.98e9)
        self._total = torch.zeros(1, device=context.device)
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps == 5:
            self._fail()
        self._total.fill_(self._context.rank + 1)
        is_skipped = self._fault == "skip" and self._steps == 5
        if self._context.world_size > 1 and not is_skipped:
            dist.all_reduce(self._total)
        if self._cycles:
            torch.cuda._sleep(self._cycles)

    def close(self) -> None:
        if self._fault == "late":
            time.sleep(2.0)
            raise ValueError("not even closed")
        world_size = self._context.world_size
        expected = world_size * (world_size + 1) / 2 if world_size > 1 else 1
        if self._total.item() != expected:
            raise ValueError(f"the ranks sum to {self._total.item()}, not {expected}")

    def _fail(self) -> None:
        if self._fault == "raise":
            raise ValueError("the workload says no")
        if self._fault == "oom":
            torch.empty(2**50, device=self._context.device)
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._fault == "hang":
            time.sleep(3600)
