"""What the memory of a step of training is made of when it is largest, from settings alone.

Closed formulas, without torch: `plan` asks them. They are those of eager steps on a CUDA device, by
what torch 2.11 keeps for the backward pass. A step is largest where the backward pass begins, where
it ends, or in the optimizer, whichever needs most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raybench.job.memory import MemoryParts
from raybench.job.point import EQUAL

# cuBLAS and cuBLASLt take 32 MiB each on Hopper.
_WORKSPACES = 64 * 2**20
# What is kept for the backward pass of a product in float8 is in bf16, too.
_HALVES = ("fp16", "bf16", "float8")
# Beside the weights: Adam's two moments, and what its update of all weights at once adds.
_MOMENTS = {"sgd": 0, "adam": 2, "adamw": 2}
_TEMPORARIES = {"sgd": 0, "adam": 1, "adamw": 1}

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
