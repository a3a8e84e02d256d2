"""The models of the workload `transformer`, decoder-only: GPT-2 and Llama."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from raybench.workloads.shapes import Checkpointing, DecoderShape, LanguageShape, LlamaShape

# As Context.region.
Region: TypeAlias = Callable[[str], AbstractContextManager[None]]
# Cosines and sines by position: (positions, head width / 2), fp32.
Rotation: TypeAlias = tuple[Tensor, Tensor]
# Of query (batch, heads, length, head), keys and values (batch, kv heads, length, head).
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

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


@dataclass(slots=True)
class KeyValueCache:
    """A KV cache of static size: keys and values of earlier tokens, of all layers or of one.

    memory: ([layers,] 2, batch, heads of keys, tokens at most, head width). position: index of the
    next token, the same in all sequences; the owner of the cache advances it.
    """

    memory: Tensor
    position: int = 0

    @classmethod
    def make(
        cls, shape: LanguageShape, *, batch_size: int, room: int, **like: Any
    ) -> KeyValueCache:
        """Return an empty cache of all layers, for `room` tokens a sequence at most.

        like: dtype and device.
        """
        heads = (shape.kv_heads, room, shape.head_width)
        return cls(torch.empty(shape.layers, 2, batch_size, *heads, **like))

    def of_sequence(self, index: int) -> KeyValueCache:
        """Return the cache of one sequence in all layers, a view of this one at its position."""
        return KeyValueCache(self.memory[:, :, index : index + 1], self.position)

    def of_layer(self, layer: int) -> KeyValueCache:
        """Return the cache of one layer, a view of this one at the same position."""
        return KeyValueCache(self.memory[layer], self.position)

    def extend(self, new: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of one layer at `position`; return those of all tokens until then.

        new: (2, batch, heads, length, head). Keys and values (batch, heads, position + length,
        head) are views of the cache. More than one token can only be the first ones of a sequence.
        """
        length = new.shape[3]
        # Else some of the new tokens would need a mask of their own.
        assert length == 1 or self.position == 0, "several tokens only begin a sequence"
        end = self.position + length
        # In one copy: while decoding, each kernel more is felt.
        self.memory[:, :, :, self.position : end] = new
        keys, values = self.memory[:, :, :, :end]
        return keys, values


