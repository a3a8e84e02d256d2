"""One optimizer step of data-parallel training: what the built-in workloads have in common."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from raybench.errors import UsageError
from raybench.point import Precision
from raybench.workloads.base import Context
from raybench.workloads.data import Batch
from raybench.workloads.parameters import OptimizerName
from raybench.workloads.precision import autocast

Loss = Callable[[Tensor, Tensor], Tensor]
CommHook = Callable[[Any, GradBucket], Future[Tensor]]

_TORCH_BUCKET_CAP_MB = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSettings:
    """Settings of DistributedDataParallel; without effect when world_size is 1.

    bucket_cap_mb: MiB. 25 leaves torch's own default in place, whose first bucket is 1 MiB.
    """

    bucket_cap_mb: int = _TORCH_BUCKET_CAP_MB
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained."""

    loss: Loss
    optimizer: OptimizerName
    learning_rate: float
    grad_accumulation: int
    compile: bool
    ddp: DdpSettings = DdpSettings()


class Training:
    """A model, its optimizer and its data on one rank.

    model: the bare model. ddp: the same under DistributedDataParallel, None at world size 1.
    """

    def __init__(
        self,
        context: Context,
        recipe: Recipe,
        make_model: Callable[[], nn.Module],
        batches: Iterator[Batch],
    ) -> None:
        _check_graph(context)
        # On the meta device only the operations of a step are counted: compiled they are hidden.
        self._compile = recipe.compile and context.device.type != "meta"
        # The seed is the same on all ranks, and so are the parameters.
        torch.manual_seed(context.seed)
        with context.device:
            self.model = make_model()
        self.ddp = _wrapped(self.model, context, recipe.ddp)
        trained = self.ddp or self.model
        self._forward: Callable[[Tensor], Tensor] = (
            torch.compile(trained) if self._compile else trained
        )
        self.optimizer = _optimizer(self.model, recipe, context)
        # Disabled it passes everything through. Enabled it waits for the device once a step, to
        # learn whether a gradient overflowed: that is part of what fp16 training costs.
        self.scaler = torch.amp.GradScaler(
            context.device.type,
            enabled=context.precision is Precision.FP16 and context.device.type != "meta",
        )
        self._context = context
        # With static_graph the very first backward pass records the graph and must reduce: under
        # no_sync it fails or, worse, later passes reduce nothing (pytorch#143580, pytorch#187732).
        self._must_reduce = recipe.ddp.static_graph
        self._recipe = recipe
        self._batches = batches
        self.items_per_step = context.batch_size * recipe.grad_accumulation

    @property
    def set_comm_hook(self) -> Callable[[CommHook | None], None] | None:
        """None for a compiled model, which would be compiled anew: another model's time."""
        return None if self._compile else self._set_comm_hook

    def step(self) -> None:
        """One optimizer step: `grad_accumulation` passes, then the update."""
        for to_go in reversed(range(self._recipe.grad_accumulation)):
            inputs, targets = next(self._batches)
            with self._gradients_stay_local() if to_go else nullcontext():
                self.scaler.scale(self._loss(inputs, targets)).backward()  # type: ignore[no-untyped-call]
            self._must_reduce = False
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Also in a captured step: each replay makes the gradients anew in the graph's own memory.
        self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Drop the model, the optimizer's state and the data."""
        self.__dict__.clear()

    def _set_comm_hook(self, hook: CommHook | None) -> None:
        """DDP takes one hook in its life, so the model gets a new one with the same settings."""
        # Gone before the next one comes, cycles included: its buckets take as much memory as the
        # gradients, and as long as it lives its own hooks on the parameters reduce them too.
        self._forward, self.ddp = self.model, None
        gc.collect()
        self.ddp = _wrapped(self.model, self._context, self._recipe.ddp)
        if self.ddp is None:
            return
        if hook is not None:
            self.ddp.register_comm_hook(None, hook)
        self._forward = self.ddp
        self._must_reduce = self._recipe.ddp.static_graph

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(self._context):
            loss = self._recipe.loss(self._forward(inputs), targets)
        passes = self._recipe.grad_accumulation
        # A division by one would still be a kernel.
        return loss / passes if passes > 1 else loss

    def _gradients_stay_local(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ddp is None or self._must_reduce else self.ddp.no_sync()


def _check_graph(context: Context) -> None:
    if context.cuda_graph and context.precision is Precision.FP16:
        raise UsageError(
            "cuda_graph: true cannot be had in precision fp16, whose gradient scaler waits for the "
            "device in every step; take bf16, or cuda_graph: false"
        )


def _optimizer(model: nn.Module, recipe: Recipe, context: Context) -> torch.optim.Optimizer:
    # Not capturable, Adam counts its steps on the host: a graph would replay one and the same.
    captured = context.cuda_graph and context.device.type == "cuda"
    parameters, rate = model.parameters(), recipe.learning_rate
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate)
    adam = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
    return adam(parameters, lr=rate, capturable=captured)


def _wrapped(
    model: nn.Module, context: Context, settings: DdpSettings
) -> DistributedDataParallel | None:
    if context.world_size == 1:
        return None
    # Given a number, torch uses it for the first bucket too; its default begins with 1 MiB.
    own_cap = settings.bucket_cap_mb != _TORCH_BUCKET_CAP_MB
    return DistributedDataParallel(
        model,
        device_ids=[context.device] if context.device.type == "cuda" else None,
        bucket_cap_mb=settings.bucket_cap_mb if own_cap else None,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        static_graph=settings.static_graph,
    )
