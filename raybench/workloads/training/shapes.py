"""Sizes of the language models of the workload `transformer`, from which they are built.

Loads no torch: `plan` and reports read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a GPT-2: its output layer is tied to the token embedding."""

    layers: int
    heads: int
    width: int
    vocabulary: int = 50_304

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: as many as of queries."""
        return self.heads

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def is_tied(self) -> bool:
        """Whether the output layer is the token embedding: it is."""
        return True

    def parameter_count(self, positions: int) -> int:
        """Return the number of parameters; positions: rows of the learned position embedding."""
        width = self.width
        norm = 2 * width
        attention = (3 * width * width + 3 * width) + (width * width + width)
        mlp = (4 * width * width + 4 * width) + (4 * width * width + width)
        blocks = self.layers * (2 * norm + attention + mlp)
        return (self.vocabulary + positions) * width + blocks + norm


# The shapes of Brown et al. 2020, table 2.1 (GPT-3 small, medium, XL, 6.7B, 175B; XL with 16 heads
# of 128, as its 24 heads do not divide 2048). Vocabulary: GPT-2's 50,257 up to a multiple of 64.
DECODER_PRESETS = {
    "tiny": DecoderShape(layers=2, heads=2, width=64, vocabulary=512),
    "124m": DecoderShape(layers=12, heads=12, width=768),
    "350m": DecoderShape(layers=24, heads=16, width=1024),
    "1.3b": DecoderShape(layers=24, heads=16, width=2048),
    "6.7b": DecoderShape(layers=32, heads=32, width=4096),
    "175b": DecoderShape(layers=96, heads=96, width=12_288),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama, in which heads / kv_heads heads of queries share one of keys and values.

    hidden: width between the layers of the MLP. is_tied: the output layer is the token embedding.
    theta: base of the rotary positions.
    """

    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int
    vocabulary: int = 128_256
    is_tied: bool = False
    theta: float = 500_000.0

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def block_weights(self) -> int:
        """Weights of the linear layers of a block: queries, keys, values, output, and the MLP."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        return self.width * (2 * queries + 2 * keys + 3 * self.hidden)

    def parameter_count(self, positions: int) -> int:
        """Return the number of parameters, whatever the positions: they are rotary."""
        tables = self.vocabulary * self.width * (1 if self.is_tied else 2)
        return tables + self.layers * (self.block_weights + 2 * self.width) + self.width


# The shapes of Llama 3.2 1B and 3B and of Llama 3.1 8B (config.json of meta-llama). Positions are
# not scaled as those of 3.2 are beyond 8192: it is the same work.
LLAMA_PRESETS = {
    "llama-tiny": LlamaShape(
        layers=2, heads=4, kv_heads=2, width=64, hidden=128, vocabulary=512, theta=10_000.0
    ),
    "llama-1b": LlamaShape(layers=16, heads=32, kv_heads=8, width=2048, hidden=8192, is_tied=True),
    "llama-3b": LlamaShape(layers=28, heads=24, kv_heads=8, width=3072, hidden=8192, is_tied=True),
    "llama-8b": LlamaShape(layers=32, heads=32, kv_heads=8, width=4096, hidden=14_336),
}
LanguageShape: TypeAlias = DecoderShape | LlamaShape
LANGUAGE_PRESETS: Mapping[str, LanguageShape] = {**DECODER_PRESETS, **LLAMA_PRESETS}


def model_flops(shape: LanguageShape, *, tokens: float, seq_len: int) -> float:
    """Return the operations of training on so many tokens as papers on MFU count them.

    Per token 6 N + 12 L d S: 6 for each of all N parameters, embeddings too, and attention to the
    whole sequence. Recomputation does not count (Chowdhery et al. 2022, appendix B).
    """
    return tokens * (6.0 * shape.parameter_count(seq_len) + _attention_flops(shape, seq_len))


def llama_flops(shape: LlamaShape, *, tokens: float, seq_len: int) -> float:
    """Return the operations that torch executes in training on so many tokens.

    Matrix products and attention; not the token embedding, of which a token reads one row.
    """
    products = shape.layers * shape.block_weights + shape.vocabulary * shape.width
    return tokens * (6.0 * products + _attention_flops(shape, seq_len))


def _attention_flops(shape: LanguageShape, seq_len: int) -> float:
    """Return the operations of attention for one token, forward and backward."""
    return 12.0 * shape.layers * shape.heads * shape.head_width * seq_len
