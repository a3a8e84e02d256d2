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
    """A model sharded by FSDP2."""

    def __init__(self, context: Context, *, width: int = 4096, layers: int = 8) -> None:
        torch.manual_seed(0)
        with context.device:
            net = _layers(width, layers)
        if context.world_size > 1:
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
        if by_context or context.world_size == 1:
            net = context.ddp(net)
        else:
            net = DistributedDataParallel(net)
        super().__init__(context, net, width)


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
