"""Causal attention over sequences whose tokens are divided over ranks (context parallel).

Each rank gathers the keys and values of all, as Llama 3 was trained (Grattafiori et al. 2024,
3.3.2), by torch's functional collectives. Torch's own `context_parallel` takes the place of
attention for kernels of CUDA alone (torch 2.11, 2.13), so what it computes could not be held on
CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional

# Types that FlashAttention takes.
_HALVES = (torch.float16, torch.bfloat16)


def take_part(whole: Tensor, dim: int, degree: int, place: int) -> Tensor:
    """Take a rank's tokens of all, which are that dimension: of 2 x degree chunks an early one.

    And the one as far from the end, so that all ranks have the same work: causally, the tokens of
    a late chunk see more.
    """
    if degree == 1:
        return whole
    chunks = whole.chunk(2 * degree, dim=dim)
    return torch.cat([chunks[place], chunks[-1 - place]], dim=dim)


def takes_flash(device: torch.device) -> bool:
    """Whether FlashAttention may be taken on the device, and can be: from Ampere on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """The rank at that place of a group in which each has its part of a sequence.

    takes_flash: as the function.
    """

    degree: int
    place: int
    group: ProcessGroup
    takes_flash: bool

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Take this rank's tokens of all, which are that dimension."""
        return take_part(whole, dim, self.degree, self.place)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Let each token here see itself and those before, of all ranks.

        query (batch, heads, tokens here, head), keys and values of fewer heads.
        """
        keys, values = self._gather(key), self._gather(value)
        shared = query.shape[1] // key.shape[1]
        early, late = query.chunk(2, dim=2)
        parts = []
        for chunk, number in ((early, self.place), (late, 2 * self.degree - 1 - self.place)):
            seen = (number + 1) * chunk.shape[2]
            parts.append(
                self._attend_to_the_last(
                    chunk,
                    keys[:, :, :seen].repeat_interleave(shared, dim=1),
                    values[:, :, :seen].repeat_interleave(shared, dim=1),
                )
            )
        return torch.cat(parts, dim=2)

    def _attend_to_the_last(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Let the last query see all keys, the one before it all but one, and so on.

        As torch's `causal_lower_right`, an object that torch.compile cannot make: it would leave
        the block as it is.
        """
        if self.takes_flash and query.dtype in _HALVES:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            out: Tensor = flash(query, key, value, dropout_p=0.0, is_causal=True)[0]
            return out
        queries, keys = query.shape[2], key.shape[2]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        mask = seen.tril(diagonal=keys - queries)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def _gather(self, own: Tensor) -> Tensor:
        """Gather (batch, heads, tokens here, head) of all ranks, in the order of the sequence."""
        gathered: Any = collectives.all_gather_tensor_autograd(
            own.contiguous(), gather_dim=2, group=self.group
        )
        chunks = gathered.chunk(2 * self.degree, dim=2)
        # Of each rank an early one and a late one.
        return torch.cat([*chunks[::2], *chunks[::-2]], dim=2)
