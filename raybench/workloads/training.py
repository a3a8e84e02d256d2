"""One optimizer step of data-parallel training: what the built-in workloads have in common.

The work is stationary: every step costs what the first ones cost, however many there were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.workloads.base import Context
from raybench.workloads.data import Batch
from raybench.workloads.trained import DdpOptions, OptimizerName

Loss = Callable[[Tensor, Tensor], Tensor]

# Far below half an ulp of a weight (1e-9 at 0.01), so that weights stay where they start, and
# step 100,000 does the arithmetic of step 10 on the same kinds of numbers. With a usual rate a
# model memorises its few rows: gradients vanish, and after some 650 steps Adam's first moments,
# 0.9^n of what they were, are subnormal, which GPUs divide more slowly. Not 0: Adam in a CUDA
# graph divides by it.
LEARNING_RATE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained. ddp: as Context.ddp takes them."""

    loss: Loss
    optimizer: OptimizerName
    grad_accumulation: int
    compile: bool
    ddp: DdpOptions = field(default_factory=DdpOptions)


class Training:
    """A model, its optimizer and its data on one rank.

    model: the bare model. replica: the same under DistributedDataParallel, or itself alone.
    """

    def __init__(
        self,
        context: Context,
        recipe: Recipe,
        make_model: Callable[[], nn.Module],
        batches: Iterator[Batch],
    ) -> None:
        _check_graph(context)
        # The seed is the same on all ranks, and so are the parameters.
        torch.manual_seed(context.seed)
        with context.device:
            self.model = make_model()
        self.replica = context.ddp(self.model, **recipe.ddp)
        # On the meta device only the operations of a step are counted: compiled they are hidden.
        compiles = recipe.compile and context.device.type != "meta"
        self._forward: Callable[[Tensor], Tensor] = (
            torch.compile(self.replica) if compiles else self.replica
        )
        self.optimizer = _optimizer(self.model, recipe, context)
        self.scaler = context.grad_scaler()
        self._context = context
        self._recipe = recipe
        self._batches = batches
        self.items_per_step = context.batch_size * recipe.grad_accumulation

    def step(self) -> None:
        """One optimizer step: `grad_accumulation` passes, then the update."""
        for to_go in reversed(range(self._recipe.grad_accumulation)):
            inputs, targets = next(self._batches)
            with self._context.no_sync(self.replica) if to_go else nullcontext():
                self.scaler.scale(self._loss(inputs, targets)).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Also in a captured step: each replay makes the gradients anew in the graph's own memory.
        self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Drop the model, the optimizer's state and the data."""
        self.__dict__.clear()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._context.autocast():
            loss = self._recipe.loss(self._forward(inputs), targets)
        passes = self._recipe.grad_accumulation
        # A division by one would still be a kernel.
        return loss / passes if passes > 1 else loss


def _check_graph(context: Context) -> None:
    if context.cuda_graph and context.precision is Precision.FP16:
        raise UsageError(
            "cuda_graph: true cannot be had in precision fp16, whose gradient scaler waits for the "
            "device in every step; take bf16, or cuda_graph: false"
        )


def _optimizer(model: nn.Module, recipe: Recipe, context: Context) -> torch.optim.Optimizer:
    # Not capturable, Adam counts its steps on the host: a graph would replay one and the same.
    captured = context.cuda_graph and context.device.type == "cuda"
    parameters, rate = model.parameters(), LEARNING_RATE
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate)
    adam = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
    return adam(parameters, lr=rate, capturable=captured)
