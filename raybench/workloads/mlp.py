"""The workload `mlp`: a plain stack of square linear layers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raybench.workloads.base import Context
from raybench.workloads.parameters import (
    BucketCapMb,
    Compile,
    GradAccumulation,
    GradientAsBucketView,
    Optimizer,
    StaticGraph,
)
from raybench.workloads.trained import Trained


class Mlp(Trained):
    """Trains `layers` linear layers of hidden x hidden with ReLU between, on random rows."""

    def __init__(
        self,
        context: Context,
        *,
        hidden: Annotated[int, Field(gt=0, description="Width of every layer.")] = 1024,
        layers: Annotated[int, Field(gt=0, description="Number of linear layers.")] = 4,
        optimizer: Optimizer = "adam",
        bucket_cap_mb: BucketCapMb = 25,
        gradient_as_bucket_view: GradientAsBucketView = False,
        static_graph: StaticGraph = False,
        grad_accumulation: GradAccumulation = 1,
        compile: Compile = False,
    ) -> None:
        # `raybench plan` reads this signature and must not pay for importing torch.
        import torch
        from torch.nn import functional

        from raybench.workloads.data import random_generator, slices
        from raybench.workloads.layers import linear_stack
        from raybench.workloads.training import DdpSettings, Recipe, Training

        recipe = Recipe(
            loss=functional.mse_loss,
            optimizer=optimizer,
            learning_rate=1e-3,
            grad_accumulation=grad_accumulation,
            compile=compile,
            ddp=DdpSettings(
                bucket_cap_mb=bucket_cap_mb,
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph,
            ),
        )
        shape = (context.batch_size * grad_accumulation, hidden)
        generator = random_generator(context)
        inputs = torch.randn(shape, generator=generator, device=context.device)
        targets = torch.randn(shape, generator=generator, device=context.device)
        self.training = Training(
            context,
            recipe,
            lambda: linear_stack(hidden, layers),
            slices(inputs, targets, context.batch_size),
        )
