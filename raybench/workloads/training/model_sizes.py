"""How large the models of the built-in workloads are. Loads no torch: reports read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder-only language model."""

    layers: int
    heads: int
    width: int
    vocabulary: int = 50_304

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: as many as of queries."""
        return self.heads

    @property
    def head(self) -> int:
        """Numbers of a head."""
        return self.width // self.heads


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
LINEAR_FEATURES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama: heads of width / heads numbers, of which several share keys and values.

    hidden: numbers between the two layers of the MLP. is_tied: the output layer is the table of
    tokens.
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
    def head(self) -> int:
        """Numbers of a head."""
        return self.width // self.heads


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DitShape:
    """Sizes of a diffusion transformer of double and single blocks, as Flux.1 has them.

    axes: of a head, what is rotated by the place of a token on each of three axes. channels: of a
    token of the image; text_width of one of the text, pooled_width of the text as a whole.
    """

    double_blocks: int
    single_blocks: int
    heads: int
    axes: tuple[int, int, int]
    channels: int = 64
    text_width: int
    pooled_width: int
    frequencies: int = 256

    @property
    def head(self) -> int:
        """Numbers of a head."""
        return sum(self.axes)

    @property
    def width(self) -> int:
        """Numbers of a token inside of the model."""
        return self.heads * self.head


# flux: Flux.1-dev, 11.9 billion parameters. tiny: for CPUs; its heads divide by 2, 3 and 4.
DIT_PRESETS = {
    "tiny": DitShape(
        double_blocks=2,
        single_blocks=4,
        heads=12,
        axes=(4, 6, 6),
        text_width=128,
        pooled_width=64,
    ),
    "flux": DitShape(
        double_blocks=19,
        single_blocks=38,
        heads=24,
        axes=(16, 56, 56),
        text_width=4096,
        pooled_width=768,
    ),
}


def parameter_count(workload: str, params: Mapping[str, str]) -> int | None:
    """Count the parameters of the model of a built-in workload, by its own as the tables hold them.

    None for other workloads, and for those without a model.
    """
    if workload == "linear":
        return LINEAR_FEATURES + 1
    if workload == "mlp" and {"hidden", "layers"} <= params.keys():
        hidden = int(params["hidden"])
        return int(params["layers"]) * (hidden * hidden + hidden)
    if workload == "transformer" and params.get("preset") in LANGUAGE_PRESETS:
        # While decoding, the table of positions ends with the new token.
        positions = int(params["seq_len"]) + (params.get("phase") == "decode")
        shape = LANGUAGE_PRESETS[params["preset"]]
        return language_parameters(
            replace(shape, layers=int(params.get("layers", shape.layers))), positions
        )
    if workload == "dit" and params.get("preset") in DIT_PRESETS:
        return _dit(DIT_PRESETS[params["preset"]], params)
    return None


def language_parameters(shape: LanguageShape, positions: int) -> int:
    """Count the parameters of a language model; positions: those of its table, if it has one."""
    if not isinstance(shape, LlamaShape):
        return _decoder(shape, positions)
    # Tables of tokens and of the output, unless they are one; blocks; a last norm.
    tables = shape.vocabulary * shape.width * (1 if shape.is_tied else 2)
    return tables + shape.layers * (_llama_products(shape) + 2 * shape.width) + shape.width


def _llama_products(shape: LlamaShape) -> int:
    """Weights of a block that tokens are multiplied by: of queries, keys, values, output, MLP."""
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    return shape.width * (2 * queries + 2 * keys + 3 * shape.hidden)


def model_flops(shape: LanguageShape, *, tokens: float, seq_len: int) -> float:
    """Count the operations of training on so many tokens as papers on MFU do: 6 N + 12 L d S.

    Of each token, 6 for each of all N parameters, embeddings too, and attention to the whole
    sequence. What is recomputed does not count (Chowdhery et al. 2022, appendix B).
    """
    attention = 12.0 * shape.layers * shape.heads * shape.head * seq_len
    return tokens * (6.0 * language_parameters(shape, seq_len) + attention)


def llama_flops(shape: LlamaShape, *, tokens: float, seq_len: int) -> float:
    """Count the operations of matrix products and attention in training on so many tokens.

    As torch executes them, without the table of tokens, of which a row is read.
    """
    products = shape.layers * _llama_products(shape) + shape.vocabulary * shape.width
    attention = 12.0 * shape.layers * shape.heads * shape.head * seq_len
    return tokens * (6.0 * products + attention)


def _decoder(shape: DecoderShape, positions: int) -> int:
    """Embeddings of tokens, which the output shares, and of positions; blocks; a last norm."""
    width = shape.width
    norm = 2 * width
    attention = (3 * width * width + 3 * width) + (width * width + width)
    mlp = (4 * width * width + 4 * width) + (4 * width * width + width)
    blocks = shape.layers * (2 * norm + attention + mlp)
    return (shape.vocabulary + positions) * width + blocks + norm


def _dit(shape: DitShape, params: Mapping[str, str]) -> int:
    """Embeddings of image, text, time, guidance and pooled text; blocks; modulation and output."""
    width, scope = shape.width, params.get("scope")
    blocks = {
        # Two streams: modulation, query, key and value, output, both layers of the MLP, two norms.
        "double_block": 2 * (18 * width**2 + 15 * width + 2 * shape.head),
        # Modulation; query, key, value and the MLP's first layer; output; two norms.
        "single_block": 15 * width**2 + 11 * width + 2 * shape.head,
    }
    if scope in blocks:
        return blocks[scope]
    inputs = shape.channels + shape.text_width + 2 * shape.frequencies + shape.pooled_width
    embeddings = inputs * width + 3 * width**2 + 8 * width
    output = 2 * width**2 + 2 * width + shape.channels * (width + 1)
    double_blocks = int(params.get("double_blocks", shape.double_blocks))
    single_blocks = int(params.get("single_blocks", shape.single_blocks))
    repeated = double_blocks * blocks["double_block"] + single_blocks * blocks["single_block"]
    return embeddings + repeated + output


def dit_flops(shape: DitShape, scope: str, *, text: int, image: int) -> float:
    """Count the operations of matrix products and attention, of one block or a forward pass.

    text, image: tokens of all ranks. A multiply-add is two operations.
    """
    width, tokens = shape.width, text + image
    # Of each token: query, key, value, output, and both layers of the MLP.
    block = 24.0 * width**2 * tokens + 4.0 * tokens**2 * width
    # With the modulation of both streams, or of the one.
    blocks = {"double_block": block + 24 * width**2, "single_block": block + 6 * width**2}
    if scope in blocks:
        return blocks[scope]
    embeddings = image * shape.channels + text * shape.text_width
    embeddings += 2 * shape.frequencies + shape.pooled_width + 3 * width
    output = 2 * width + image * shape.channels
    return (
        shape.double_blocks * blocks["double_block"]
        + shape.single_blocks * blocks["single_block"]
        + 2 * width * (embeddings + output)
    )
