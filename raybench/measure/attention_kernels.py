"""Which of torch's attention kernels a step runs, of those that scaled_dot_product_attention takes.

Torch chooses by device, shapes, mask and its own settings, so that the same job may run another
kernel elsewhere, at another speed. Seen is what the step calls: also from compiled code, from
operators of one's own, and in the backward pass. Not seen is what is made of other operators:
FlexAttention, and `math` where torch.compile takes it apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import profiler_legacy

from raybench.measure.timing import Step

_autograd: Any = torch._C._autograd  # much of it is missing from torch's types
_NAMES = {
    "flash": (
        "aten::_flash_attention_forward",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "efficient": (
        "aten::_efficient_attention_forward",
        "aten::_scaled_dot_product_efficient_attention",
    ),
    "cudnn": ("aten::_cudnn_attention_forward", "aten::_scaled_dot_product_cudnn_attention"),
    "math": ("aten::_scaled_dot_product_attention_math",),
}


def attention_kernels(step: Step) -> tuple[str, ...]:
    """Run a step, and name the kernels of attention in it; empty where none was seen.

    By the profiler that notes operators on the host alone: once CUPTI was in use, later launches of
    the process stay slower (pytorch#144455).
    """
    _autograd._enable_profiler_legacy(profiler_legacy.profile().config())  # type: ignore[no-untyped-call]
    try:
        step()
    finally:
        threads = _autograd._disable_profiler_legacy()
    called = {event.name() for events in threads for event in events}
    return tuple(kernel for kernel, names in _NAMES.items() if not called.isdisjoint(names))
