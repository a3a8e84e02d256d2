"""What the memory of a step of training is made of when it is largest, from settings alone.

Closed formulas, without torch: `plan` asks them. They are those of eager steps on a CUDA device, by
what torch 2.11 keeps for the backward pass. A step is largest where the backward pass begins, where
it ends, or in the optimizer, whichever needs most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raybench.job.memory import MemoryParts
from raybench.job.point import EQUAL
from raybench.workloads.training.layout import Layout
from raybench.workloads.training.shapes import LANGUAGE_PRESETS, LanguageShape, LlamaShape

# cuBLAS and cuBLASLt take 32 MiB each on Hopper.
_WORKSPACES = 64 * 2**20
# What is kept for the backward pass of a product in float8 is in bf16, too.
_HALVES = ("fp16", "bf16", "float8")
# Beside the weights: Adam's two moments, and what its update of all weights at once adds.
_MOMENTS = {"sgd": 0, "adam": 2, "adamw": 2}
_TEMPORARIES = {"sgd": 0, "adam": 1, "adamw": 1}

# Blocks whose weights are gathered at a time: the one that runs, and the next.
_GATHERED = 2
_FP32 = 4
_WORDS = {False: "none", True: "full"}

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a step holds beside parameters, gradients and the optimizer's state, in bytes.

    saved: by the forward pass for the backward pass. loss: what is added where that begins.
    last: what is added where it ends, when all gradients are there. data: the inputs of all steps.
    """

    saved: float
    loss: float
    last: float = 0.0
    data: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a rank has of the weights, in bytes as the optimizer has them.

    has_buckets: DistributedDataParallel reduces their gradients.
    """

    bytes: float
    has_buckets: bool


def is_estimated(settings: Settings) -> bool:
    """Whether the formulas are of such a point."""
    is_even = settings.get("shares", EQUAL) == EQUAL and settings.get("slow_ratio", 1) == 1
    return settings.get("mode", "train") == "train" and is_even and not settings.get("cuda_graph")


def compute_bytes(settings: Settings) -> int:
    """Return the bytes of a number that matrix products read."""
    return 2 if settings["precision"] in _HALVES else 4


def estimate_training(settings: Settings, model: Weights, held: Held) -> MemoryParts:
    """Estimate a step of training, from the weights and what is held beside them."""
    optimizer = settings.get("optimizer", "adam")
    # Gradients that are views of the buckets have no memory of their own.
    is_view = model.has_buckets and settings.get("gradient_as_bucket_view")
    gradients = 0.0 if is_view else model.bytes
    temporaries = 0.0 if settings.get("fused_optimizer") else _TEMPORARIES[optimizer] * model.bytes
    # Those of the passes before are there in the next one.
    before = gradients if settings.get("grad_accumulation", 1) > 1 else 0.0
    largest, there = max(
        (held.saved + held.loss + before, before),
        (held.last + gradients, gradients),
        (temporaries + gradients, gradients),
    )
    return MemoryParts(
        parameters=model.bytes,
        gradients=there,
        optimizer=_MOMENTS[optimizer] * model.bytes,
        activations=largest - there,
        other=held.data + _WORKSPACES + (model.bytes if model.has_buckets else 0.0),
    )


def whole(settings: Settings, parameters: int) -> Weights:
    """Return a model in fp32 that each rank has whole."""
    return Weights(bytes=4.0 * parameters, has_buckets=settings["world_size"] > 1)


def estimate_stack(settings: Settings, hidden: int, layers: int) -> MemoryParts | None:
    """Estimate linear layers of hidden x hidden with ReLU between."""
    if not is_estimated(settings) or settings.get("compile"):
        return None
    parameters = layers * (hidden * hidden + hidden)
    number, rows = compute_bytes(settings), float(settings["batch_size"])
    # Each layer keeps its input, and autocast its weights in half.
    inputs = rows * hidden * number * (layers if number == 2 else layers - 1)
    casts = 2.0 * parameters if number == 2 else 0.0
    held = Held(
        saved=inputs + casts,
        loss=rows * hidden * (8 + number),
        data=8.0 * rows * hidden * settings.get("grad_accumulation", 1),
    )
    return estimate_training(settings, whole(settings, parameters), held)


def estimate_rows(settings: Settings, features: int) -> MemoryParts | None:
    """Estimate one linear layer to a single number, whose data set is all that takes memory."""
    if not is_estimated(settings) or settings.get("compile"):
        return None
    rows = settings["rows"] if settings["data"] == "device" else settings["batch_size"]
    held = Held(saved=0.0, loss=0.0, data=4.0 * rows * (features + 1))
    return estimate_training(settings, whole(settings, features + 1), held)


# Blocks of each stage, and layers of a block.
_RESNETS = {"resnet18": ((2, 2, 2, 2), 2), "resnet50": ((3, 4, 6, 3), 3)}
_RESNET_PARAMETERS = {"resnet18": 11_689_512, "resnet50": 25_557_032}


def estimate_resnet(settings: Settings) -> MemoryParts | None:
    """Estimate a residual network of torchvision."""
    if not is_estimated(settings) or settings.get("compile"):
        return None
    preset, images = settings["preset"], float(settings["batch_size"])
    number, parameters = compute_bytes(settings), _RESNET_PARAMETERS[preset]
    size = settings["image_size"]
    # Each convolution's output, and what the norm behind it makes of that.
    saved = 2.0 * number * images * _convolution_outputs(preset, size)
    pixels = 3.0 * images * size**2
    if number == 2:
        saved += 2.0 * (parameters + pixels)
    data = 4.0 * pixels * settings.get("grad_accumulation", 1)
    held = Held(saved=saved, loss=0.0, data=data)
    return estimate_training(settings, whole(settings, parameters), held)


def _convolution_outputs(preset: str, size: int) -> float:
    """Count the numbers that the convolutions make of one image."""
    blocks, depth = _RESNETS[preset]
    size = -(-size // 2)
    total = 64.0 * size**2
    size = -(-size // 2)
    for stage, count in enumerate(blocks):
        width, wide = 64 * 2**stage, 64 * 2**stage * (4 if depth == 3 else 1)
        before, size = size, (size if stage == 0 else -(-size // 2))
        area = size**2
        # The stride is that of the second layer of three, of the first of two.
        first = width * (before**2 if depth == 3 else area)
        rest = (count - 1) * width * area + (depth - 2) * count * width * area + count * wide * area
        shortcut = wide * area if stage or depth == 3 else 0
        total += first + rest + shortcut
    return total


def estimate_language_model(settings: Settings) -> MemoryParts | None:
    """Estimate a transformer as the job asks for it; None where nothing is trained.

    Also where a model is compiled as a whole: what is kept then is the compiler's choice.
    """
    if not is_estimated(settings):
        return None
    model = _Model.make(settings)
    if settings.get("compile") and not model.is_compiled_by_block:
        return None
    return estimate_training(settings, model.weights(), model.step_holdings())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model in a layout. number, residual: bytes of what products read, and between blocks."""

    settings: Settings
    shape: LanguageShape
    layout: Layout
    parameters: int
    number: int
    residual: int

    @classmethod
    def make(cls, settings: Settings) -> _Model:
        shape = LANGUAGE_PRESETS[settings["preset"]]
        shape = replace(shape, layers=settings.get("layers") or shape.layers)
        layout = Layout.make(settings["world_size"], settings)
        number = compute_bytes(settings)
        # Under autocast additions are in fp32; weights that are stored or gathered in half are not.
        is_half = settings.get("optimizer_dtype") == "bf16" or layout.is_divided
        return cls(
            settings=settings,
            shape=shape,
            layout=layout,
            parameters=shape.parameter_count(settings["seq_len"]),
            number=number,
            residual=number if is_half else _FP32,
        )

    @property
    def is_compiled_by_block(self) -> bool:
        """Whether `compile` leaves the blocks apart."""
        return isinstance(self.shape, LlamaShape) or self.layout.is_divided

    def weights(self) -> Weights:
        """Say what this rank has of the weights."""
        stored = 2 if self.settings.get("optimizer_dtype") == "bf16" else _FP32
        parts = self.layout.ranks_per_copy * self.layout.tp
        return Weights(
            bytes=stored * self.parameters / parts,
            has_buckets=self.settings["world_size"] > 1 and not self.layout.is_divided,
        )

    def step_holdings(self) -> Held:
        """Say what a step holds beside them."""
        # Of a pass of this rank and those that divide its products.
        tokens = float(self.settings["batch_size"] * self.settings["seq_len"]) / self.layout.cp
        number = self.number
        width, tp = self.shape.width, self.layout.tp
        # The last norm, and the input of the logits.
        norm = tokens * width * (self.residual / tp + number)
        gathered = self._blocks_here()
        if self._is_gathered:
            # The last layer stays until the backward pass has been through it.
            gathered += number * self._table
        saved = (
            self.shape.layers * tokens * self._bytes_of_block() + norm + self._casts() + gathered
        )
        return Held(
            saved=saved,
            loss=tokens / tp * self.shape.vocabulary * self._bytes_of_logit(),
            last=max(tokens * self._whole() + self._weights_at_end(), self._sum_of_tied()),
            data=16.0 * tokens * self.settings.get("grad_accumulation", 1),
        )

    @property
    def _is_autocast(self) -> bool:
        return self.number == 2 and self.residual == _FP32

    @property
    def _checkpointing(self) -> str:
        given = self.settings["activation_checkpointing"]
        return str(_WORDS.get(given, given))

    def _bytes_of_block(self) -> float:
        """Count the bytes that a block keeps of a token for the backward pass."""
        if self._checkpointing == "none":
            return self._whole()
        entry = self.residual * self.shape.width / self.layout.tp
        return entry + (self._bytes_of_choice() if self._checkpointing == "selective" else 0.0)

    def _whole(self) -> float:
        """All that its backward pass reads: inputs of norms, of products, of what is between."""
        shape, number, tp = self.shape, self.number, self.layout.tp
        norms = 2 * self.residual * shape.width / tp
        if not isinstance(shape, LlamaShape):
            # Query, key and value, attention's output, both sides of GELU; inputs of products.
            return norms + 14 * number * shape.width
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        # In context parallelism each rank has keys and values of all, for each head of queries.
        attention = 2 * queries + 2 * (queries * self.layout.cp if self.layout.cp > 1 else keys)
        if self.settings.get("compile"):
            # What is cheap is computed again: norms, the product of gate and up. Not where a block
            # ends its forward pass before the backward pass begins: what both read is kept, unless
            # it is in float8.
            is_kept = self._checkpointing == "none" and self.settings["precision"] != "float8"
            kept = 3 * shape.width + shape.hidden if is_kept else 0
            return norms + number * (attention + 2 * shape.hidden + kept) / tp
        # Autocast casts the input of each product by itself: three of attention, two of the MLP.
        inputs = (5 if self._is_autocast else 2) * shape.width
        return norms + number * (inputs + (attention + 4 * shape.hidden) / tp)

    def _bytes_of_choice(self) -> float:
        """Count what selective checkpointing keeps: attention's output, every second product."""
        shape, number, tp = self.shape, self.number, self.layout.tp
        if not isinstance(shape, LlamaShape):
            return 8 * number * shape.width
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        # Compiled, what no gradient needs is not kept: the last product.
        last = 0 if self.settings.get("compile") else shape.width
        return number * (2 * queries + keys + shape.hidden + last) / tp

    def _casts(self) -> float:
        """Count autocast's copies of weights, in bytes; of those computed again, the last layer."""
        if not self._is_autocast:
            return 0.0
        table = self.shape.vocabulary * self.shape.width
        return 2.0 * (self.parameters if self._checkpointing == "none" else table)

    def _bytes_of_logit(self) -> int:
        """Count what the loss has of a logit at most."""
        if self.settings.get("compile"):
            # Itself and its gradient; where tokens divide what the vocabulary did, both of it too.
            return (2 if self.layout.tp == 1 else 4) * self.number
        # Softmax, its gradient, and that of the logit; under autocast the first and last in half,
        # and the input of the loss besides.
        return 8 + self.number if self._is_autocast else 3 * _FP32

    @property
    def _table(self) -> float:
        """Weights of a table of tokens or of the output that a rank works with."""
        return self.shape.vocabulary * self.shape.width / self.layout.tp

    @property
    def _is_tied(self) -> bool:
        return not isinstance(self.shape, LlamaShape) or self.shape.is_tied

    @property
    def _block(self) -> float:
        """Weights of a block that a rank works with."""
        tables = self._table * (1 if self._is_tied else 2)
        return (self.parameters / self.layout.tp - tables) / self.shape.layers

    def _blocks_here(self) -> float:
        """Count the weights of blocks that are here meanwhile, of all ranks, in the type of use."""
        if not self._is_gathered:
            return 0.0
        all_stay = not self.settings.get("reshard_after_forward", True)
        return self.number * self._block * (self.shape.layers if all_stay else _GATHERED)

    def _weights_at_end(self) -> float:
        """Count what is gathered where the backward pass ends, and gradients not yet shared out.

        These are there in the type of the pass, and once more as they are reduced.
        """
        if not self._is_gathered:
            return 0.0
        both = self.number + (self.number if self._is_stored_as_used else _FP32)
        tied = self.number * 2 * self._table if self._is_tied else 0.0
        return self._blocks_here() + both * _GATHERED * self._block + tied

    def _sum_of_tied(self) -> float:
        """Count what autograd adds a table's gradient as the output to that as the embedding in.

        Both are there at once. The first is a view where nothing was cast, and then the sum is a
        third one.
        """
        if not self._is_tied:
            return 0.0
        stored = 2 if self.settings.get("optimizer_dtype") == "bf16" else _FP32
        return (1 if self._is_autocast else 2) * stored * self._table

    @property
    def _is_stored_as_used(self) -> bool:
        return self.settings.get("optimizer_dtype") == "bf16" or self.number == _FP32

    @property
    def _is_gathered(self) -> bool:
        """Whether FSDP gathers weights: not for tensor parallelism alone, of weights as used."""
        sharded = self.layout.ranks_per_copy * self.layout.dp_replicate > 1
        return self.layout.is_divided and (sharded or not self._is_stored_as_used)
