"""The precision modes: which switches of torch each one sets, and which are in effect.

| mode | fp32 matmul, convolution and RNN outside autocast | autocast |
|---|---|---|
| fp32 | IEEE single precision | none |
| tf32 | TF32 | none |
| fp16 | IEEE single precision | float16 |
| bf16 | IEEE single precision | bfloat16 |
| float8 | IEEE single precision | bfloat16 |

So each mode differs from fp32 in one thing only; float8 also in the layers that the workload
converts (`convert_linear_layers`). (Torch's own default has TF32 on in cuDNN.)
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import backends, nn

from raybench.errors import UsageError
from raybench.job.point import Precision

# Of CUDA devices whose tensor cores have products in 8 bits: Ada, Hopper, and later ones.
_LEAST_FLOAT8_CAPABILITY = (8, 9)
_FLOAT8_NEEDS = "precision float8 needs a CUDA device of compute capability 8.9 or later"


def apply(precision: Precision) -> None:
    """Set every TF32 switch of torch in this process: on for tf32, off for all other precisions."""
    tf32 = precision is Precision.TF32
    # Torch keeps an older and a newer set of switches for the same thing and raises when it
    # reads an old one that differs from the new one, as torch.compile does in places
    # (pytorch#166387, pytorch#179445). So both are set, the old first: they write new ones too.
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    backends.cudnn.allow_tf32 = tf32
    mode = "tf32" if tf32 else "ieee"
    backends.fp32_precision = mode  # type: ignore[attr-defined]
    backends.cudnn.fp32_precision = mode
    for switch in _switches():
        switch.fp32_precision = mode


def effective() -> str:
    """Return the arithmetic of fp32 tensors outside autocast: "fp32", "tf32", or "mixed".

    mixed: matrix multiplication, convolution and RNN disagree. It is read from torch's switches and
    from NVIDIA_TF32_OVERRIDE=0, which switches TF32 off below torch (cuBLAS, cuDNN).
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return Precision.FP32
    modes = {switch.fp32_precision == "tf32" for switch in _switches()}
    if len(modes) > 1:
        return "mixed"
    return Precision.TF32 if modes.pop() else Precision.FP32


def why_not_supported(precision: Precision, device: torch.device) -> str | None:
    """Return a sentence where the device has no TF32, or emulates bfloat16; None where it has both.

    For a warning: the point runs all the same. None for all precisions but tf32 and bf16; where the
    device has no float8, `convert_linear_layers` raises.
    """
    # TF32 came with Ampere, compute capability 8.0.
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if precision is Precision.TF32 and not has_tf32:
        return f"precision tf32 asked, but {_name(device)} has no TF32: the numbers are fp32's"
    if (
        precision is Precision.BF16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return f"precision bf16 asked, but {_name(device)} emulates bfloat16"
    return None


def convert_linear_layers(model: nn.Module, device: torch.device, *, emulate: bool = False) -> None:
    """Let all linear layers of the model multiply in float8, by torchao; in place.

    As torchtitan trains: inputs, weights and gradients are scaled by the largest number of each
    tensor (torchao's recipe `tensorwise`), and the products are in bf16. Nothing on the meta
    device. emulate: multiply in fp32 numbers that are rounded to float8, on any device. Raises
    UsageError where the device has no products in float8, and where torchao cannot be imported.
    """
    if device.type == "meta":
        return
    if not emulate and device.type != "cuda":
        raise UsageError(f"{_FLOAT8_NEEDS}, given a CPU; take bf16")
    if (
        not emulate
        and (found := torch.cuda.get_device_capability(device)) < _LEAST_FLOAT8_CAPABILITY
    ):
        raise UsageError(
            f"{_FLOAT8_NEEDS}, given {_name(device)} of {found[0]}.{found[1]}; take bf16"
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UsageError(f"precision float8: torchao cannot be imported: {error}") from error

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=emulate))


def _switches() -> tuple[Any, ...]:
    cudnn: Any = backends.cudnn  # `conv` and `rnn` are missing from torch's types
    return (backends.cuda.matmul, cudnn.conv, cudnn.rnn)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
