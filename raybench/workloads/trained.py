"""What the workloads that train have in common. Loads no torch: `plan` reads their classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from raybench.workloads.base import Context, Workload

if TYPE_CHECKING:
    from torch import nn

    from raybench.workloads.data import Batch
    from raybench.workloads.training import Recipe, Training


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
