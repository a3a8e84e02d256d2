"""The Llama of the workload `transformer`: decoder-only, by the shapes of Llama 3."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from raybench.workloads.training.layers import (
    Checkpointing,
    KeyValueCache,
    LayerCache,
    Region,
    run_block,
)
from raybench.workloads.training.model_sizes import LlamaShape

# Cosines and sines by position: (positions, head width / 2), fp32.
Rotation: TypeAlias = tuple[Tensor, Tensor]
# Of query (batch, heads, length, head), keys and values (batch, kv heads, length, head).
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class Llama(nn.Module):
    """Llama: token ids (batch, seq_len) to logits (batch, seq_len, vocabulary).

    Pre-norm blocks of RMSNorm, attention with grouped queries and rotary positions, and SwiGLU; no
    biases, no dropout.
    """

    # Of these, a token reads one row.
    looked_up = ("tokens.weight",)

    def __init__(
        self,
        shape: LlamaShape,
        *,
        seq_len: int,
        checkpointing: Checkpointing = "none",
        region: Region = lambda name: nullcontext(),
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(
            LlamaBlock(shape, checkpointing, region) for _ in range(shape.layers)
        )
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._region = region
        cosines, sines = _rotation(seq_len, shape)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        # Normal numbers, narrower where residuals add up (as torchtitan and OLMo do).
        nn.init.normal_(self.tokens.weight, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                residual = name.endswith(("attention.output", "mlp.down"))
                depth = 2 * shape.layers if residual else 1
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(depth))
        if shape.is_tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Logits for the token after each position; with a cache only after the last one.

        cache: of the tokens before these; it takes on what the layers make of these.
        """
        begin = 0 if cache is None else cache.position
        length = slice(begin, begin + tokens.shape[1])
        rotation = self.get_buffer("cosines")[length], self.get_buffer("sines")[length]
        with self._region("embedding"):
            x = self.tokens(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, None if cache is None else cache.of_layer(layer))
        if cache is not None:
            x = x[:, -1:]
        with self._region("logits"):
            logits: Tensor = self.output(self.norm(x))
        return logits


class LlamaBlock(nn.Module):
    """Causal self-attention and an MLP, each with a residual."""

    def __init__(self, shape: LlamaShape, checkpointing: Checkpointing, region: Region) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.mlp = Mlp(shape)
        self._checkpointing: Checkpointing = checkpointing
        self._region = region

    def forward(self, x: Tensor, rotation: Rotation, cache: LayerCache | None = None) -> Tensor:
        """Take and give (batch, length, width)."""
        # Here and not around the block: compiled, what no gradient needs is not computed again.
        return run_block(self._run, self._checkpointing, x, rotation, cache)

    def _run(self, x: Tensor, rotation: Rotation, cache: LayerCache | None) -> Tensor:
        with self._region("attention"):
            x = x + self.attention(self.attention_norm(x), rotation, cache)
        with self._region("mlp"):
            out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Attention(nn.Module):
    """Causal self-attention, in which heads / kv_heads queries share a key and a value."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
        self.query = nn.Linear(shape.width, queries, bias=False)
        self.key = nn.Linear(shape.width, keys, bias=False)
        self.value = nn.Linear(shape.width, keys, bias=False)
        self.output = nn.Linear(queries, shape.width, bias=False)
        # How the tokens of a sequence see each other, where they are not all here.
        self.attend: Attend = attend_causally
        self._head = shape.head

    def forward(self, x: Tensor, rotation: Rotation, cache: LayerCache | None = None) -> Tensor:
        """Take and give (batch, length, width)."""
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


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take and give (batch, length, width)."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Let each token see itself and those before."""
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )


def _rotation(positions: int, shape: LlamaShape) -> Rotation:
    """Cosines and sines of the angles by which pairs of numbers are turned (Su et al. 2021)."""
    exponents = torch.arange(0, shape.head, 2, dtype=torch.float32) / shape.head
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), shape.theta**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (i, i + head / 2) of each head by its token's angles, in fp32 at least."""
    cosines, sines = rotation
    first, second = x.to(torch.promote_types(x.dtype, cosines.dtype)).chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(x.dtype)
