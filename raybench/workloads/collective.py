"""The workloads `collective` and `grouped_collective`: torch.distributed, timed as by nccl-tests.

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

`raybench plan` imports this module, so torch is imported inside the functions that need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.answer import Answer
from raybench.workloads.base import Context, Workload, WrongResultError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor


Operation = Annotated[
    Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv"],
    Field(description="What the ranks do together; sendrecv is a ring."),
]
MessageBytes = Annotated[
    int, Field(gt=0, description="Message size in bytes, as nccl-tests counts it.")
]
ElementType = Annotated[
    Literal["float32", "float64", "float16", "bfloat16", "int8", "int32", "int64"],
    Field(description="Type of the elements."),
]

# Each of n ranks already has 1 / n of the message. gather and scatter are not timed alone.
_IN_SHARES = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
# The payload repeats after so many elements, and so many are compared at a time. A prime, so that
# data which lands a multiple of any usual size too far is found out.
_PERIOD = 1_048_573
_RANK_STRIDE = 7919
_LARGEST = 100


def busbw_factor(kind: str, world_size: int) -> float:
    """Return bus bandwidth / algorithm bandwidth (busbw / algbw), as nccl-tests defines both.

    kind: an operation of this module's table, gather or scatter; 1.0 for any other text, also for
    all_gather_into_tensor. world_size: ranks of the group, above 0.
    """
    share = (world_size - 1) / world_size
    if kind == "all_reduce":
        return 2 * share
    return share if kind in _IN_SHARES else 1.0


def parse_groups(text: str, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that a text such as "0-3,4-7" or "0+2,1+3" names, in its order.

    Each group is ascending. Raises UsageError where the text is empty or malformed, a group has
    fewer than 2 ranks, a rank is named twice, or a rank is not below world_size.
    """
    rule = "groups: must be disjoint groups of ranks, as in 0-3,4-7 or 0+2,1+3"
    groups: list[tuple[int, ...]] = []
    for part in text.split(","):
        ranks = [int(number) for number in re.findall(r"\d+", part)]
        if re.fullmatch(r"\s*\d+(\+\d+)+\s*", part):
            groups.append(tuple(sorted(ranks)))
        elif re.fullmatch(r"\s*\d+-\d+\s*", part):
            groups.append(tuple(range(ranks[0], min(ranks[1], world_size) + 1)))
        else:
            raise UsageError(f"{rule}, given {text!r}")
    named = [rank for group in groups for rank in group]
    too_small = min(map(len, groups)) < 2
    if too_small or len(set(named)) < len(named) or max(named) >= world_size:
        raise UsageError(
            f"{rule}, of 2 ranks at least, below world_size {world_size}, given {text!r}"
        )
    return tuple(groups)


def groups_text(groups: tuple[tuple[int, ...], ...]) -> str:
    """Return one or more groups, each of 2 or more ascending ranks, as text such as "0-3,4+6"."""
    return ",".join(
        f"{group[0]}-{group[-1]}"
        if list(group) == list(range(group[0], group[-1] + 1))
        else "+".join(map(str, group))
        for group in groups
    )


