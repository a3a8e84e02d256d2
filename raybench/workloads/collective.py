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
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

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

# Operations that move only (n - 1) / n of the message, because each of n ranks has 1 / n of it.
# gather and scatter are no workloads, but a training step may contain them.
_DIVIDED_OPERATIONS = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
# Period of the payload, in elements. A prime, so that the check detects data that is shifted by a
# multiple of any usual size.
_PERIOD = 1_048_573
# Distance in the period between the messages of consecutive ranks.
_RANK_STRIDE = 7919
# Largest absolute number in a payload, as far as sums over all ranks stay exact.
_LARGEST_NUMBER = 100


def busbw_factor(kind: str, world_size: int) -> float:
    """Return bus bandwidth / algorithm bandwidth, as nccl-tests defines both.

    Args:
        kind: name of an operation, such as all_reduce or gather; other texts give 1.0.
        world_size: ranks of the group, above 0.
    """
    share_of_others = (world_size - 1) / world_size
    if kind == "all_reduce":
        return 2 * share_of_others
    return share_of_others if kind in _DIVIDED_OPERATIONS else 1.0


def parse_groups(text: str, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks, each ascending, from a text such as "0-3,4-7" or "0+2,1+3".

    Raises:
        UsageError: a group has fewer than 2 ranks, a rank is in two groups, or a rank is not below
            world_size.
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
    all_ranks = [rank for group in groups for rank in group]
    is_too_small = min(map(len, groups)) < 2
    has_duplicates = len(set(all_ranks)) < len(all_ranks)
    if is_too_small or has_duplicates or max(all_ranks) >= world_size:
        raise UsageError(
            f"{rule}, of 2 ranks at least, below world_size {world_size}, given {text!r}"
        )
    return tuple(groups)


def groups_text(groups: tuple[tuple[int, ...], ...]) -> str:
    """Return groups of ascending ranks as text such as "0-3,4+6", the inverse of `parse_groups`."""
    texts = []
    for group in groups:
        is_range = group == tuple(range(group[0], group[-1] + 1))
        texts.append(f"{group[0]}-{group[-1]}" if is_range else "+".join(map(str, group)))
    return ",".join(texts)


class Payload:
    """Random small integers, never zero, that every rank can generate for every other rank.

    All ranks must use the same dtype, world_size and seed. Sums over world_size ranks are exact in
    any dtype and order: up to 127 ranks because the numbers are small, with more ranks (int8,
    bfloat16) because random signs keep sums small.
    """

    # Values of two periods, so that every window of one period is contiguous.
    _values: Tensor

    def __init__(
        self, dtype: torch.dtype, device: torch.device, world_size: int, seed: int
    ) -> None:
        import torch

        # All integers up to this number are exact in the type.
        if dtype.is_floating_point:
            largest_exact = round(2 / torch.finfo(dtype).eps)
        else:
            largest_exact = torch.iinfo(dtype).max
        bound = max(1, min(_LARGEST_NUMBER, largest_exact // world_size))
        # Draw on the host: CUDA's random numbers depend on the model of the device.
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-bound, bound, (_PERIOD,), generator=generator, dtype=torch.int32)
        values[values >= 0] += 1  # no zeros: numbers from -bound to -1, and from 1 to bound
        self._values = values.to(dtype).repeat(2).to(device)

    def fill(self, target: Tensor, rank: int) -> None:
        """Write the message of `rank` into a 1-d tensor of the payload's dtype."""
        for start in range(0, len(target), _PERIOD):
            part = target[start : start + _PERIOD]
            part.copy_(self._message(rank, start, len(part)))

    def first_mismatch(
        self, received: Tensor, ranks: tuple[int, ...], start: int
    ) -> tuple[int, float, float] | None:
        """Return (index, received, expected) of the first wrong element; None if all are right.

        Args:
            received: 1-d, of the payload's dtype and device.
            ranks: the messages of these ranks must add up to `received`.
            start: index in the messages at which `received` begins.
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
        """Return a view of `length` elements, at most a period, of the message of `rank`."""
        first = (start + rank * _RANK_STRIDE) % _PERIOD
        return self._values[first : first + length]


class _ExpectedSum(NamedTuple):
    """A part of an output: the sum of the messages of `ranks` from element `start` on."""

    ranks: tuple[int, ...]
    start: int
    length: int


class _Prepared(NamedTuple):
    """An operation on one rank with its buffers, which are 1-d."""

    input: Tensor
    # The same tensor as `input` if the operation is in place.
    output: Tensor
    issue: Callable[[], object]
    # The consecutive parts of a correct output.
    expected: list[_ExpectedSum]


class Collective(Workload):
    """Does one collective operation: latency of small messages, bandwidth of large ones.

    all_reduce and broadcast are in place, as in torch; other operations are not. Reductions are
    sums.
    """

    title = "Collectives"
    takes_batch_size = takes_precision = False
    answers = (Answer(metric="busbw_gb_s"),)
    # This rank's buffers, 1-d.
    input: Tensor
    output: Tensor
    # Text for `parse_groups`; empty for one group of all ranks.
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
        groups: tuple[tuple[int, ...], ...] = (tuple(range(context.world_size)),)
        if self._groups:
            groups = parse_groups(self._groups, context.world_size)
        is_idle = all(context.rank not in ranks for ranks in groups)
        # An idle rank declares the bytes and the busbw factor of the first group.
        local_ranks, self._index = groups[0], 0
        for ranks in groups:
            if context.rank in ranks:
                local_ranks, self._index = ranks, ranks.index(context.rank)
        group_size = len(local_ranks)
        # None is the group of all ranks. Every rank must make every other group.
        process_group = None
        if len(groups[0]) < context.world_size:
            process_group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])  # type: ignore[no-untyped-call]

        element: torch.dtype = getattr(torch, dtype)
        # The message is divided into so many equal parts of whole elements.
        part_count = group_size if operation in _DIVIDED_OPERATIONS else 1
        unit_bytes = element.itemsize * part_count
        if size_bytes % unit_bytes:
            divisor = f"{element.itemsize} bytes an element"
            divisor += f" x {part_count} ranks" if part_count > 1 else ""
            raise UsageError(
                f"workload collective: {operation} of size_bytes {size_bytes} does not divide into "
                f"{divisor}; give a multiple of {unit_bytes}"
            )

        self.message_bytes = size_bytes
        self.busbw_factor = busbw_factor(operation, group_size)
        self._operation, self._rank, self._group_size = operation, context.rank, group_size
        whole = torch.empty(size_bytes // element.itemsize, dtype=element, device=context.device)
        self.input, self.output, self._issue, self._expected = _prepare(
            operation, whole, self._index, group_size, process_group
        )
        if is_idle:
            self._issue, self._expected = (lambda: None), []
        self._payload = Payload(element, context.device, group_size, context.seed)
        self._fill()

    def step(self) -> None:
        """Issue the operation once. Collective.

        With NCCL only the current stream waits for the operation, not the host.
        """
        self._issue()

    def check(self) -> None:
        """Raise WrongResultError if an element of the last output is not exact. Collective.

        Before the first step and after each check the output has wrong elements, except at the root
        of a broadcast. So a step that does nothing fails the check.
        """
        if self._operation == "all_reduce":
            # The operation is in place, so the last step has reduced sums. Reduce messages instead.
            self._fill()
            self.step()
        position = 0
        for ranks, start, length in self._expected:
            received = self.output[position : position + length]
            mismatch = self._payload.first_mismatch(received, ranks, start)
            if mismatch is not None:
                index, value, expected = mismatch
                raise WrongResultError(
                    f"rank {self._rank}: {self._operation} of {self.message_bytes} bytes left a "
                    f"wrong payload: element {position + index} of "
                    f"{len(self.output)} is {value:g}, not {expected:g}"
                )
            position += length
        self._fill()

    def _fill(self) -> None:
        """Fill the output with a message that no rank sends, then the input with this rank's."""
        # Ranks of the group count from 0, so no rank has this number.
        self._payload.fill(self.output, self._group_size)
        # Input and output of a broadcast are one tensor, whose message only the root knows.
        if self._operation != "broadcast" or self._index == 0:
            self._payload.fill(self.input, self._index)


class GroupedCollective(Collective):
    """Does one collective operation in groups of ranks, all at the same time.

    Bandwidths count one group. If groups differ in size, rank 0's group determines busbw, or the
    first group if rank 0 waits.
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
    """Raise UsageError, which names `workload`, if there is only one rank."""
    if context.world_size < 2:
        raise UsageError(
            f"workload {workload}: needs at least 2 ranks, world_size is {context.world_size}; "
            "raise world_size"
        )


def _prepare(
    operation: Operation,
    whole: Tensor,
    index: int,
    group_size: int,
    process_group: dist.ProcessGroup | None,
) -> _Prepared:
    """Prepare the operation for the rank `index` of a group of `group_size` ranks.

    Args:
        whole: buffer for the whole message, which becomes the input, the output or both.
    """
    import torch
    import torch.distributed as dist

    # torch 2.13 renamed two functions and warns about the old names.
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    ranks, elements = tuple(range(group_size)), len(whole)
    group: dict[str, Any] = {"group": process_group}
    # This rank's part of a message that is divided over the ranks.
    length = elements // group_size
    start = index * length
    # _ExpectedSum(ranks, start, length): `length` elements of the output are the sum of the
    # messages of these ranks, from element `start` on.
    match operation:
        case "all_reduce":
            issue = partial(dist.all_reduce, whole, **group)
            return _Prepared(whole, whole, issue, [_ExpectedSum(ranks, 0, elements)])
        case "broadcast":
            issue = partial(dist.broadcast, whole, group_src=0, **group)
            return _Prepared(whole, whole, issue, [_ExpectedSum((0,), 0, elements)])
        case "all_gather":
            share = whole.new_empty(length)
            issue = partial(all_gather, whole, share, **group)
            expected = [_ExpectedSum((peer,), 0, length) for peer in ranks]
            return _Prepared(share, whole, issue, expected)
        case "reduce_scatter":
            share = whole.new_empty(length)
            issue = partial(reduce_scatter, share, whole, **group)
            return _Prepared(whole, share, issue, [_ExpectedSum(ranks, start, length)])
        case "all_to_all":
            target = torch.empty_like(whole)
            issue = partial(dist.all_to_all_single, target, whole, **group)
            expected = [_ExpectedSum((peer,), start, length) for peer in ranks]
            return _Prepared(whole, target, issue, expected)
        case "sendrecv":
            target = torch.empty_like(whole)
            receiver, sender = (index + 1) % group_size, (index - 1) % group_size
            send = dist.P2POp(dist.isend, whole, group_peer=receiver, **group)
            receive = dist.P2POp(dist.irecv, target, group_peer=sender, **group)
            issue = partial(exchange, [send, receive])
            return _Prepared(whole, target, issue, [_ExpectedSum((sender,), 0, elements)])


def exchange(operations: list[dist.P2POp]) -> None:
    """Issue sends and receives of one group together; the peers must issue their counterparts.

    With NCCL the current stream waits for the messages, with gloo the host.
    """
    import torch.distributed as dist

    for work in dist.batch_isend_irecv(operations):
        work.wait()
