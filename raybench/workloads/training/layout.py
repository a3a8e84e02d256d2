"""How the ranks of a training divide a model and its data: degrees, and what cannot be divided.

Loads no torch: `plan` reads this. The degrees have torchtitan's and accelerate's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field

from raybench.job.point import EQUAL, Precision, Scalar
from raybench.workloads.replicas import DdpOptions
from raybench.workloads.training.shapes import LANGUAGE_PRESETS, LlamaShape

StateType = Literal["fp32", "bf16"]
# As torchtitan has it: what the other degrees leave.
REST = -1
_OF_BF16 = (Precision.BF16, Precision.FLOAT8)


class LayoutOptions(DdpOptions, total=False):
    """Options of how ranks divide a model, and those of DistributedDataParallel."""

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
        StateType,
        Field(
            default="fp32",
            description="Type of the weights that the optimizer updates, their gradients and its "
            "state; bf16 needs precision bf16.",
        ),
    ]
    fused_optimizer: Annotated[
        bool,
        Field(default=False, description="Update all weights by one kernel, without temporaries."),
    ]


def layout_defaults() -> dict[str, Scalar | None]:
    """Return the default of each option that is not one of DistributedDataParallel."""
    hints = get_type_hints(LayoutOptions, include_extras=True)
    own = hints.keys() - get_type_hints(DdpOptions).keys()
    return {name: hints[name].__metadata__[0].default for name in hints if name in own}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees; their product is the number of ranks.

    Ranks of one tp group follow each other, then those of one cp group, and of one dp_shard group.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def make(cls, world_size: int, options: Mapping[str, Any]) -> Layout:
        """Return the layout for so many ranks; a degree that `options` leaves out is worked out."""
        tp, cp, shard = options.get("tp", 1), options.get("cp", 1), options.get("dp_shard", 1)
        replicate = options.get("dp_replicate")
        if shard == REST:
            replicate = replicate or 1
            shard = world_size // (replicate * cp * tp)
        # A degree of 0 is refused elsewhere.
        shard = max(1, shard)
        rest = max(1, world_size // (shard * cp * tp))
        return cls(dp_replicate=replicate or rest, dp_shard=shard, cp=cp, tp=tp)

    @property
    def ranks(self) -> int:
        """The number of ranks: the product of all degrees."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def ranks_per_batch(self) -> int:
        """The number of ranks that work on the same items."""
        return self.cp * self.tp

    @property
    def ranks_per_copy(self) -> int:
        """The number of ranks over which FSDP shards one copy of the parameters, tp apart."""
        return self.dp_shard * self.cp

    @property
    def is_divided(self) -> bool:
        """Whether a rank holds less than the whole model."""
        return self.dp_shard * self.cp * self.tp > 1

    def batch_of(self, rank: int) -> int:
        """Return the index of the batch that a rank works on in a step."""
        return rank // self.ranks_per_batch

    def cp_place(self, rank: int) -> int:
        """Return the index of a rank in its cp group."""
        return rank // self.tp % self.cp

    def __str__(self) -> str:
        degrees = ("dp_replicate", "dp_shard", "cp", "tp")
        return " x ".join(f"{name} {getattr(self, name)}" for name in degrees)


def layout_refusals(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each reason why a point cannot be divided as it asks."""
    layout = Layout.make(settings["world_size"], settings)
    if settings.get("dp_shard") == 0:
        yield "dp_shard must be at least 1, or -1 for what the other degrees leave, given 0"
    if layout.ranks != settings["world_size"]:
        yield (
            f"{layout} is {layout.ranks}, and must be world_size {settings['world_size']}; "
            "give degrees that divide it, and leave out dp_replicate to have what is left"
        )
    if settings.get("optimizer_dtype") == "bf16" and settings["precision"] not in _OF_BF16:
        yield f"optimizer_dtype: bf16 needs precision bf16, given {settings['precision']}"
    if settings["precision"] == Precision.FLOAT8:
        if find_spec("torchao") is None:
            yield "precision float8 needs torchao: pip install 'raybench[float8]'; or take bf16"
        if layout.tp > 1:
            yield (
                "precision float8 is not divided by tp; take dp_shard, or bf16, given tp "
                f"{layout.tp}"
            )
    if layout.is_divided:
        yield from _refusals_of_divided(settings)
    if layout.ranks_per_batch > 1:
        yield from _refusals_of_shared_batches(settings, layout)


def _refusals_of_divided(settings: Mapping[str, Any]) -> Iterator[str]:
    divided = "a model that dp_shard, cp or tp divides"
    if settings["precision"] == Precision.FP16:
        yield f"{divided} is not trained in fp16, whose gradients are scaled; take bf16"
    if settings.get("cuda_graph"):
        yield f"{divided} is not captured in a CUDA graph; take cuda_graph: false"
    if settings.get("shares", EQUAL) != EQUAL or settings.get("slow_ratio", 1) < 1:
        yield f"{divided} is divided evenly; leave out shares and slow_ratio"


def _refusals_of_shared_batches(settings: Mapping[str, Any], layout: Layout) -> Iterator[str]:
    preset, length, degree = settings["preset"], settings["seq_len"], layout.tp
    shape = LANGUAGE_PRESETS[preset]
    if not isinstance(shape, LlamaShape):
        yield f"preset {preset} is divided by dp_shard alone; take one of Llama's, or tp: 1, cp: 1"
        return
    if shape.heads % degree or shape.kv_heads % degree:
        yield (
            f"tp {degree} must divide the {shape.heads} heads and {shape.kv_heads} heads of keys "
            f"of {preset}"
        )
    # With cp, each rank has two parts of a sequence.
    parts = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    if length % parts:
        yield (
            f"cp {layout.cp} and tp {layout.tp} divide a sequence into {parts} parts: seq_len must "
            f"be a multiple of {parts}, given {length}"
        )