class Payload:
    """Random small integers that every rank can generate for every other rank; never zero.

    They depend on the sending rank, the position, and dtype, world_size and seed, which all ranks
    must give alike. Sums over world_size ranks are exact in any dtype and order: up to 127 ranks by
    the range of the numbers, with more (int8, bfloat16) because random signs keep sums small.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, world_size: int, seed: int
    ) -> None:
        import torch

        # All integers up to here are exact in the type.
        exact = (
            round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
        )
        bound = max(1, min(_LARGEST, exact // world_size))
        # Made on the host: CUDA's random numbers depend on the model of the device.
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-bound, bound, (_PERIOD,), generator=generator, dtype=torch.int32)
        values[values >= 0] += 1
        # Twice, so that every stretch of a period lies in one piece.
        self._values = values.to(dtype).repeat(2).to(device)

    def fill(self, target: Tensor, rank: int) -> None:
        """Write the message of `rank`, from element 0 on, into a 1-d tensor of the dtype."""
        for start in range(0, len(target), _PERIOD):
            part = target[start : start + _PERIOD]
            part.copy_(self._message(rank, start, len(part)))

    def first_mismatch(
        self, received: Tensor, ranks: tuple[int, ...], start: int
    ) -> tuple[int, float, float] | None:
        """Return (index in received, found, expected) of the first wrong element; None if none is.

        received: 1-d, of the payload's dtype and device; its element 0 is element `start` of
        the messages of `ranks`, one or more, whose sum is expected. Waits for the device.
        """
        import torch

        for offset in range(0, len(received), _PERIOD):
            part = received[offset : offset + _PERIOD]
            expected = self._message(ranks[0], start + offset, len(part)).clone()
            for rank in ranks[1:]:
                expected += self._message(rank, start + offset, len(part))
            if not torch.equal(part, expected):
                index = int((part != expected).nonzero()[0])
                return offset + index, part[index].item(), expected[index].item()
        return None

    def _message(self, rank: int, start: int, length: int) -> Tensor:
        """Return a view of so many elements, at most a period, of the message of `rank`."""
        first = (start + rank * _RANK_STRIDE) % _PERIOD
        return self._values[first : first + length]


class Collective(Workload):
    """Does one collective operation: latency of small messages, bandwidth of large ones.

    all_reduce and broadcast are in place, as torch has them; others are not. Reductions are sums.
    """

    title = "Collectives"
    takes_batch_size = takes_precision = False
    answers = (Answer(metric="busbw_gb_s"),)
    # This rank's buffers, 1-d.
    input: Tensor
    output: Tensor
    # As `parse_groups` reads them; empty for one group of all ranks.
    _groups = ""

    def __init__(
        self,
        context: Context,
        *,
        operation: Operation = "all_reduce",
        size_bytes: MessageBytes = 2**26,
        dtype: ElementType = "float32",
    ) -> None:
        import torch
        import torch.distributed as dist

        check_ranks(context, "collective")
        # This rank's place in its group, and its size. Group None stands for all ranks.
        self._place, size, group, is_idle = context.rank, context.world_size, None, False
        if self._groups:
            groups = parse_groups(self._groups, context.world_size)
            # Every rank makes every group, whether it is in it or not. That of all is there.
            if len(groups[0]) < context.world_size:
                group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])  # type: ignore[no-untyped-call]
            own = next((ranks for ranks in groups if context.rank in ranks), None)
            is_idle = own is None
            # A rank that waits declares what those of the first group do.
            self._place, size = (own.index(context.rank), len(own)) if own else (0, len(groups[0]))
        element: torch.dtype = getattr(torch, dtype)
        shares = size if operation in _IN_SHARES else 1
        unit = element.itemsize * shares
        if size_bytes % unit:
            each = f"{element.itemsize} bytes an element"
            each += f" x {shares} ranks" if shares > 1 else ""
            raise UsageError(
                f"workload collective: {operation} of size_bytes {size_bytes} does not divide into "
                f"{each}; give a multiple of {unit}"
            )
        self.message_bytes = size_bytes
        self.busbw_factor = busbw_factor(operation, size)
        self._operation, self._rank, self._size = operation, context.rank, size
        whole = torch.empty(size_bytes // element.itemsize, dtype=element, device=context.device)
        self.input, self.output, self._issue, self._expected = _prepare(
            operation, whole, self._place, size, group
        )
        if is_idle:
            self._issue, self._expected = (lambda: None), []
        self._payload = Payload(element, context.device, size, context.seed)
        self._fill()

    def step(self) -> None:
        """Issue the operation once; with NCCL only the current stream waits for it, not the host.

        All ranks must call it.
        """
        self._issue()

    def check(self) -> None:
        """Raise WrongResultError if an element of the last output is not exact.

        An all_reduce is first done once more, on a buffer filled anew: all ranks must call it. The
        output is wrong before the first step, and after a check until the next step, except at the
        root of a broadcast. A rank in no group checks nothing.
        """
        if self._operation == "all_reduce":
            self._fill()
            self.step()
        position = 0
        for ranks, start, length in self._expected:
            received = self.output[position : position + length]
            wrong = self._payload.first_mismatch(received, ranks, start)
            if wrong is not None:
                index, found, expected = wrong
                raise WrongResultError(
                    f"rank {self._rank}: {self._operation} of {self.message_bytes} bytes left a "
                    f"wrong payload: element {position + index} of "
                    f"{len(self.output)} is {found:g}, not {expected:g}"
                )
            position += length
        self._fill()

    def _fill(self) -> None:
        """Fill the input with this rank's message, and the output with one that no rank sends."""
        self._payload.fill(self.output, self._size)
        if self._operation != "broadcast" or self._place == 0:
            self._payload.fill(self.input, self._place)


