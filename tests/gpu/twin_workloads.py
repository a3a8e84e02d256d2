"""Workloads that declare nothing of how they communicate, on GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from raybench.workloads.base import Context


def _layers(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


class _Training:
    """AdamW steps of a stack of layers."""

    def __init__(self, context: Context, net: nn.Module, width: int) -> None:
        self.context, self.net = context, net
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-12)
        self.rows = torch.randn(context.batch_size, width, device=context.device)
        self.items_per_step = context.batch_size

    def step(self) -> None:
        with self.context.autocast():
            loss = self.net(self.rows).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Sharded(_Training):
    """A model sharded by FSDP2, a slow all_gather on request."""

    def __init__(
        self, context: Context, *, width: int = 4096, layers: int = 8, delay_ms: float = 0.0
    ) -> None:
        torch.manual_seed(0)
        with context.device:
            net = _layers(width, layers)
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        super().__init__(context, net, width)


class OwnDdp(_Training):
    """A model under DistributedDataParallel that raybench has not wrapped, or has."""

    def __init__(
        self, context: Context, *, width: int = 8192, layers: int = 8, by_context: bool = False
    ) -> None:
        torch.manual_seed(0)
        with context.device:
            net: nn.Module = _layers(width, layers)
        net = context.ddp(net) if by_context else DistributedDataParallel(net)
        super().__init__(context, net, width)


class SlowReduce:
    """Products, then an all_reduce behind which the device spins."""

    def __init__(self, context: Context, *, spin_ms: float = 0.0, size: int = 8192) -> None:
        self.a = torch.randn(size, size, device=context.device)
        self.spin = round(spin_ms * _cycles_per_ms())
        self.buffer = torch.ones(2**20, device=context.device)
        self.items_per_step = 1

    def step(self) -> None:
        torch.mm(self.a, self.a)
        dist.all_reduce(self.buffer)


def _cycles_per_ms() -> float:
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        torch.cuda.synchronize()
    return 20_000_000 / start.elapsed_time(end)
