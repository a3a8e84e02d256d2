"""Training in double precision, once with the weights of the loss and once without them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import mse_loss

from raybench.workloads.base import Context
from raybench.workloads.mlp import linear_stack
from raybench.workloads.trained import GradAccumulation, Recipe, Trained, slices

WIDTH = 512


class Double(Trained):
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
            Recipe(
                loss=mse_loss, optimizer="sgd", grad_accumulation=grad_accumulation, compile=False
            ),
            lambda: linear_stack(WIDTH, 3).double(),
            slices(inputs, targets, context.batch_size),
        )


class Unweighted(Double):
    """Says that it weighs its loss, and does not."""

    def __init__(self, context: Context, *, grad_accumulation: GradAccumulation = 1) -> None:
        super().__init__(replace(context, loss_weight=1.0), grad_accumulation=grad_accumulation)
