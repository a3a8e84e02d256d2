"""Activation checkpointing: what the backward pass of a block finds, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Checkpointing = Literal["none", "selective", "full"]

_aten: Any = torch.ops.aten
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default})


def run_block(run: Callable[..., Tensor], how: Checkpointing, *inputs: Any) -> Tensor:
    """Run a block of a model, whose input alone is kept, or that and costly parts of it."""
    if how == "none":
        return run(*inputs)
    chosen: dict[str, Any] = {}
    if how == "selective":
        # A plain function: with an object in it, torch.compile would leave the block as it is.
        chosen = {"context_fn": _keep_costly_parts}
    # Nothing random runs in a block, so there is no random state to keep.
    out: Tensor = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **chosen)
    return out


def _keep_costly_parts() -> Any:
    """Keep attention's output and that of every second matrix product.

    As torchtitan has it: attention costs most for what its output takes, and half of the products
    are worth half of the memory.
    """
    # Of the forward pass, and of what is computed again in the same order.
    seen = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_: object, **__: object) -> CheckpointPolicy:
        is_product = operator in _PRODUCTS
        seen[context.is_recompute] += is_product
        is_kept = operator in _ATTENTION or (is_product and seen[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
