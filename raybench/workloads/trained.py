"""The members that the workloads built on `Training` share. Loads no torch: `plan` reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from raybench.workloads.training import CommHook, Training


class Trained:
    """A workload that trains; its `__init__` makes `training`."""

    training: Training

    @property
    def items_per_step(self) -> int:
        """Rows or sequences that this rank finishes in one step."""
        return self.training.items_per_step

    @property
    def model(self) -> nn.Module:
        """The bare model."""
        return self.training.model

    @property
    def set_comm_hook(self) -> Callable[[CommHook | None], None] | None:
        """Gives gradients another way than all_reduce; None where that cannot be had."""
        return self.training.set_comm_hook

    def step(self) -> None:
        """One optimizer step."""
        self.training.step()

    def close(self) -> None:
        """Free the model and the data."""
        self.training.close()
