"""The workload `mlp`: a plain stack of square linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from pydantic import Field

from raybench.workloads.base import Context
from raybench.workloads.replicas import DdpOptions
from raybench.workloads.training.model import (
    CastWeights,
    Compile,
    GradAccumulation,
    Mode,
    Model,
    Optimizer,
    Recipe,
    compute_dtype,
    estimate_step,
    product_bytes,
    slices,
)

if TYPE_CHECKING:
    from torch import nn


class Mlp(Model):
    """Trains or runs `layers` linear layers of hidden x hidden with ReLU, on random rows."""

    items = "rows"

    def __init__(
        self,
        context: Context,
        *,
        hidden: Annotated[int, Field(gt=0, description="Width of every layer.")] = 1024,
        layers: Annotated[int, Field(gt=0, description="Number of linear layers.")] = 4,
        optimizer: Optimizer = "adam",
        grad_accumulation: GradAccumulation = 1,
        compile: Compile = False,
        mode: Mode = "train",
        cast_weights: CastWeights = False,
        **ddp: Unpack[DdpOptions],
    ) -> None:
        import torch
        from torch.nn import functional

        recipe = Recipe(
            loss=functional.mse_loss,
            optimizer=optimizer,
            grad_accumulation=grad_accumulation,
            compile=compile,
            divide=partial(context.ddp, **ddp),
        )
        shape = (context.batch_size * grad_accumulation, hidden)
        generator = context.generator()
        inputs = torch.randn(shape, generator=generator, device=context.device)
        if cast_weights:
            inputs = inputs.to(compute_dtype(context))
        targets = torch.randn(shape, generator=generator, device=context.device)
        self.build(
            mode,
            context,
            recipe,
            lambda: linear_stack(hidden, layers),
            slices(inputs, targets, context.batch_size),
            cast_weights=cast_weights,
        )

    @classmethod
    def describe(cls, params: Mapping[str, str]) -> str:
        """Return the model with its sizes, as in "MLP of 4 layers, 1,024 wide"."""
        return f"MLP of {params['layers']} layers, {int(params['hidden']):,} wide"

    @classmethod
    def parameter_count(cls, params: Mapping[str, str]) -> int | None:
        """Return the number of parameters; None where `params` lack hidden or layers."""
        if not {"hidden", "layers"} <= params.keys():
            return None
        hidden = int(params["hidden"])
        return int(params["layers"]) * (hidden * hidden + hidden)

    @classmethod
    def estimate_memory(cls, settings: Mapping[str, Any]) -> float | None:
        """Return the estimated bytes of a rank at its peak; None as `estimate_step`."""
        hidden, layers = settings["hidden"], settings["layers"]
        parameters, rows = layers * (hidden * hidden + hidden), float(settings["batch_size"])
        number = product_bytes(settings)
        return estimate_step(
            settings,
            parameters=parameters,
            # Each layer keeps its input, and autocast its weights in half.
            saved=rows * hidden * number * layers + (2.0 * parameters if number == 2 else 0.0),
            at_loss=rows * hidden * (8 + number),
            data=8.0 * rows * hidden * settings["grad_accumulation"],
        )


def linear_stack(hidden: int, layers: int) -> nn.Module:
    """Return `layers` linear layers of hidden x hidden with ReLU between, on the default device."""
    from torch import nn

    modules: list[nn.Module] = [nn.Linear(hidden, hidden)]
    for _ in range(layers - 1):
        modules += [nn.ReLU(), nn.Linear(hidden, hidden)]
    return nn.Sequential(*modules)
