"""Estimates of a rank's memory in a step of training, from the settings of a point alone.

Closed formulas, without torch: `plan` asks them. They are those of eager steps on a CUDA device, by
what torch 2.11 keeps for the backward pass. A step needs most memory where the backward pass
begins, where it ends, or in the optimizer; the estimate is the largest of the three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raybench.job.memory import MemoryParts
from raybench.job.point import EQUAL, Precision
from raybench.workloads.training.layout import Layout
from raybench.workloads.training.shapes import LANGUAGE_PRESETS, LanguageShape, LlamaShape

# cuBLAS and cuBLASLt take 32 MiB each on Hopper.
_WORKSPACES = 64 * 2**20
# As multiples of the weights: Adam's two moments, and temporaries of its update of all weights.
_MOMENTS = {"sgd": 0, "adam": 2, "adamw": 2}
_TEMPORARIES = {"sgd": 0, "adam": 1, "adamw": 1}
# Blocks whose weights FSDP has gathered at a time: the one that runs, and the next.
_GATHERED = 2
_FP32 = 4

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Bytes that a step needs beside parameters, gradients and the optimizer's state.

    saved: kept by the forward pass for the backward pass. at_loss: in addition where the backward
    pass begins. at_end: in addition to the gradients where it ends. data: inputs of all passes.
    """

    saved: float
    at_loss: float
    at_end: float = 0.0
    data: float


def estimate_stack(settings: Settings, hidden: int, layers: int) -> MemoryParts | None:
    """Estimate linear layers of hidden x hidden with ReLU between.

    None where nothing is trained, in a CUDA graph, compiled, or where ranks have unequal shares.
    """
    if not _is_estimated(settings) or settings.get("compile"):
        return None
    parameters = layers * (hidden * hidden + hidden)
    number, rows = _product_bytes(settings), float(settings["batch_size"])
    # Each layer keeps its input, and autocast its weights in half.
    inputs = rows * hidden * number * (layers if number == 2 else layers - 1)
    casts = 2.0 * parameters if number == 2 else 0.0
    step = _Step(
        saved=inputs + casts,
        at_loss=rows * hidden * (8 + number),
        data=8.0 * rows * hidden * settings.get("grad_accumulation", 1),
    )
    return _estimate(settings, float(_FP32 * parameters), step)


def estimate_rows(settings: Settings, features: int) -> MemoryParts | None:
    """Estimate one linear layer to a single number, whose data set is all that takes memory."""
    if not _is_estimated(settings) or settings.get("compile"):
        return None
    rows = settings["rows"] if settings["data"] == "device" else settings["batch_size"]
    step = _Step(saved=0.0, at_loss=0.0, data=4.0 * rows * (features + 1))
    return _estimate(settings, float(_FP32 * (features + 1)), step)


# Parameters, and how many numbers all convolutions make of one image of 224 x 224 pixels.
_RESNETS = {"resnet18": (11_689_512, 2_483_712), "resnet50": (25_557_032, 11_113_984)}


def estimate_resnet(settings: Settings) -> MemoryParts | None:
    """Estimate a residual network of torchvision; None as `estimate_stack`."""
    if not _is_estimated(settings) or settings.get("compile"):
        return None
    parameters, outputs = _RESNETS[settings["preset"]]
    images, size = float(settings["batch_size"]), settings["image_size"]
    number = _product_bytes(settings)
    # Each convolution's output, and what the norm behind it makes of that.
    saved = 2.0 * number * images * outputs * (size / 224) ** 2
    pixels = 3.0 * images * size**2
    if number == 2:
        saved += 2.0 * (parameters + pixels)
    data = 4.0 * pixels * settings.get("grad_accumulation", 1)
    step = _Step(saved=saved, at_loss=0.0, data=data)
    return _estimate(settings, float(_FP32 * parameters), step)


