"""The workload `collective`: one operation of torch.distributed, as nccl-tests times it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.answer import Answer
from raybench.job.point import Precision
from raybench.workloads.base import Context, Workload, WrongResultError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


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


class Collective(Workload):
    """Does one collective operation: latency of small messages, bandwidth of large ones.

    Torch reduces and broadcasts in place only, and exchanges (all_to_all, sendrecv) out of place
    only; asking for the other is an error. A reduction adds up.
    """

    takes_batch_size = False
    answers = (Answer(metric="busbw_gb_s"),)

    def __init__(
        self,
        context: Context,
        *,
        operation: Operation = "all_reduce",
        size_bytes: MessageBytes = 2**26,
        dtype: ElementType = "float32",
        in_place: Annotated[
            bool | None,
            Field(
                description="Input inside the output (all_gather) or the other way round "
                "(reduce_scatter). none: all_reduce and broadcast in place, the others not."
            ),
        ] = None,
    ) -> None:
        self.prepare(context, operation, size_bytes, dtype, in_place, "")

    def prepare(
        self,
        context: Context,
        operation: Operation,
        size_bytes: int,
        dtype: str,
        in_place: bool | None,
        groups: str,
    ) -> None:
        """Make buffers and payload; `grouped_collective` has groups."""
        # Here: `raybench plan` imports this module and must not pay for importing torch.
        import torch

        from raybench.workloads.communication import collective_operations as operations
        from raybench.workloads.communication.collective_operations import Payload

        if context.world_size < 2:
            raise UsageError(
                f"workload collective: needs at least 2 ranks, world_size is {context.world_size}; "
                "raise world_size"
            )
        if context.precision is not Precision.FP32:
            raise UsageError(
                f"workload collective: precision {context.precision} means nothing to a message; "
                "leave precision out and give dtype"
            )
        _check_place(operation, in_place)
        place = _place(context, groups)
        rank, world_size = place.rank, place.size
        element: torch.dtype = getattr(torch, dtype)
        elements = _elements(operation, size_bytes, element, world_size)
        self.message_bytes = size_bytes
        self.busbw_factor = operations.busbw_factor(operation, world_size)
        self._operation, self._rank, self._world_size = operation, context.rank, world_size
        self._buffers = operations.allocate(
            operation,
            torch.empty(elements, dtype=element, device=context.device),
            rank,
            world_size,
            in_place=bool(in_place),
        )
        self._expected = operations.output_expected(operation, elements, rank, world_size)
        self._grows = operations.grows(operation, in_place=bool(in_place))
        self._payload = Payload(element, context.device, world_size, context.seed)
        self._rank_in_group = rank
        self._issue = operations.issuer(operation, self._buffers, rank, world_size, place.group)
        if place.is_idle:
            self._expected, self._issue = [], lambda: None
        self._fill()

    def step(self) -> None:
        """Issue the operation once."""
        self._issue()

    def check(self) -> None:
        """Compare the output with what the inputs of all ranks must give, exactly.

        The output is the one that the steps so far have left, except of a sum in place: each of
        its steps adds to the sums of the last, so it is filled anew and done once more. Raises
        WrongResultError. All ranks must call it at the same place.
        """
        if self._grows:
            self._fill()
            self._issue()
        position = 0
        for segment in self._expected:
            received = self._buffers.output[position : position + segment.length]
            wrong = self._payload.first_mismatch(received, segment.ranks, segment.start)
            if wrong is not None:
                raise WrongResultError(
                    f"rank {self._rank}: {self._operation} of {self.message_bytes} bytes left a "
                    f"wrong payload: element {position + wrong.index} of "
                    f"{len(self._buffers.output)} is {wrong.found:g}, not {wrong.expected:g}"
                )
            position += segment.length
        self._fill()

    def _fill(self) -> None:
        """Fill the inputs as before, and the output with what is wrong until a step writes it."""
        nobody = self._world_size
        self._payload.fill(self._buffers.output, nobody)
        if self._operation != "broadcast" or self._rank_in_group == 0:
            self._payload.fill(self._buffers.input, self._rank_in_group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where this rank stands among those that it communicates with. group: None for all ranks."""

    rank: int
    size: int
    group: ProcessGroup | None = None
    is_idle: bool = False


def _place(context: Context, groups: str) -> _Place:
    """Form the groups, on all ranks alike. Raises UsageError."""
    if not groups:
        return _Place(rank=context.rank, size=context.world_size)
    import torch.distributed as dist

    from raybench.workloads.communication.pairings import parse_groups

    found = _Place(rank=0, size=2, is_idle=True)
    for members in parse_groups(groups, context.world_size):
        # Every rank makes every group, whether it is in it or not. That of all is there already.
        is_whole = len(members) == context.world_size
        group = None if is_whole else dist.new_group(list(members))
        if context.rank in members:
            found = _Place(rank=members.index(context.rank), size=len(members), group=group)
    return found


def _check_place(operation: Operation, in_place: bool | None) -> None:
    from raybench.workloads.communication.collective_operations import (
        ALWAYS_IN_PLACE,
        NEVER_IN_PLACE,
    )

    refused = (in_place is False and operation in ALWAYS_IN_PLACE) or (
        in_place is True and operation in NEVER_IN_PLACE
    )
    if refused:
        only = "out of place" if in_place else "in place"
        raise UsageError(
            f"workload collective: torch does {operation} {only} only; leave in_place out"
        )


def _elements(operation: Operation, size_bytes: int, dtype: torch.dtype, world_size: int) -> int:
    """Elements of a message. Raises UsageError when it does not divide into equal shares."""
    from raybench.workloads.communication.collective_operations import shares

    count = shares(operation, world_size)
    unit = dtype.itemsize * count
    if size_bytes % unit:
        each = f"{dtype.itemsize} bytes an element"
        each += f" x {count} ranks" if count > 1 else ""
        raise UsageError(
            f"workload collective: {operation} of size_bytes {size_bytes} does not divide into "
            f"{each}; give a multiple of {unit}"
        )
    return size_bytes // dtype.itemsize


class GroupedCollective(Collective):
    """Does one collective operation in groups of ranks, all at the same time.

    With one group of all ranks it is `collective`. Bandwidths are of each group by itself.
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
        self.prepare(context, operation, size_bytes, dtype, None, groups)
