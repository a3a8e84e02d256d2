"""The workload `transformer`: a decoder-only language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Unpack

from pydantic import Field

from raybench.job.point import Scalar
from raybench.records.metric import Metric
from raybench.workloads.bandwidth import memory_gb_s
from raybench.workloads.base import Context
from raybench.workloads.compilation import compile_blocks
from raybench.workloads.inference import CastWeights, Mode, Model, compute_dtype
from raybench.workloads.trained import (
    Compile,
    DdpOptions,
    GradAccumulation,
    Optimizer,
    Recipe,
    slices,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from raybench.workloads.layers import KeyValueCache
    from raybench.workloads.model_sizes import DecoderShape
    from raybench.workloads.trained import Batch

Phase = Literal["prefill", "decode"]


class Transformer(Model):
    """Trains or runs a GPT-2 shaped language model on random tokens; one item is one sequence.

    phase: prefill. A step reads whole prompts of seq_len tokens, fills the cache of keys and
    values, and computes the logits of the next token. phase: decode. A step computes one token of
    each sequence, at the end of seq_len tokens that are in the cache, the same in every step.
    """

    metrics = (
        Metric(
            name="prefill_ms",
            unit="ms",
            description="time to first token, without queue and network",
            over_ranks="max",
            over_step="ms_each",
        ),
        Metric(
            name="decode_ms_per_token",
            unit="ms",
            heading="ms/token",
            description="time per output token of a static batch",
            over_ranks="min",
            over_step="ms_each",
        ),
        Metric(
            name="tokens_per_s",
            heading="tokens/s",
            unit="tokens/s",
            description="prompt tokens read, or tokens decoded",
            over_ranks="sum",
            over_step="per_second",
        ),
        Metric(
            name="bandwidth_share_pct",
            heading="%memory",
            unit="%",
            description="share of the step that its bytes need at triad_gb_s",
            over_ranks="min",
            over_step="per_second",
        ),
        Metric(
            name="triad_gb_s",
            heading="triad GB/s",
            unit="GB/s",
            description="what the workload memory reaches on the device",
            over_ranks="min",
        ),
    )

    def __init__(
        self,
        context: Context,
        *,
        preset: Annotated[
            Literal["tiny", "124m", "350m", "1.3b", "6.7b", "175b"],
            Field(description="Size of the model, by its number of parameters."),
        ] = "124m",
        layers: Annotated[
            int | None, Field(gt=0, description="Layers of the model; none: those of the preset.")
        ] = None,
        seq_len: Annotated[
            int,
            Field(gt=0, description="Tokens per sequence; decode: in the cache before the step."),
        ] = 1024,
        activation_checkpointing: Annotated[
            bool, Field(description="Recompute the activations of each block in the backward pass.")
        ] = False,
        optimizer: Optimizer = "adamw",
        grad_accumulation: GradAccumulation = 1,
        compile: Compile = False,
        mode: Mode = "train",
        phase: Annotated[
            Phase | None,
            Field(description="Inference: with a cache of keys and values; none: all positions."),
        ] = None,
        cast_weights: CastWeights = False,
        **ddp: Unpack[DdpOptions],
    ) -> None:
        # `raybench plan` reads this signature and must not pay for importing torch.
        from raybench.workloads.layers import DECODER_PRESETS, Decoder, next_token_loss

        shape = DECODER_PRESETS[preset]
        shape = replace(shape, layers=layers or shape.layers)
        if phase is not None:
            self._serve(context, shape, phase, seq_len, compile, cast_weights)
            return
        # On the meta device operations are counted, and what is recomputed does not train.
        checkpointing = activation_checkpointing and context.device.type != "meta"
        recipe = Recipe(
            loss=next_token_loss,
            optimizer=optimizer,
            grad_accumulation=grad_accumulation,
            compile=compile,
            ddp=ddp,
        )
        regions = {"region": context.region} if mode == "inference" else {}
        self.build(
            mode,
            context,
            recipe,
            lambda: Decoder(shape, seq_len=seq_len, checkpointing=checkpointing, **regions),
            _token_batches(context, shape.vocabulary, seq_len, grad_accumulation),
            cast_weights=cast_weights,
        )
        if mode == "inference":
            self.tokens_per_s = context.batch_size * seq_len

    @classmethod
    def why_not(cls, settings: Mapping[str, Scalar]) -> str | None:
        """Why a point with these settings cannot be run, in a sentence; None where it can."""
        if (phase := settings.get("phase")) and settings["mode"] == "train":
            return f"phase: {phase} needs mode: inference"
        return super().why_not(settings)

    def _serve(
        self,
        context: Context,
        shape: DecoderShape,
        phase: Phase,
        length: int,
        compile: bool,
        cast_weights: bool,
    ) -> None:
        """Make the model with its cache; `length` tokens are a prompt or stand before the new one.

        Every step computes the same: decoding goes on at one position, so that no step has more
        before it than another one.
        """
        from raybench.workloads.layers import Block, Decoder, KeyValueCache

        batch_size, device = context.batch_size, context.device
        is_decode = phase == "decode"
        self.triad_gb_s = memory_gb_s(context) if is_decode else None
        room = length + is_decode
        self.load(
            context,
            lambda: Decoder(shape, seq_len=room, region=context.region),
            cast_weights=cast_weights,
        )
        cache = KeyValueCache.make(
            shape, batch_size=batch_size, room=room, dtype=compute_dtype(context), device=device
        )
        tokens = _random_tokens(context, shape.vocabulary, (batch_size, room))
        if is_decode:
            self._fill(cache, tokens[:, :length])
            self._count_bytes(cache)
            tokens = tokens[:, length:].contiguous()
        if compile and device.type != "meta":
            # Without it Inductor leaves products with one row to cuBLAS.
            options = {"coordinate_descent_tuning": True} if is_decode else None
            compile_blocks(self.model, Block, options=options)
        self.answer_by(lambda: self.model(tokens, cache))
        self.tokens_per_s = tokens.numel()
        setattr(self, "decode_ms_per_token" if is_decode else "prefill_ms", 1)

    def _fill(self, cache: KeyValueCache, prompts: Tensor) -> None:
        """Read the prompts into the cache, one by one: together they may need more memory."""
        # On the meta device there is nothing to fill.
        if prompts.device.type != "meta":
            with self.answering():
                for index, prompt in enumerate(prompts):
                    self.model(prompt[None], cache.of_sequence(index))
        cache.position = prompts.shape[1]

    def _count_bytes(self, cache: KeyValueCache) -> None:
        """Count what a step must read: weights, all but the table of positions, and the cache.

        The output layer reads the whole table of tokens.
        """
        weights = (p.nbytes for name, p in self.model.named_parameters() if name != "positions")
        self.memory_bytes = sum(weights) + cache.memory.nbytes
        if self.triad_gb_s is not None:
            # The share is the time that the bytes would take over that of the step.
            self.bandwidth_share_pct = 100 * self.memory_bytes / (self.triad_gb_s * 1e9)


def _token_batches(
    context: Context, vocabulary: int, seq_len: int, grad_accumulation: int
) -> Iterator[Batch]:
    text = _random_tokens(
        context, vocabulary, (context.batch_size * grad_accumulation, seq_len + 1)
    )
    # The target of each token is the one after it. Both contiguous, as a loader's would be.
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return slices(inputs, targets, context.batch_size)


def _random_tokens(context: Context, vocabulary: int, shape: tuple[int, int]) -> Tensor:
    import torch

    return torch.randint(vocabulary, shape, generator=context.generator(), device=context.device)
