"""What each collective issues, what it must leave behind, and how nccl-tests counts it.

| operation | message: `size_bytes` of | input | output | busbw / algbw |
|---|---|---|---|---|
| all_reduce | the buffer | whole | whole | 2 (n - 1) / n |
| all_gather | the output | share | whole | (n - 1) / n |
| reduce_scatter | the input | whole | share | (n - 1) / n |
| all_to_all | the input | whole | whole | (n - 1) / n |
| broadcast | the buffer | whole, of rank 0 | whole | 1 |
| sendrecv | what each rank sends | whole | whole | 1 |

n is the number of ranks, a share 1 / n of the message. sendrecv is a ring: each rank sends to the
next one. Sources: doc/PERFORMANCE.md and, for sendrecv, src/sendrecv.cu of
https://github.com/NVIDIA/nccl-tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from raybench.workloads.communication.collective import Operation

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
        # Up to here all integers are exact.
        largest = (
            round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
        )
        bound = max(1, min(_LARGEST, largest // world_size))
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


# In torch. NCCL itself reduces and broadcasts out of place too.
ALWAYS_IN_PLACE = frozenset({"all_reduce", "broadcast"})
# Nor in nccl-tests, which times them in place but does not check what arrives.
NEVER_IN_PLACE = frozenset({"all_to_all", "sendrecv"})
# Of n ranks one has 1 / n of the message already. gather and scatter are not timed alone.
_IN_SHARES = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
_SUMS = frozenset({"all_reduce", "reduce_scatter"})

# Torch 2.13 gave both another name and warns of the older ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def busbw_factor(kind: str, world_size: int) -> float:
    """Compute busbw / algbw, which makes bandwidths of all rank counts comparable with hardware.

    kind: an operation of the table, or another collective as torch names it.
    """
    share = (world_size - 1) / world_size
    if kind == "all_reduce":
        return 2 * share
    return share if kind in _IN_SHARES else 1.0


def shares(operation: Operation, world_size: int) -> int:
    """Into how many equal parts a message is split."""
    return world_size if operation in _IN_SHARES else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of an output: the sum over `ranks` of their inputs from element `start` on."""

    ranks: tuple[int, ...]
    start: int
    length: int


def output_expected(
    operation: Operation, elements: int, rank: int, world_size: int
) -> list[Segment]:
    """List the segments of the output of `rank`, for a message of `elements` elements."""
    share, everyone = elements // world_size, range(world_size)
    match operation:
        case "all_reduce":
            return [Segment(ranks=tuple(everyone), start=0, length=elements)]
        case "reduce_scatter":
            return [Segment(ranks=tuple(everyone), start=rank * share, length=share)]
        case "all_gather":
            return [Segment(ranks=(peer,), start=0, length=share) for peer in everyone]
        case "all_to_all":
            return [Segment(ranks=(peer,), start=rank * share, length=share) for peer in everyone]
        case "broadcast":
            return [Segment(ranks=(0,), start=0, length=elements)]
        case "sendrecv":
            return [Segment(ranks=((rank - 1) % world_size,), start=0, length=elements)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """One rank's input and output, of one dimension; in place one lies inside the other."""

    input: Tensor
    output: Tensor


def allocate(
    operation: Operation,
    whole: Tensor,
    rank: int,
    world_size: int,
    *,
    in_place: bool,
) -> Buffers:
    """Make the buffers of an operation whose message is as long as `whole`, one of them."""
    share = len(whole) // world_size
    own = whole[rank * share : (rank + 1) * share]
    if operation in ALWAYS_IN_PLACE:
        return Buffers(input=whole, output=whole)
    if operation == "all_gather":
        return Buffers(input=own if in_place else torch.empty_like(own), output=whole)
    if operation == "reduce_scatter":
        return Buffers(input=whole, output=own if in_place else torch.empty_like(own))
    return Buffers(input=whole, output=torch.empty_like(whole))


def grows(operation: Operation, *, in_place: bool) -> bool:
    """Whether its next call finds the sums of the last one in its input."""
    return operation in _SUMS and (in_place or operation in ALWAYS_IN_PLACE)


def issuer(
    operation: Operation,
    buffers: Buffers,
    rank: int,
    world_size: int,
    group: dist.ProcessGroup | None = None,
) -> Callable[[], object]:
    """Return what issues the operation; the current stream waits for it, the host does not.

    rank, world_size: in the group, where one is given.
    """
    match operation:
        case "all_reduce":
            return partial(dist.all_reduce, buffers.output, group=group)
        case "broadcast":
            return partial(dist.broadcast, buffers.output, group=group, group_src=0)
        case "all_gather":
            return partial(_all_gather, buffers.output, buffers.input, group=group)
        case "reduce_scatter":
            return partial(_reduce_scatter, buffers.output, buffers.input, group=group)
        case "all_to_all":
            return partial(dist.all_to_all_single, buffers.output, buffers.input, group=group)
        case "sendrecv":
            following, preceding = (rank + 1) % world_size, (rank - 1) % world_size
            send = dist.P2POp(dist.isend, buffers.input, group=group, group_peer=following)
            receive = dist.P2POp(dist.irecv, buffers.output, group=group, group_peer=preceding)
            return partial(exchange, [send, receive])


def exchange(operations: list[dist.P2POp]) -> None:
    """Send and receive all of these at once, and wait for them."""
    for work in dist.batch_isend_irecv(operations):
        work.wait()