def estimate_language_model(settings: Settings) -> MemoryParts | None:
    """Estimate a transformer; None as `estimate_stack`.

    Also None where a model is compiled as a whole: what is kept then is the compiler's choice.
    """
    if not _is_estimated(settings):
        return None
    model = _LanguageModel.make(settings)
    by_block = isinstance(model.shape, LlamaShape) or model.layout.is_divided
    if model.is_compiled and not by_block:
        return None
    parts = model.layout.ranks_per_copy * model.layout.tp
    return _estimate(
        settings,
        model.stored * model.parameters / parts,
        model.step(),
        is_divided=model.layout.is_divided,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LanguageModel:
    """A language model as a point trains it.

    Bytes of a number: number of what matrix products read, residual of the hidden state between
    blocks, stored of a weight in the optimizer. checkpointing: none, selective or full.
    """

    settings: Settings
    shape: LanguageShape
    layout: Layout
    parameters: int
    number: int
    residual: int
    stored: int
    checkpointing: str

    @classmethod
    def make(cls, settings: Settings) -> _LanguageModel:
        """Read the settings of a point."""
        shape = LANGUAGE_PRESETS[settings["preset"]]
        shape = replace(shape, layers=settings.get("layers") or shape.layers)
        layout = Layout.make(settings["world_size"], settings)
        number = _product_bytes(settings)
        is_stored_half = settings.get("optimizer_dtype") == "bf16"
        given = settings["activation_checkpointing"]
        return cls(
            settings=settings,
            shape=shape,
            layout=layout,
            parameters=shape.parameter_count(settings["seq_len"]),
            number=number,
            # Under autocast additions are in fp32, unless weights are stored or gathered in half.
            residual=number if is_stored_half or layout.is_divided else _FP32,
            stored=2 if is_stored_half else _FP32,
            checkpointing=str({False: "none", True: "full"}.get(given, given)),
        )

    @property
    def is_compiled(self) -> bool:
        """Whether the blocks are compiled."""
        return bool(self.settings.get("compile"))

    @property
    def is_autocast(self) -> bool:
        """Whether autocast makes copies of weights and inputs in half."""
        return self.number == 2 and self.residual == _FP32

    @property
    def is_gathered(self) -> bool:
        """Whether FSDP gathers weights: not for tensor parallelism alone, of weights as used."""
        sharded = self.layout.ranks_per_copy * self.layout.dp_replicate > 1
        return self.layout.is_divided and (sharded or self.stored != self.number)

    @property
    def table(self) -> float:
        """Weights of the token embedding, or of the output layer, that a rank works with."""
        return self.shape.vocabulary * self.shape.width / self.layout.tp

    @property
    def block(self) -> float:
        """Weights of a block that a rank works with."""
        tables = self.table * (1 if self.shape.is_tied else 2)
        return (self.parameters / self.layout.tp - tables) / self.shape.layers

    @property
    def gathered_blocks(self) -> float:
        """Bytes of gathered weights of blocks, of all ranks, that are there at a time."""
        if not self.is_gathered:
            return 0.0
        all_stay = not self.settings.get("reshard_after_forward", True)
        return self.number * self.block * (self.shape.layers if all_stay else _GATHERED)

    def step(self) -> _Step:
        """Return what a step needs."""
        shape, tp = self.shape, self.layout.tp
        # Tokens of one pass, of this rank and those that divide its products with it.
        tokens = float(self.settings["batch_size"] * self.settings["seq_len"]) / self.layout.cp
        # The last norm, and the input of the logits.
        saved = tokens * shape.width * (self.residual / tp + self.number)
        saved += shape.layers * tokens * self._saved_by_block() + self.gathered_blocks
        if self.is_autocast:
            # Copies of weights in half; where blocks are computed again, of the last layer alone.
            whole = self.checkpointing == "none"
            saved += 2.0 * (self.parameters if whole else shape.vocabulary * shape.width)
        if self.is_gathered:
            # The last layer stays until the backward pass has been through it.
            saved += self.number * self.table
        return _Step(
            saved=saved,
            at_loss=tokens / tp * shape.vocabulary * self._bytes_of_logit(),
            at_end=max(tokens * self._needed_by_block() + self._weights_at_end(), self._tied_sum()),
            data=16.0 * tokens * self.settings.get("grad_accumulation", 1),
        )

    def _saved_by_block(self) -> float:
        """Return the bytes of a token that a block keeps from the forward to the backward pass."""
        if self.checkpointing == "none":
            return self._needed_by_block()
        entry = self.residual * self.shape.width / self.layout.tp
        if self.checkpointing == "full":
            return entry
        # Attention's output, and every second product.
        if not isinstance(self.shape, LlamaShape):
            return entry + 8 * self.number * self.shape.width
        queries, keys = self._queries_and_keys()
        # Compiled, what no gradient needs is not kept: the last product.
        last = 0 if self.is_compiled else self.shape.width
        kept = 2 * queries + keys + self.shape.hidden + last
        return entry + self.number * kept / self.layout.tp

    def _needed_by_block(self) -> float:
        """Return the bytes of a token that the backward pass of a block reads."""
        shape, number, tp = self.shape, self.number, self.layout.tp
        norms = 2 * self.residual * shape.width / tp
        if not isinstance(shape, LlamaShape):
            # Query, key and value, attention's output, both sides of GELU; inputs of products.
            return norms + 14 * number * shape.width
        queries, keys = self._queries_and_keys()
        # In context parallelism each rank has keys and values of all, for each head of queries.
        attention = 2 * queries + 2 * (queries * self.layout.cp if self.layout.cp > 1 else keys)
        if self.is_compiled:
            # What is cheap is computed again: norms, the product of gate and up. Not where a block
            # ends its forward pass before the backward pass begins: what both read is kept, unless
            # it is in float8.
            is_kept = self.checkpointing == "none" and self.settings["precision"] != "float8"
            kept = 3 * shape.width + shape.hidden if is_kept else 0
            return norms + number * (attention + 2 * shape.hidden + kept) / tp
        # Autocast casts the input of each product by itself: three of attention, two of the MLP.
        inputs = (5 if self.is_autocast else 2) * shape.width
        return norms + number * (inputs + (attention + 4 * shape.hidden) / tp)

    def _queries_and_keys(self) -> tuple[int, int]:
        """Return the width of all heads of queries, and of all heads of keys."""
        shape = self.shape
        return shape.heads * shape.head_width, shape.kv_heads * shape.head_width

    def _bytes_of_logit(self) -> int:
        """Return the bytes that the loss needs for a logit at most."""
        if self.is_compiled:
            # Itself and its gradient; where tokens divide what the vocabulary did, both of it too.
            return (2 if self.layout.tp == 1 else 4) * self.number
        # Softmax, its gradient, and that of the logit; under autocast the first and last in half,
        # and the input of the loss besides.
        return 8 + self.number if self.is_autocast else 3 * _FP32

    def _weights_at_end(self) -> float:
        """Return the bytes of gathered weights, and of gradients not yet reduced, at the end.

        Of the backward pass. The gradients are there as computed, and once more as reduced.
        """
        if not self.is_gathered:
            return 0.0
        both = self.number + (self.number if self.stored == self.number else _FP32)
        tied = self.number * 2 * self.table if self.shape.is_tied else 0.0
        return self.gathered_blocks + both * _GATHERED * self.block + tied

    def _tied_sum(self) -> float:
        """Return the bytes in which autograd adds up the two gradients of a tied table.

        Those as the output layer and as the embedding are there at once. The first is a view where
        nothing was cast, and then the sum is a third one.
        """
        if not self.shape.is_tied:
            return 0.0
        return (1 if self.is_autocast else 2) * self.stored * self.table


def _is_estimated(settings: Settings) -> bool:
    """Return whether the formulas hold: training of equal ranks, without a CUDA graph."""
    is_even = settings.get("shares", EQUAL) == EQUAL and settings.get("slow_ratio", 1) == 1
    return settings.get("mode", "train") == "train" and is_even and not settings.get("cuda_graph")


def _product_bytes(settings: Settings) -> int:
    """Return the bytes of a number that matrix products keep: 2 in half precision, else 4."""
    return 4 if Precision(settings["precision"]).dtype == "float32" else 2


def _estimate(
    settings: Settings, weights: float, step: _Step, *, is_divided: bool = False
) -> MemoryParts:
    """Return the parts where a step needs most.

    weights: bytes of what this rank has of them. is_divided: not replicated by DDP.
    """
    has_buckets = settings["world_size"] > 1 and not is_divided
    optimizer = settings.get("optimizer", "adam")
    # Gradients that are views of DDP's buckets have no memory of their own.
    gradients = 0.0 if has_buckets and settings.get("gradient_as_bucket_view") else weights
    temporaries = 0.0 if settings.get("fused_optimizer") else _TEMPORARIES[optimizer] * weights
    # The gradients of earlier passes are there in the next one.
    before = gradients if settings.get("grad_accumulation", 1) > 1 else 0.0
    largest, gradients_then = max(
        (step.saved + step.at_loss + before, before),
        (step.at_end + gradients, gradients),
        (temporaries + gradients, gradients),
    )
    return MemoryParts(
        parameters=weights,
        gradients=gradients_then,
        optimizer=_MOMENTS[optimizer] * weights,
        activations=largest - gradients_then,
        other=step.data + _WORKSPACES + (weights if has_buckets else 0.0),
    )
