"""The parameters that several built-in workloads share, with their rules and descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypedDict, get_type_hints

from pydantic import Field

from raybench.job.point import Scalar

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


class DdpOptions(TypedDict, total=False):
    """Options of DistributedDataParallel as parameters: `**ddp: Unpack[DdpOptions]`.

    One more here is a setting of each workload that takes them and an argument of torch's class,
    and nothing else knows their names. Without effect when world_size is 1. Their defaults are
    torch's.
    """

    bucket_cap_mb: Annotated[
        int,
        Field(
            default=25,
            gt=0,
            description="DDP: bucket size, MiB; 25 is torch's default, which begins with 1 MiB.",
        ),
    ]
    gradient_as_bucket_view: Annotated[
        bool,
        Field(
            default=False,
            description="DDP: gradients are views of the buckets, which saves a copy.",
        ),
    ]
    static_graph: Annotated[
        bool,
        Field(default=False, description="DDP: promise that the graph is the same in every step."),
    ]


def ddp_defaults() -> Mapping[str, Scalar]:
    """Return the default of each option of DistributedDataParallel."""
    hints = get_type_hints(DdpOptions, include_extras=True)
    return {name: hint.__metadata__[0].default for name, hint in hints.items()}
