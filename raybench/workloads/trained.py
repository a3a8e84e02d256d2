"""What the workloads that train have in common: parameters, with their rules, and a base class.

Loads no torch: `plan` reads their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict, get_type_hints

from pydantic import Field

from raybench.job.point import Scalar
from raybench.workloads.base import Context, Workload

if TYPE_CHECKING:
    from torch import nn

    from raybench.workloads.data import Batch
    from raybench.workloads.training import Recipe, Training

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


class Trained(Workload):
    """A workload that trains a model; its `__init__` calls `train`.

    model: the bare model.
    """

    training: Training
    model: nn.Module

    def train(
        self,
        context: Context,
        recipe: Recipe,
        make_model: Callable[[], nn.Module],
        batches: Iterator[Batch],
    ) -> None:
        """Make the model, its optimizer and all else that a step needs."""
        from raybench.workloads.training import Training

        self.training = Training(context, recipe, make_model, batches)
        self.model = self.training.model
        self.items_per_step = self.training.items_per_step

    def step(self) -> None:
        """One optimizer step."""
        self.training.step()

    def close(self) -> None:
        """Free the model and the data."""
        del self.model
        self.training.close()
