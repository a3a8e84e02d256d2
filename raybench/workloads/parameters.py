"""The parameters that several built-in workloads share, with their rules and descriptions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

OptimizerName = Literal["sgd", "adam", "adamw"]

Optimizer = Annotated[
    OptimizerName, Field(description="Class of torch.optim; all but the learning rate default.")
]
GradAccumulation = Annotated[
    int,
    Field(
        gt=0, description="Forward and backward passes per step; gradients are reduced in the last."
    ),
]
Compile = Annotated[
    bool, Field(description="Compile the model, with DDP around it; happens in the warm-up.")
]
BucketCapMb = Annotated[
    int,
    Field(
        gt=0,
        description="DDP: bucket size, MiB; 25 is torch's default, which begins with 1 MiB.",
    ),
]
GradientAsBucketView = Annotated[
    bool, Field(description="DDP: gradients are views of the buckets, which saves a copy.")
]
StaticGraph = Annotated[
    bool, Field(description="DDP: promise that the graph is the same in every step.")
]
