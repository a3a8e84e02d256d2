"""The workload `grouped_collective`: the same operation in groups of ranks at the same time."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raybench.workloads.base import Context
from raybench.workloads.collective import Collective, ElementType, MessageBytes, Operation


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
