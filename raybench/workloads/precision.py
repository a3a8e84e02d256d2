"""The precision modes: which switches of torch each one sets, and which are in effect.

| mode | fp32 matmul, convolution and RNN outside autocast | autocast |
|---|---|---|
| fp32 | IEEE single precision | none |
| tf32 | TF32 | none |
| fp16 | IEEE single precision | float16 |
| bf16 | IEEE single precision | bfloat16 |
| float8 | IEEE single precision | bfloat16 |

So each mode differs from fp32 in one thing only; float8 also in the layers that the workload
converts (`float8`). (Torch's own default has TF32 on in cuDNN.)
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import backends

from raybench.job.point import Precision
from raybench.workloads.base import Context

_WITHOUT_AUTOCAST = (Precision.FP32, Precision.TF32)


def apply(precision: Precision) -> None:
    """Set every TF32 switch of this process as the precision asks."""
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
    """Read the arithmetic of fp32 tensors outside autocast: fp32, tf32, or mixed.

    Mixed: matrix multiplication, convolution and RNN disagree. Read from torch's switches and
    NVIDIA_TF32_OVERRIDE=0, which switches TF32 off below torch (cuBLAS, cuDNN).
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return Precision.FP32
    modes = {switch.fp32_precision == "tf32" for switch in _switches()}
    if len(modes) > 1:
        return "mixed"
    return Precision.TF32 if modes.pop() else Precision.FP32


def why_not_supported(precision: Precision, device: torch.device) -> str | None:
    """Why the device cannot do what the precision asks, in one sentence; None when it can."""
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


def autocast(context: Context) -> AbstractContextManager[object]:
    """Enter what a forward pass and its loss run in: autocast for fp16 and bf16, else nothing.

    Nothing on the meta device, for which torch has no autocast.
    """
    if context.precision in _WITHOUT_AUTOCAST or context.device.type == "meta":
        return nullcontext()
    return torch.autocast(context.device.type, dtype=getattr(torch, context.precision.dtype))


def _switches() -> tuple[Any, ...]:
    cudnn: Any = backends.cudnn  # `conv` and `rnn` are missing from torch's types
    return (backends.cuda.matmul, cudnn.conv, cudnn.rnn)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