class LanguageModel(nn.Module):
    """A decoder-only language model, a GPT-2 or a Llama by its shape.

    Both have pre-norm blocks and no dropout. GPT-2: LayerNorm, learned positions, GELU, biases, and
    the output layer tied to the token embedding. Llama: RMSNorm, rotary positions, attention with
    grouped queries, SwiGLU, and no biases.

    seq_len: the longest sequence. checkpointing: of each block. region: as Context.region.
    looked_up: name of the table of which a token reads one row, in `named_parameters`.
    """

    def __init__(
        self,
        shape: LanguageShape,
        *,
        seq_len: int,
        checkpointing: Checkpointing = "none",
        region: Region = lambda name: nullcontext(),
    ) -> None:
        super().__init__()
        self._region = region
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions: nn.Parameter | None = None
        if isinstance(shape, DecoderShape):
            self.positions = nn.Parameter(torch.empty(seq_len, shape.width))
            nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(
            Block(shape, checkpointing, region) for _ in range(shape.layers)
        )
        self.norm = _make_norm(shape)
        # A tied output layer needs no memory of its own, not even for a moment.
        place = "meta" if shape.is_tied else None
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False, device=place)
        self.looked_up = "positions" if shape.is_tied else "tokens.weight"
        if isinstance(shape, LlamaShape):
            # Angles by which pairs of numbers are turned (Su et al. 2021).
            exponents = torch.arange(0, shape.head_width, 2, dtype=torch.float32) / shape.head_width
            places = torch.arange(seq_len, dtype=torch.float32)
            angles = torch.outer(places, shape.theta**-exponents)
            self.register_buffer("cosines", angles.cos(), persistent=False)
            self.register_buffer("sines", angles.sin(), persistent=False)
        # Narrower in the layers whose outputs add up in residuals (GPT-2, Radford et al. 2019;
        # torchtitan and OLMo do so for Llama).
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                depth = 2 * shape.layers if name.endswith(("attention.output", "mlp.down")) else 1
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(depth))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if shape.is_tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return logits (batch, length, vocabulary) of the token after each one of `tokens`.

        tokens: (batch, length). cache: keys and values of earlier tokens; those of these tokens are
        written into it, and logits are of the last position alone, (batch, 1, vocabulary).
        """
        begin, length = 0 if cache is None else cache.position, tokens.shape[1]
        here = slice(begin, begin + length)
        rotation: Rotation | None = None
        with self._region("embedding"):
            x = self.tokens(tokens)
            if self.positions is None:
                rotation = self.get_buffer("cosines")[here], self.get_buffer("sines")[here]
            elif length == len(self.positions):
                # A part of the parameter would cost a kernel more, in the backward pass another.
                x = x + self.positions
            else:
                x = x + self.positions[here]
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, None if cache is None else cache.of_layer(layer))
        if cache is not None:
            x = x[:, -1:]
        with self._region("logits"):
            logits: Tensor = self.output(self.norm(x))
        return logits


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a norm and with a residual."""

    def __init__(self, shape: LanguageShape, checkpointing: Checkpointing, region: Region) -> None:
        super().__init__()
        self.attention_norm = _make_norm(shape)
        self.mlp_norm = _make_norm(shape)
        self.attention: nn.Module
        self.mlp: nn.Module
        if isinstance(shape, LlamaShape):
            self.attention, self.mlp = Attention(shape), GatedMlp(shape)
        else:
            self.attention, self.mlp = JointAttention(shape), Mlp(shape)
        self._checkpointing: Checkpointing = checkpointing
        self._region = region

    def forward(
        self, x: Tensor, rotation: Rotation | None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the tokens after the block, (batch, length, width) as x; cache: of this layer.

        rotation: of these tokens; None for GPT-2.
        """
        # Here and not around the block: compiled, what no gradient needs is not computed again.
        if self._checkpointing == "none":
            return self._run(x, rotation, cache)
        chosen: dict[str, Any] = {}
        if self._checkpointing == "selective":
            # A plain function: with an object in it, torch.compile would leave the block as it is.
            chosen = {"context_fn": _keep_costly_parts}
        # Nothing random runs in a block, so there is no random state to keep.
        out: Tensor = checkpoint(
            self._run, x, rotation, cache, use_reentrant=False, preserve_rng_state=False, **chosen
        )
        return out

    def _run(self, x: Tensor, rotation: Rotation | None, cache: KeyValueCache | None) -> Tensor:
        """Return `forward` without checkpointing."""
        with self._region("attention"):
            x = x + self.attention(self.attention_norm(x), rotation, cache)
        with self._region("mlp"):
            out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def _keep_costly_parts() -> Any:
    """Return the contexts of torch.utils.checkpoint for selective checkpointing.

    They save the outputs of attention and of every second matrix product, as torchtitan does:
    attention costs most for the memory of its output, and half of the products are worth half of
    the memory.
    """
    # Of the forward pass, and of what is computed again in the same order.
    seen = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_: object, **__: object) -> CheckpointPolicy:
        is_product = operator in _PRODUCTS
        seen[context.is_recompute] += is_product
        is_kept = operator in _ATTENTION or (is_product and seen[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


class Attention(nn.Module):
    """Causal self-attention, in which heads / kv_heads queries share a key and a value."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.query = nn.Linear(shape.width, queries, bias=False)
        self.key = nn.Linear(shape.width, keys, bias=False)
        self.value = nn.Linear(shape.width, keys, bias=False)
        self.output = nn.Linear(queries, shape.width, bias=False)
        # How the tokens of a sequence see each other, where they are not all here.
        self.attend: Attend = attend_causally
        self._head = shape.head_width

    def forward(self, x: Tensor, rotation: Rotation, cache: KeyValueCache | None = None) -> Tensor:
        """Return attention's output, (batch, length, width) as x; cache: of this layer.

        rotation: of these tokens.
        """
        # Heads are counted from what is here: tensor parallelism leaves a rank some of them.
        query, key, value = (
            layer(x).unflatten(-1, (-1, self._head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = rotate(query, rotation), rotate(key, rotation)
        if cache is not None:
            key, value = cache.extend(torch.stack((key, value)))
        if cache is not None and query.shape[2] == 1:
            # One token sees all that are there; torch would let it see the first alone.
            mixed = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        else:
            mixed = self.attend(query, key, value)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class JointAttention(nn.Module):
    """Causal self-attention of GPT-2: query, key and value by one matrix product."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.joint = Linear(shape.width, 3 * shape.width)
        self.output = Linear(shape.width, shape.width)

    def forward(self, x: Tensor, rotation: None, cache: KeyValueCache | None = None) -> Tensor:
        """Return attention's output, (batch, length, width) as x; writes into the cache."""
        batch, length, width = x.shape
        joint = self.joint(x).view(batch, length, 3, self._heads, width // self._heads)
        query, key, value = by_kind = joint.permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = cache.extend(by_kind[1:])
        # One token sees all that are there; torch would let it see the first alone.
        is_causal = cache is None or length > 1
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        out: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class GatedMlp(nn.Module):
    """SwiGLU, the MLP of Llama: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output, (batch, length, width) as x."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Mlp(nn.Module):
    """The MLP of GPT-2: two layers with GELU between, the first to four times the width."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.up = Linear(shape.width, 4 * shape.width)
        self.down = Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output, (batch, length, width) as x."""
        out: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return out


class Linear(nn.Linear):
    """A linear layer whose bias is added apart where code is compiled for a single row.

    Inductor makes a reduction of the product of a matrix with one row, fused with what follows; but
    not where the product adds a bias itself (torch._inductor.decomposition, `mm` and `addmm`).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., outputs) for x (..., inputs)."""
        if torch.compiler.is_compiling() and x.shape[:-1].numel() == 1:
            return functional.linear(x, self.weight) + self.bias
        return super().forward(x)


def _make_norm(shape: LanguageShape) -> nn.Module:
    """Return a norm of the width of the model."""
    if isinstance(shape, LlamaShape):
        return nn.RMSNorm(shape.width, eps=1e-5)
    return nn.LayerNorm(shape.width)


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the output of causal attention; shapes as `Attend`, all of one length."""
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return x with its pairs (i, i + head / 2) turned by rotary positions.

    x: (batch, heads, length, head). Computed in fp32 at least, in the type of x.
    """
    cosines, sines = rotation
    first, second = x.to(torch.promote_types(x.dtype, cosines.dtype)).chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(x.dtype)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all positions of the batch, a scalar.

    logits: (batch, length, vocabulary). targets: (batch, length), token ids. Under autocast as
    torch has it, whose softmax is in the type of the logits; else in fp32 at least, as torchtitan
    has it.
    """
    flat, device = logits.flatten(0, 1), logits.device.type
    # The meta device has no autocast.
    if device == "meta" or not torch.is_autocast_enabled(device):
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return functional.cross_entropy(flat, targets.flatten())
