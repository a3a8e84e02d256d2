"""Kernels of attention, with the log-sum-exp of each query over its keys, to merge parts by.

They are torch's own. Shapes: query (1, heads, queries, head), key and value (1, heads, keys,
head); output as query; log-sum-exp (1, heads, queries), natural, in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import torch
import torch.compiler.config
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from raybench.errors import UsageError

Kernel = Literal["flash", "efficient", "cudnn", "math"]
KernelOrAuto = Literal["auto", "flash", "efficient", "cudnn", "math"]
Part: TypeAlias = tuple[Tensor, Tensor]
Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Part]

# As torch._fused_sdp_choice numbers them.
_CHOICES: dict[int, Kernel] = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}


def choose_kernel(asked: KernelOrAuto, tokens: Tensor) -> Kernel:
    """Return the kernel that is asked for; for auto the one that torch takes for such tokens.

    tokens: (1, heads, tokens, head), used as query, key and value; only shape, type and device
    count. Raises UsageError for efficient and cudnn on a CPU.
    """
    if asked == "auto":
        return _CHOICES[torch._fused_sdp_choice(tokens, tokens, tokens)]
    _check_device(asked, tokens.device)
    return asked


def use_kernel(asked: KernelOrAuto, device: torch.device) -> None:
    """Make torch's attention use this kernel from now on, in this process; auto changes nothing.

    Compiled code and recomputed activations use it too; code compiled for another kernel is not
    taken from torch's cache. Does nothing on the meta device. Raises UsageError for efficient and
    cudnn on a CPU.
    """
    if device.type == "meta":
        return
    # Else torch.compile takes code from its cache on disk that was compiled for another kernel
    # (pytorch#185449).
    torch.compiler.config.cache_key_tag = f"{asked} of {torch._C._get_sdp_priority_order()}"
    if asked == "auto":
        return
    _check_device(asked, device)
    switches = {
        "flash": torch.backends.cuda.enable_flash_sdp,
        "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
        "cudnn": torch.backends.cuda.enable_cudnn_sdp,
        "math": torch.backends.cuda.enable_math_sdp,
    }
    for name, switch in switches.items():
        switch(name == asked)


def _check_device(asked: Kernel, device: torch.device) -> None:
    """Raise UsageError for efficient and cudnn on a CPU."""
    if device.type == "cpu" and asked in ("efficient", "cudnn"):
        raise UsageError(f"attention {asked} is for CUDA devices; on a CPU take flash or math")


def attend(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the output of attention by this kernel, not causal; on the meta device by math.

    Shapes as this module has them.
    """
    if kernel == "math" or query.device.type == "meta":
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(query, key, value)
    return attention_part(kernel)(query, key, value)[0]


def attention_part(kernel: Kernel) -> Attention:
    """Return a function of query, key and value that returns the output and the log-sum-exp.

    Not causal; shapes as this module has them. Raises UsageError for math, which computes no
    log-sum-exp.
    """
    aten = torch.ops.aten

    def flash(query: Tensor, key: Tensor, value: Tensor) -> Part:
        if query.device.type == "cpu":
            found = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        else:
            found = aten._scaled_dot_product_flash_attention(query, key, value)
        return found[0], found[1]

    def efficient(query: Tensor, key: Tensor, value: Tensor) -> Part:
        found = aten._scaled_dot_product_efficient_attention(query, key, value, None, True)
        # The kernel fills the queries up to a multiple of 32.
        return found[0], found[1][..., : query.shape[2]]

    def cudnn(query: Tensor, key: Tensor, value: Tensor) -> Part:
        found = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
        return found[0], found[1].reshape(query.shape[:3])

    parts: dict[str, Attention] = {"flash": flash, "efficient": efficient, "cudnn": cudnn}
    if kernel not in parts:
        raise UsageError(f"attention {kernel} gives no log-sum-exp to merge parts by; take flash")
    return parts[kernel]


def merge(parts: Iterable[Part]) -> Tensor:
    """Return the output of attention over all keys, in the type of the parts.

    parts: output and log-sum-exp over a part of the keys each, one at least; each is used as soon
    as it comes. The result is the mean of the outputs with weights exp(logsumexp of the part -
    logsumexp of all), computed in fp32 at least.
    """
    remaining = iter(parts)
    out, logsumexp = next(remaining)
    dtype = out.dtype
    merged = out.to(torch.promote_types(dtype, torch.float32))
    for part, part_logsumexp in remaining:
        # The new part's share of the sum of both: exp(b) / (exp(a) + exp(b)).
        share = torch.sigmoid(part_logsumexp - logsumexp).unsqueeze(-1)
        merged = torch.lerp(merged, part.to(merged.dtype), share.to(merged.dtype))
        logsumexp = torch.logaddexp(logsumexp, part_logsumexp)
    return merged.to(dtype)