class GroupedCollective(Collective):
    """Does one collective operation in groups of ranks, all at the same time.

    With one group of all ranks it is `collective`. Bandwidths are of one group; where sizes differ,
    busbw is by that of rank 0's group, or of the first if rank 0 waits.
    """

    def __init__(
        self,
        context: Context,
        *,
        operation: Operation = "all_reduce",
        size_bytes: MessageBytes = 2**26,
        dtype: ElementType = "float32",
        groups: Annotated[
            str,
            Field(
                description="Ranks that do it together, as in 0-3,4-7 or 0+2,1+3; ranks not named "
                "wait. Empty: all ranks."
            ),
        ] = "",
    ) -> None:
        self._groups = groups
        super().__init__(context, operation=operation, size_bytes=size_bytes, dtype=dtype)


def check_ranks(context: Context, workload: str) -> None:
    """Raise UsageError for a single rank. workload: its name, for the message."""
    if context.world_size < 2:
        raise UsageError(
            f"workload {workload}: needs at least 2 ranks, world_size is {context.world_size}; "
            "raise world_size"
        )


def _prepare(
    operation: Operation,
    whole: Tensor,
    place: int,
    size: int,
    process_group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Callable[[], object], list[tuple[tuple[int, ...], int, int]]]:
    """Return an operation on this rank: its input, its output, how to issue it, what is expected.

    The input and output are 1-d, and the same tensor where it works in place; `whole` becomes that
    one which holds the whole message. To issue it is a `step`, and waits as that.
    Expected: (ranks, start, length) of each part of the output, in order: a part of `length`
    elements is the sum of the messages of `ranks` from their element `start` on.

    place, size: of this rank in its group. process_group: None for all ranks.
    """
    import torch
    import torch.distributed as dist

    # Torch 2.13 gave two of them another name and warns of the older one.
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    ranks, elements = tuple(range(size)), len(whole)
    group: dict[str, Any] = {"group": process_group}
    length = elements // size
    start = place * length
    match operation:
        case "all_reduce":
            issue = partial(dist.all_reduce, whole, **group)
            return whole, whole, issue, [(ranks, 0, elements)]
        case "broadcast":
            issue = partial(dist.broadcast, whole, group_src=0, **group)
            return whole, whole, issue, [((0,), 0, elements)]
        case "all_gather":
            share = whole.new_empty(length)
            issue = partial(all_gather, whole, share, **group)
            return share, whole, issue, [((peer,), 0, length) for peer in ranks]
        case "reduce_scatter":
            share = whole.new_empty(length)
            issue = partial(reduce_scatter, share, whole, **group)
            return whole, share, issue, [(ranks, start, length)]
        case "all_to_all":
            target = torch.empty_like(whole)
            issue = partial(dist.all_to_all_single, target, whole, **group)
            return whole, target, issue, [((peer,), start, length) for peer in ranks]
        case "sendrecv":
            target = torch.empty_like(whole)
            following, preceding = ((place + step) % size for step in (1, -1))
            send = dist.P2POp(dist.isend, whole, group_peer=following, **group)
            receive = dist.P2POp(dist.irecv, target, group_peer=preceding, **group)
            issue = partial(exchange, [send, receive])
            return whole, target, issue, [((preceding,), 0, elements)]


def exchange(operations: list[dist.P2POp]) -> None:
    """Issue these sends and receives together; the current stream, with gloo the host, waits.

    At least one, all of one group. The peers must call it too, with the operations that match.
    """
    import torch.distributed as dist

    for work in dist.batch_isend_irecv(operations):
        work.wait()
