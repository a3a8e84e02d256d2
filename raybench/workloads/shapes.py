"""Sizes of the models of `transformer` and `dit`, and how ranks divide a language model.

`plan` and reports read this module, so it loads no torch. Degrees have the names of torchtitan and
accelerate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from raybench.errors import how_to_install
from raybench.job.point import EQUAL, Precision
from raybench.workloads.base import DdpOptions, option_defaults

# Which activations of a block are recomputed in the backward pass.
Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a GPT-2 model, whose output layer is tied to the token embedding."""

    is_tied: ClassVar[bool] = True

    layers: int
    heads: int
    width: int
    vocabulary: int = 50_304

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: equal to the heads of queries."""
        return self.heads

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    def parameter_count(self, positions: int) -> int:
        """Return the number of parameters with a position table of `positions` rows."""
        width = self.width
        norm = 2 * width
        attention = (3 * width * width + 3 * width) + (width * width + width)
        mlp = (4 * width * width + 4 * width) + (4 * width * width + width)
        blocks = self.layers * (2 * norm + attention + mlp)
        return (self.vocabulary + positions) * width + blocks + norm


# Brown et al. 2020, table 2.1 (GPT-3 small, medium, XL, 6.7B, 175B). XL has 16 heads instead of 24,
# which do not divide 2048. The vocabulary is GPT-2's 50,257, rounded up to a multiple of 64.
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
    """Sizes of a Llama model, in which heads / kv_heads query heads share one key head."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    # Width between the layers of the MLP.
    hidden: int
    vocabulary: int = 128_256
    # The output layer is tied to the token embedding.
    is_tied: bool = False
    # Base of the rotary positions.
    theta: float = 500_000.0

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def _block_weights(self) -> int:
        """Number of weights in the linear layers of a block."""
        query_width, key_width = self.heads * self.head_width, self.kv_heads * self.head_width
        # Query and output; key and value; the three layers of the MLP.
        return self.width * (2 * query_width + 2 * key_width + 3 * self.hidden)

    def parameter_count(self, positions: int) -> int:
        """Return the number of parameters; rotary `positions` have none."""
        tables = self.vocabulary * self.width * (1 if self.is_tied else 2)
        norm = self.width
        return tables + self.layers * (self._block_weights + 2 * norm) + norm


# Llama 3.2 1B and 3B, and Llama 3.1 8B (config.json of meta-llama). Llama 3.2 also scales positions
# beyond 8192, which costs no work and is left out.
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
    """Return the FLOPs of training on `tokens` tokens, as papers on MFU count them.

    A token costs 6 N + 12 L d S: N parameters with embeddings, L layers of width d, S = seq_len.
    Recomputation does not count (Chowdhery et al. 2022, appendix B).
    """
    return tokens * (6.0 * shape.parameter_count(seq_len) + _attention_flops(shape, seq_len))


def llama_flops(shape: LlamaShape, *, tokens: float, seq_len: int) -> float:
    """Return the FLOPs of training on `tokens` tokens, as FlopCounterMode counts them on meta.

    Matrix products and attention to the whole sequence count. The token embedding and
    recomputation do not count.
    """
    weights = shape.layers * shape._block_weights + shape.vocabulary * shape.width
    return tokens * (6.0 * weights + _attention_flops(shape, seq_len))


def _attention_flops(shape: LanguageShape, seq_len: int) -> float:
    """Return the FLOPs of attention for one token, forward and backward."""
    return 12.0 * shape.layers * shape.heads * shape.head_width * seq_len


