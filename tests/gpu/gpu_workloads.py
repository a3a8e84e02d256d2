"""Workloads for the tests on GPUs: sums that are checked, faults, and steps that are slowed."""

import os
import signal
import time
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from raybench.workloads.base import Context
from raybench.workloads.networks import Mlp, linear_stack
from raybench.workloads.training import GradAccumulation, Model, Recipe, slices

_CALIBRATION_CYCLES = 20_000_000
WIDTH = 512

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


class SlowedMlp(Mlp):
    """An mlp; on `slow_rank` the device spins for `delay_ms` before each step."""

    def __init__(
        self,
        context: Context,
        *,
        slow_rank: Annotated[int, Field(ge=0)] = 1,
        delay_ms: Annotated[float, Field(ge=0)] = 0.0,
        hidden: Annotated[int, Field(gt=0)] = 2048,
        layers: Annotated[int, Field(gt=0)] = 8,
    ) -> None:
        super().__init__(context, hidden=hidden, layers=layers)
        is_slow = context.rank == slow_rank and delay_ms > 0
        self._cycles = round(delay_ms * _cycles_per_ms()) if is_slow else 0

    def step(self) -> None:
        if self._cycles:
            torch.cuda._sleep(self._cycles)
        super().step()


def _cycles_per_ms() -> float:
    # The first two bring the clock up.
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        end.record()
        torch.cuda.synchronize()
    return _CALIBRATION_CYCLES / start.elapsed_time(end)


class OwnDdp:
    """AdamW steps of a stack in DistributedDataParallel, which the context has wrapped or not."""

    def __init__(
        self, context: Context, *, width: int = 8192, layers: int = 8, by_context: bool = False
    ) -> None:
        torch.manual_seed(0)
        with context.device:
            stack = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        is_wrapped = by_context or context.world_size == 1
        self.context = context
        self.net = context.ddp(stack) if is_wrapped else DistributedDataParallel(stack)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-12)
        self.rows = torch.randn(context.batch_size, width, device=context.device)
        self.items_per_step = context.batch_size

    def step(self) -> None:
        with self.context.autocast():
            loss = self.net(self.rows).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Reduce:
    """A matrix product, then an all_reduce that nothing hides."""

    def __init__(self, context: Context, *, size: int = 8192, message_mib: int = 512) -> None:
        self.a = torch.randn(size, size, device=context.device, dtype=torch.bfloat16)
        self.buffer = torch.zeros(message_mib * 2**18, device=context.device)
        self.is_alone = context.world_size == 1
        self.items_per_step = 1

    def step(self) -> None:
        torch.mm(self.a, self.a)
        if not self.is_alone:
            dist.all_reduce(self.buffer)


class Double(Model):
    """Trains three linear layers in double precision."""

    def __init__(self, context: Context, *, grad_accumulation: GradAccumulation = 1) -> None:
        shape = (context.batch_size * grad_accumulation, WIDTH)
        generator = context.generator()
        inputs, targets = (
            torch.randn(shape, generator=generator, device=context.device, dtype=torch.float64)
            for _ in range(2)
        )
        self.train(
            context,
            lambda: linear_stack(WIDTH, 3).double(),
            slices(inputs, targets, context.batch_size),
            Recipe(loss=mse_loss, optimizer="sgd", grad_accumulation=grad_accumulation),
        )
