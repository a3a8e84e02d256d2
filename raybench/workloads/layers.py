"""The model of the workload `transformer`: decoder-only."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from raybench.workloads.model_sizes import DECODER_PRESETS, DecoderShape

__all__ = ["DECODER_PRESETS", "Decoder", "DecoderShape", "next_token_loss"]


class Decoder(nn.Module):
    """A GPT-2 shaped language model: token ids (batch, seq_len) to logits (..., vocabulary).

    Pre-norm blocks, learned positions, the output layer tied to the token embedding, no dropout.
    """

    def __init__(self, shape: DecoderShape, *, seq_len: int, checkpointing: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.empty(seq_len, shape.width))
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self._checkpointing = checkpointing
        self._initialise(shape.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the token after each position."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            if self._checkpointing:
                # Nothing random runs in a block, so there is no random state to keep.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        logits: Tensor = functional.linear(self.norm(x), self.tokens.weight)
        return logits

    def _initialise(self, layers: int) -> None:
        """GPT-2's initialisation (Radford et al. 2019): normal, narrower where residuals add up."""
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                residual = name.endswith(("attention_out", "mlp_out"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers if residual else 1))
                nn.init.zeros_(module.bias)


class _Block(nn.Module):
    """Causal self-attention and an MLP of four times the width, each with a residual."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention_in = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        out: Tensor = x + self.mlp_out(hidden)
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        joint = self.attention_in(x).view(batch, length, 3, self._heads, width // self._heads)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all positions of the batch."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