class LayoutOptions(DdpOptions, total=False):
    """DistributedDataParallel's options, the degrees of a layout, and options of the optimizer."""

    dp_replicate: Annotated[
        int | None,
        Field(
            default=None,
            gt=0,
            description="Copies of the model; ranks that share its parts have one. "
            "none: what the other degrees leave of world_size.",
        ),
    ]
    dp_shard: Annotated[
        int,
        Field(
            default=1,
            ge=-1,
            description="Ranks that share parameters, gradients and optimizer state (FSDP2), "
            "each with data of its own; -1: what the other degrees leave.",
        ),
    ]
    tp: Annotated[
        int,
        Field(
            default=1,
            gt=0,
            description="Ranks that divide each matrix product of a batch (tensor parallel), and "
            "its sequence between (sequence parallel).",
        ),
    ]
    cp: Annotated[
        int,
        Field(
            default=1,
            gt=0,
            description="Ranks that divide the tokens of each sequence (context parallel), and "
            "share parameters as dp_shard does.",
        ),
    ]
    reshard_after_forward: Annotated[
        bool,
        Field(
            default=True,
            description="FSDP2: give back a block's gathered parameters after its forward pass, "
            "and gather them again for the backward pass.",
        ),
    ]
    optimizer_dtype: Annotated[
        Literal["fp32", "bf16"],
        Field(
            default="fp32",
            description="Type of the weights that the optimizer updates, their gradients and its "
            "state; bf16 needs precision bf16 or float8.",
        ),
    ]
    fused_optimizer: Annotated[
        bool,
        Field(default=False, description="Update all weights by one kernel, without temporaries."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The degrees by which ranks divide a training; their product is the number of ranks.

    Consecutive ranks form a tp group, consecutive tp groups form a cp group, and consecutive cp
    groups form a dp_shard group.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def make(cls, world_size: int, options: Mapping[str, Any]) -> Layout:
        """Return the layout of `world_size` ranks; its product may differ from world_size.

        A dp_shard of -1 and a missing dp_replicate become world_size divided by the other degrees,
        rounded down, but at least 1.

        Args:
            options: degrees by name; other keys are ignored.
        """
        tp, cp, shard = options.get("tp", 1), options.get("cp", 1), options.get("dp_shard", 1)
        replicate = options.get("dp_replicate")
        if shard == -1:  # as in torchtitan
            shard = world_size // ((replicate or 1) * cp * tp)
        shard = max(1, shard)  # `why_not_trained` refuses a dp_shard of 0
        if replicate is None:
            replicate = max(1, world_size // (shard * cp * tp))
        return cls(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)

    @property
    def ranks_per_batch(self) -> int:
        """The number of ranks that work on the same sequences."""
        return self.cp * self.tp

    @property
    def fsdp_ranks(self) -> int:
        """The number of ranks over which FSDP shards a copy of the model."""
        return self.dp_shard * self.cp

    @property
    def is_divided(self) -> bool:
        """Whether dp_shard, cp or tp exceeds 1, so that a rank has a part of model or sequence."""
        return self.dp_shard * self.cp * self.tp > 1

    def batch_of(self, rank: int) -> int:
        """Return the index, from 0, of the batch of a rank."""
        return rank // self.ranks_per_batch

    def cp_index(self, rank: int) -> int:
        """Return the index, from 0, of a rank in its cp group."""
        return rank // self.tp % self.cp


def why_not_trained(settings: Mapping[str, Any]) -> str | None:
    """Return why `transformer` cannot be trained with these settings; None if it can.

    Args:
        settings: all settings of the point, with defaults.
    """
    layout, world_size = Layout.make(settings["world_size"], settings), settings["world_size"]
    precision = settings["precision"]
    if settings.get("dp_shard") == 0:
        return "dp_shard must be at least 1, or -1 for what the other degrees leave, given 0"
    ranks = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp
    if ranks != world_size:
        degrees = ("dp_replicate", "dp_shard", "cp", "tp")
        return (
            f"{' x '.join(f'{name} {getattr(layout, name)}' for name in degrees)} is {ranks}, and "
            f"must be world_size {world_size}; give degrees that divide it, and leave out "
            "dp_replicate to have what is left"
        )
    if settings.get("optimizer_dtype") == "bf16" and precision not in ("bf16", "float8"):
        return f"optimizer_dtype: bf16 needs precision bf16 or float8, given {precision}"
    if precision == Precision.FLOAT8:
        if find_spec("torchao") is None:
            return f"precision float8 needs torchao, or take bf16; {how_to_install('float8')}"
        if layout.tp > 1:
            return f"precision float8 is not divided by tp {layout.tp}; take dp_shard, or bf16"
    if layout.is_divided:
        divided = "a model that dp_shard, cp or tp divides"
        if precision == Precision.FP16:
            return f"{divided} is not trained in fp16, whose gradients are scaled; take bf16"
        if settings.get("cuda_graph"):
            return f"{divided} is not captured in a CUDA graph; take cuda_graph: false"
        if settings.get("shares", EQUAL) != EQUAL or settings.get("slow_ratio", 1) < 1:
            return f"{divided} is divided evenly; leave out shares and slow_ratio"
        for name, default in option_defaults(DdpOptions).items():
            if settings.get(name, default) != default:
                value = str(settings[name]).lower()
                return f"{divided} has no DistributedDataParallel; leave out {name}, given {value}"
    if layout.ranks_per_batch > 1:
        return _why_no_tp_or_cp(settings["preset"], settings["seq_len"], layout)
    return None


def _why_no_tp_or_cp(preset: str, seq_len: int, layout: Layout) -> str | None:
    """Return why tp and cp cannot divide the model and its sequences; None if they can."""
    shape = LANGUAGE_PRESETS[preset]
    if not isinstance(shape, LlamaShape):
        return f"preset {preset} is divided by dp_shard alone; take one of Llama's, or tp: 1, cp: 1"
    if shape.heads % layout.tp or shape.kv_heads % layout.tp:
        return (
            f"tp {layout.tp} must divide the {shape.heads} heads and {shape.kv_heads} heads of "
            f"keys of {preset}"
        )
    # With cp each rank has two parts of a sequence (`language_models._take_part`).
    parts = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    if seq_len % parts:
        return (
            f"cp {layout.cp} and tp {layout.tp} divide a sequence into {parts} parts: seq_len must "
            f"be a multiple of {parts}, given {seq_len}"
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DitShape:
    """Sizes of a diffusion transformer of double and single blocks, as in Flux.1."""

    double_blocks: int
    single_blocks: int
    heads: int
    # How many numbers of a head rotate with the position along each of three axes.
    axes: tuple[int, int, int]
    # Width of an image token.
    channels: int = 64
    # Width of a text token.
    text_width: int
    # Width of the embedding of the whole text.
    pooled_width: int
    # Number of sinusoids that encode time and guidance.
    frequencies: int = 256

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return sum(self.axes)

    @property
    def width(self) -> int:
        """Width of a token inside the model."""
        return self.heads * self.head_width

    def parameter_count(self, scope: str | None) -> int:
        """Return the number of parameters of the part of the model that a step runs.

        Args:
            scope: double_block or single_block; any other value means the whole model.
        """
        width = self.width
        norms = 2 * self.head_width
        # Two streams: modulation (6), query, key and value (3), output (1), the MLP (4 + 4).
        double_block = 2 * (18 * width**2 + 15 * width + norms)
        # Modulation (3); query, key, value and the MLP's first layer (7); output (5).
        single_block = 15 * width**2 + 11 * width + norms
        input_width = self.channels + self.text_width + 2 * self.frequencies + self.pooled_width
        # Five first layers; a second layer for time, guidance and pooled text.
        input_layers = input_width * width + (3 * width**2 + 8 * width)
        # Modulation (2), then the output layer.
        output_layers = 2 * width**2 + 2 * width + self.channels * (width + 1)
        other_layers = input_layers + output_layers
        count = self._sum_for_scope(scope, double_block, single_block, other_layers)
        return round(count)  # a whole number, but the method also sums FLOPs, which are floats

    def flops(self, scope: str, *, text: int, image: int) -> float:
        """Return the FLOPs of products and attention in one forward pass for one image.

        A multiply-add counts as two.

        Args:
            scope: double_block or single_block; any other text means the whole model.
            text: number of text tokens on all ranks.
            image: number of image tokens on all ranks.
        """
        width, tokens = self.width, text + image
        # Query, key, value, output and the MLP have 12 width**2 weights, each used by every token.
        products = 24.0 * width**2 * tokens
        attention = 4.0 * tokens**2 * width
        # Modulation is computed once for all tokens: 2 x 6 width**2 weights, or 3 width**2.
        double_block = products + attention + 24 * width**2
        single_block = products + attention + 6 * width**2
        # First layers of image, text, time, guidance and pooled text.
        input_width = image * self.channels + text * self.text_width
        input_width += 2 * self.frequencies + self.pooled_width
        # Second layers of time, guidance and pooled text.
        input_width += 3 * width
        # Modulation (2), then the output layer.
        output_width = 2 * width + image * self.channels
        other_layers = 2 * width * (input_width + output_width)
        return self._sum_for_scope(scope, double_block, single_block, other_layers)

    def _sum_for_scope(
        self, scope: str | None, double_block: float, single_block: float, other_layers: float
    ) -> float:
        """Return the number for a block if `scope` is a block, otherwise for the whole model."""
        if scope == "double_block":
            return double_block
        if scope == "single_block":
            return single_block
        blocks = self.double_blocks * double_block + self.single_blocks * single_block
        return blocks + other_layers


# flux is Flux.1-dev, 11.9 billion parameters. tiny is for CPUs; 2, 3 and 4 divide its heads.
DIT_PRESETS = {
    "tiny": DitShape(
        double_blocks=2, single_blocks=4, heads=12, axes=(4, 6, 6), text_width=128, pooled_width=64
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
