"""What ranks send each other, such that every rank can tell what it must receive."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A prime, so that data which lands a multiple of any usual size too far is found out; payloads
# repeat after so many elements, which is also how many are compared at a time.
_PERIOD = 1_048_573
_RANK_STRIDE = 7919
_LARGEST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first wrong element."""

    index: int
    found: float
    expected: float


class Payload:
    """Random small integers, the same on every rank for the same seed; none of them is zero.

    They are so small that sums over all ranks are exact in any dtype and in any order: up to 256
    ranks by their range, and with more (bfloat16) because random signs keep sums below 256.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, world_size: int, seed: int
    ) -> None:
        bound = max(1, min(_LARGEST, _exact_integers(dtype) // world_size))
        # Made on the host: CUDA's random numbers depend on the model of the device.
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-bound, bound, (_PERIOD,), generator=generator, dtype=torch.int32)
        values[values >= 0] += 1
        # Twice, so that every stretch of a period lies in one piece.
        self._values = values.to(dtype).repeat(2).to(device)

    def fill(self, target: Tensor, rank: int) -> None:
        """Write what `rank` sends, from its first element on, into a tensor of one dimension."""
        for start, part in _stretches(target):
            part.copy_(self._part(rank, start, len(part)))

    def first_mismatch(
        self, received: Tensor, ranks: tuple[int, ...], start: int
    ) -> Mismatch | None:
        """Where `received` is not the sum of what `ranks` send from element `start` on."""
        for offset, part in _stretches(received):
            expected = self._part(ranks[0], start + offset, len(part)).clone()
            for rank in ranks[1:]:
                expected += self._part(rank, start + offset, len(part))
            if not torch.equal(part, expected):
                index = int((part != expected).nonzero()[0])
                return Mismatch(
                    index=offset + index,
                    found=part[index].item(),
                    expected=expected[index].item(),
                )
        return None

    def _part(self, rank: int, start: int, length: int) -> Tensor:
        first = (start + rank * _RANK_STRIDE) % _PERIOD
        return self._values[first : first + length]


def _stretches(tensor: Tensor) -> list[tuple[int, Tensor]]:
    """Pieces of at most a period, each with where it starts."""
    return [(start, tensor[start : start + _PERIOD]) for start in range(0, len(tensor), _PERIOD)]


def _exact_integers(dtype: torch.dtype) -> int:
    """Up to which all integers are exact."""
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).max
    return round(2 / torch.finfo(dtype).eps)
