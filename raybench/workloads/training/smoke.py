"""The workload `smoke`: a small training step that shows that training works at all."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from raybench.workloads.base import Context, Workload, WrongResultError

if TYPE_CHECKING:
    from torch import Tensor, nn

_SIZES = (784, 256, 10)
_RATE = 0.1


class Smoke(Workload):
    """Trains a classifier of 784-256-10 by DistributedDataParallel, and checks what came of it.

    Gradients must be equal on all ranks to the last bit, and the loss must fall. Each rank has
    `rows` random rows of its own.
    """

    items = "rows"
    takes_batch_size = False
    model: nn.Module

    def __init__(
        self,
        context: Context,
        *,
        rows: Annotated[int, Field(gt=0, description="Rows of a step on each rank.")] = 64,
    ) -> None:
        import torch
        from torch import nn

        generator, device = context.generator(), context.device
        torch.manual_seed(context.seed)
        first, hidden, classes = _SIZES
        with device:
            self.model = nn.Sequential(
                nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, classes)
            )
        self._replica = context.ddp(self.model)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=_RATE)
        self._inputs = torch.randn(rows, first, generator=generator, device=device)
        self._labels = torch.randint(classes, (rows,), generator=generator, device=device)
        self._loss = nn.functional.cross_entropy
        # Of the first step and of the last.
        self._losses: tuple[Tensor, ...] = ()
        self._context = context
        self.items_per_step = rows

    def step(self) -> None:
        """Do one training step: forward pass, backward pass, update."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._context.autocast():
            loss = self._loss(self._replica(self._inputs), self._labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._losses = (*self._losses[:1], loss.detach())

    def check(self) -> None:
        """Raise WrongResultError where this rank's gradients are not those of most ranks.

        Also where the loss has not fallen since the first step. All ranks must call it together.
        """
        import torch
        import torch.distributed as dist

        from raybench.workloads.kernels import digest_of

        rank, world_size = self._context.rank, self._context.world_size
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        digests = [digest_of(torch.cat(gradients))]
        if world_size > 1:
            own, digests = digests[0], [0] * world_size
            dist.all_gather_object(digests, own)
        usual, count = Counter(digests).most_common(1)[0]
        if digests[rank] != usual or count <= len(digests) / 2:
            raise WrongResultError(
                f"rank {rank}: its gradients differ from those of "
                f"{len(digests) - digests.count(digests[rank])} other ranks after the same step"
            )
        first, last = (float(loss) for loss in self._losses)
        if not last < first:
            raise WrongResultError(f"rank {rank}: the loss went from {first:g} to {last:g}")

    def close(self) -> None:
        """Drop the model and its data."""
        self.__dict__.clear()
