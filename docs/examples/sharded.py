"""A workload of your own: a stack of layers whose parameters FSDP shares out among the ranks."""

from __future__ import annotations

from typing import Annotated

from raybench import Context, Field, PositiveInt, Workload


class Sharded(Workload):
    """Trains a stack of linear layers, each sharded by FSDP2."""

    def __init__(
        self,
        context: Context,
        *,
        width: Annotated[PositiveInt, Field(description="Columns of each layer.")] = 4096,
        layers: Annotated[PositiveInt, Field(description="Linear layers.")] = 8,
    ) -> None:
        import torch
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(context.seed)
        with context.device:
            self.model = nn.Sequential(
                *(nn.Linear(width, width, bias=False) for _ in range(layers))
            )
        if context.world_size > 1:  # also not where raybench counts the operations of a step
            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
        # A rate that leaves the parameters where they are: each step does the same work.
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-12)
        self._rows = torch.randn(context.batch_size, width, device=context.device)
        self._context = context
        self.items_per_step = context.batch_size

    def step(self) -> None:
        with self._context.autocast():
            loss = self.model(self._rows).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
