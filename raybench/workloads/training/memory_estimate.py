"""Coarse estimates of a rank's memory in a step of training, from the settings of a point alone.

Closed formulas, without torch: `plan` asks them. They are those of steps on a CUDA device.
Measured points lie within a quarter of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raybench.job.point import EQUAL, Precision
from raybench.workloads.training.layout import Layout
from raybench.workloads.training.shapes import LANGUAGE_PRESETS, LlamaShape

# cuBLAS and cuBLASLt take 32 MiB each on Hopper.
_WORKSPACES = 64 * 2**20
# Parameters, and how many numbers all convolutions make of one image of 224 x 224 pixels.
_RESNETS = {"resnet18": (11_689_512, 2_483_712), "resnet50": (25_557_032, 11_113_984)}

Settings = Mapping[str, Any]


def estimate_stack(settings: Settings, hidden: int, layers: int) -> float | None:
    """Return the bytes for linear layers of hidden x hidden; None as `_estimate_step`."""
    parameters = layers * (hidden * hidden + hidden)
    rows, number = float(settings["batch_size"]), _product_bytes(settings)
    return _estimate_step(
        settings,
        parameters=parameters,
        # Each layer keeps its input, and autocast its weights in half.
        saved=rows * hidden * number * layers + (2.0 * parameters if number == 2 else 0.0),
        at_loss=rows * hidden * (8 + number),
        data=8.0 * rows * hidden * settings["grad_accumulation"],
    )


def estimate_resnet(settings: Settings) -> float | None:
    """Return the bytes for a residual network of torchvision; None as `_estimate_step`."""
    parameters, outputs = _RESNETS[settings["preset"]]
    images, size = float(settings["batch_size"]), settings["image_size"]
    return _estimate_step(
        settings,
        parameters=parameters,
        # Each convolution's output, and that of the normalisation behind it.
        saved=2.0 * _product_bytes(settings) * images * outputs * (size / 224) ** 2,
        data=12.0 * images * size**2 * settings["grad_accumulation"],
    )


def estimate_language_model(settings: Settings) -> float | None:
    """Return the bytes for a transformer; None as `_estimate_step`."""
    shape = LANGUAGE_PRESETS[settings["preset"]]
    shape = replace(shape, layers=settings.get("layers") or shape.layers)
    layout = Layout.make(settings["world_size"], settings)
    parameters, number = shape.parameter_count(settings["seq_len"]), _product_bytes(settings)
    # Under autocast additions are in fp32 and weights are copied, unless they are stored or
    # gathered in half.
    is_autocast = number == 2 and settings["optimizer_dtype"] == "fp32" and not layout.is_divided
    residual = 4 if is_autocast else number
    is_compiled = bool(settings["compile"])
    tokens = float(settings["batch_size"] * settings["seq_len"]) / (layout.cp * layout.tp)
    if isinstance(shape, LlamaShape):
        # Query, key, value and attention's output, inputs of products, and SwiGLU, of which
        # compiled code computes two of four parts again.
        heads = 2 * (shape.heads + shape.kv_heads) * shape.head_width
        in_block = heads + 2 * shape.width + (2 if is_compiled else 4) * shape.hidden
    else:
        # Query, key, value, attention's output, inputs of products, both sides of GELU.
        in_block = 14 * shape.width
    # Bytes of a token that a block's backward pass reads, and those that are kept until then.
    needed = 2 * residual * shape.width + number * in_block
    entry = float(residual * shape.width)
    kept_by_checkpointing: dict[object, float] = {
        **dict.fromkeys((False, "none"), needed),
        "selective": needed / 2,
        **dict.fromkeys((True, "full"), entry),
    }
    kept = kept_by_checkpointing[settings["activation_checkpointing"]]
    return _estimate_step(
        settings,
        parameters=parameters,
        ranks=layout.ranks_per_copy * layout.tp,
        saved=shape.layers * tokens * kept + (2.0 * parameters if is_autocast else 0.0),
        # The logits or their gradient; and, where code is not compiled, softmax and its gradient in
        # fp32.
        at_loss=tokens * shape.vocabulary * (2 * number if is_compiled else 8 + number),
        recomputed=tokens * needed,
        data=16.0 * tokens * settings["grad_accumulation"],
    )


def _estimate_step(
    settings: Settings,
    *,
    parameters: int,
    ranks: int = 1,
    saved: float,
    at_loss: float = 0.0,
    recomputed: float = 0.0,
    data: float,
) -> float | None:
    """Return the bytes that a rank needs at the peak of a step.

    The peak is where the backward pass begins, where it ends, or in the optimizer. None where
    nothing is trained, in a CUDA graph, and where ranks have unequal shares.

    parameters: of the model, which so many `ranks` share. In bytes: saved by the forward pass for
    the backward pass; needed at the loss besides; of a block that is recomputed; of all inputs.
    """
    is_even = settings["shares"] == EQUAL and settings["slow_ratio"] == 1
    if settings["mode"] != "train" or settings["cuda_graph"] or not is_even:
        return None
    weights = (2.0 if settings.get("optimizer_dtype") == "bf16" else 4.0) * parameters / ranks
    is_adam = settings.get("optimizer", "adam") != "sgd"
    # Gradients that are views of DDP's buckets have no memory of their own.
    buckets = weights if settings["world_size"] > 1 and ranks == 1 else 0.0
    gradients = 0.0 if buckets and settings.get("gradient_as_bucket_view") else weights
    # Adam's update of all weights at once makes temporaries as large as they are.
    temporaries = weights if is_adam and not settings.get("fused_optimizer") else 0.0
    earlier_passes = gradients if settings["grad_accumulation"] > 1 else 0.0
    peak = max(saved + at_loss + earlier_passes, gradients + max(recomputed, temporaries))
    return weights * (3 if is_adam else 1) + buckets + peak + data + _WORKSPACES


def _product_bytes(settings: Settings) -> int:
    """Return the bytes of a number that matrix products keep: 2 in half precision, else 4."""
    return 4 if Precision(settings["precision"]).dtype == "float32" else 2
