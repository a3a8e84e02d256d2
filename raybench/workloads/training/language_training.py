"""How the workload `transformer` trains: its model, in which types, divided how over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raybench.job.point import Precision
from raybench.workloads import precision
from raybench.workloads.base import Context
from raybench.workloads.replicas import DdpOptions
from raybench.workloads.training.language_models import (
    Block,
    Checkpointing,
    Decoder,
    Llama,
    LlamaBlock,
    next_token_loss,
)
from raybench.workloads.training.layout import Layout, LayoutOptions, layout_defaults
from raybench.workloads.training.model import (
    Batch,
    OptimizerName,
    Recipe,
    compile_blocks,
    compute_dtype,
    output_error,
    slices,
)
from raybench.workloads.training.shapes import (
    LanguageShape,
    LlamaShape,
    llama_flops,
    model_flops,
)
from raybench.workloads.training.sharding import divide, sequence_part

# Tokens whose logits are compared: their memory is a small part of what a step has left free.
_COMPARED = 256
# What models consist of, layer by layer.
BLOCKS: tuple[type[nn.Module], ...] = (Block, LlamaBlock)


def make_model(
    shape: LanguageShape, seq_len: int, *, checkpointing: Checkpointing = "none", **regions: Any
) -> Decoder | Llama:
    """Make the model of a shape."""
    kind: Any = Llama if isinstance(shape, LlamaShape) else Decoder
    model: Decoder | Llama = kind(shape, seq_len=seq_len, checkpointing=checkpointing, **regions)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageTraining:
    """The training of a model of this shape, as a job asks for it."""

    context: Context
    shape: LanguageShape
    seq_len: int
    checkpointing: Checkpointing
    optimizer: OptimizerName
    grad_accumulation: int
    compile: bool
    options: LayoutOptions

    @property
    def layout(self) -> Layout:
        """The degrees; on the meta device, where operations are counted, it is alone."""
        return Layout() if self._is_counted else Layout.make(self.context.world_size, self.options)

    @property
    def is_plain(self) -> bool:
        """Whether the model can also run eagerly in fp32, as a whole, on this rank."""
        is_float8 = self.context.precision is Precision.FLOAT8
        return not (self._is_by_block or self.layout.is_divided or self._is_stored or is_float8)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a step that are this rank's part."""
        tokens = self.context.batch_size * self.grad_accumulation * self.seq_len
        return tokens / self.layout.ranks_per_batch

    @property
    def model_flops(self) -> float:
        """Operations of this rank's part of a step, as papers on MFU count them."""
        return model_flops(self.shape, tokens=self.tokens_per_step, seq_len=self.seq_len)

    @property
    def flops(self) -> float | None:
        """Operations of this rank's part of a step as counted; None where no formula has them."""
        if not isinstance(self.shape, LlamaShape):
            return None
        return llama_flops(self.shape, tokens=self.tokens_per_step, seq_len=self.seq_len)

    def recipe(self) -> Recipe:
        """Return how the model is trained."""
        layout, by_block = self.layout, self._is_by_block
        ddp: Any = {n: v for n, v in self.options.items() if n not in layout_defaults()}
        return Recipe(
            loss=self._loss(by_block and not self._is_counted),
            optimizer=self.optimizer,
            grad_accumulation=self.grad_accumulation,
            compile=self.compile and not by_block,
            ddp=ddp,
            divide=self._division(ddp, by_block) if layout.is_divided or by_block else None,
            is_fused=bool(self._option("fused_optimizer")),
            is_cast=self._is_stored or layout.is_divided,
        )

    def make_model(self) -> nn.Module:
        """Make the model, in the type in which the optimizer has it."""
        # On the meta device operations are counted, and what is recomputed does not train.
        checkpointing: Checkpointing = "none" if self._is_counted else self.checkpointing
        with _default_dtype(torch.bfloat16 if self._is_stored else torch.get_default_dtype()):
            model = make_model(self.shape, self.seq_len, checkpointing=checkpointing)
        if self.context.precision is Precision.FLOAT8:
            precision.convert_linear_layers(model.blocks, self.context.device)
        return model

    def batches(self) -> Iterator[Batch]:
        """Return the batches of a step, over and over: the same on ranks that share a batch."""
        mine = replace(self.context, rank=self.layout.batch_of(self.context.rank))
        return token_batches(mine, self.shape.vocabulary, self.seq_len, self.grad_accumulation)

    def output_error(self, model: nn.Module) -> float:
        """Compare its logits in the precision with those in fp32, over the first of its tokens."""
        tokens = random_tokens(self.context, self.shape.vocabulary, (1, self.seq_len))
        with torch.no_grad():
            with self.context.autocast():
                found = model(tokens[:, :_COMPARED]).float()
            precision.apply(Precision.FP32)
            try:
                return output_error(found, model(tokens[:, :_COMPARED]))
            finally:
                precision.apply(self.context.precision)

    def _division(self, ddp: DdpOptions, by_block: bool) -> Callable[[nn.Module], nn.Module]:
        context, compiles = self.context, by_block and not self._is_counted
        if self.layout.is_divided:
            is_autocast = context.precision not in (Precision.FP32, Precision.TF32)
            return partial(
                divide,
                layout=self.layout,
                device=context.device,
                compute_dtype=compute_dtype(context)
                if is_autocast and not self._is_stored
                else None,
                reshard_after_forward=bool(self._option("reshard_after_forward")),
                compiled=BLOCKS if compiles else (),
            )

        def replicate(model: nn.Module) -> nn.Module:
            if compiles:
                compile_blocks(model, *BLOCKS)
            return context.ddp(model, **ddp)

        return replicate

    def _loss(self, compiles: bool) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of the logits that are here; those of a tp group add up to their mean."""
        loss = torch.compile(next_token_loss) if compiles else next_token_loss
        if self.layout.ranks_per_batch == 1:
            return loss
        # FSDP takes the mean over cp.
        own, degree = sequence_part(self.layout, self.context.rank), self.layout.tp
        return lambda logits, targets: loss(logits, own(targets)) / degree

    def _option(self, name: str) -> Any:
        return self.options.get(name, layout_defaults()[name])

    @property
    def _is_by_block(self) -> bool:
        """Whether blocks are compiled one by one, in place."""
        return self.compile and (self.layout.is_divided or isinstance(self.shape, LlamaShape))

    @property
    def _is_stored(self) -> bool:
        """Whether the weights are stored in the type that they are used in."""
        return bool(self._option("optimizer_dtype") == "bf16")

    @property
    def _is_counted(self) -> bool:
        return self.context.device.type == "meta"


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def token_batches(
    context: Context, vocabulary: int, seq_len: int, grad_accumulation: int
) -> Iterator[Batch]:
    """Return batches of random tokens, and of those that follow each."""
    text = random_tokens(context, vocabulary, (context.batch_size * grad_accumulation, seq_len + 1))
    # The target of each token is the one after it. Both contiguous, as a loader's would be.
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return slices(inputs, targets, context.batch_size)


def random_tokens(context: Context, vocabulary: int, shape: tuple[int, int]) -> Tensor:
    """Draw tokens, other ones on each rank."""
    return torch.randint(vocabulary, shape, generator=context.generator(), device=context.device)
