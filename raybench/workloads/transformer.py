"""The workload `transformer`: a decoder-only language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Unpack

from pydantic import Field

from raybench.workloads.base import Context
from raybench.workloads.trained import (
    Compile,
    DdpOptions,
    GradAccumulation,
    Optimizer,
    Recipe,
    Trained,
    slices,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from raybench.workloads.trained import Batch


class Transformer(Trained):
    """Trains a GPT-2 shaped language model on random tokens; one item is one sequence."""

    def __init__(
        self,
        context: Context,
        *,
        preset: Annotated[
            Literal["tiny", "124m", "350m", "1.3b"],
            Field(description="Size of the model, by its number of parameters."),
        ] = "124m",
        seq_len: Annotated[int, Field(gt=0, description="Tokens per sequence.")] = 1024,
        activation_checkpointing: Annotated[
            bool, Field(description="Recompute the activations of each block in the backward pass.")
        ] = False,
        optimizer: Optimizer = "adamw",
        grad_accumulation: GradAccumulation = 1,
        compile: Compile = False,
        **ddp: Unpack[DdpOptions],
    ) -> None:
        # `raybench plan` reads this signature and must not pay for importing torch.
        from raybench.workloads.layers import DECODER_PRESETS, Decoder, next_token_loss

        shape = DECODER_PRESETS[preset]
        # On the meta device operations are counted, and what is recomputed does not train.
        checkpointing = activation_checkpointing and context.device.type != "meta"
        recipe = Recipe(
            loss=next_token_loss,
            optimizer=optimizer,
            grad_accumulation=grad_accumulation,
            compile=compile,
            ddp=ddp,
        )
        self.train(
            context,
            recipe,
            lambda: Decoder(shape, seq_len=seq_len, checkpointing=checkpointing),
            _token_batches(context, shape.vocabulary, seq_len, grad_accumulation),
        )


def _token_batches(
    context: Context, vocabulary: int, seq_len: int, grad_accumulation: int
) -> Iterator[Batch]:
    import torch

    text = torch.randint(
        vocabulary,
        (context.batch_size * grad_accumulation, seq_len + 1),
        generator=context.generator(),
        device=context.device,
    )
    # The target of each token is the one after it. Both contiguous, as a loader's would be.
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return slices(inputs, targets, context.batch_size)
