"""How models are compiled: whole, or each kind of block once. Loads no torch.

Not on the meta device, where operations are counted, which compiled code hides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from raybench.workloads.base import Context


def compile_model(
    model: Callable[..., object], context: Context, *, wanted: bool
) -> Callable[..., object]:
    """Compile what is wanted compiled, as one graph."""
    import torch

    return torch.compile(model) if wanted and context.device.type != "meta" else model


def compile_blocks(
    model: nn.Module, *kinds: type[nn.Module], options: dict[str, bool] | None = None
) -> None:
    """Let the first block of each kind be compiled when it first runs; all of the kind use it.

    options: as torch.compile takes them. What differs between two blocks must be an argument of
    theirs: an attribute is a constant of the compiled code, which the next block could not use.
    """
    for module in model.modules():
        if isinstance(module, kinds):
            module.compile(dynamic=False, options=options)
