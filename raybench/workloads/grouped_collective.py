"""The workload `grouped_collective`: the same operation in groups of ranks at the same time."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raybench.workloads.base import Context
from raybench.workloads.collective import Collective, Operation


class GroupedCollective(Collective):
    """Does one collective operation in groups of ranks, all at the same time.

    With one group of all ranks it is `collective`. Bandwidths are of each group by itself.
    """

    def __init__(
        self,
        context: Context,
        *,
        operation: Annotated[
            Operation, Field(description="What the ranks do together; sendrecv is a ring.")
        ] = "all_reduce",
        size_bytes: Annotated[
            int, Field(gt=0, description="Message size in bytes, as nccl-tests counts it.")
        ] = 2**26,
        dtype: Annotated[
            Literal["float32", "float64", "float16", "bfloat16", "int8", "int32", "int64"],
            Field(description="Type of the elements."),
        ] = "float32",
        groups: Annotated[
            str,
            Field(
                description="Ranks that do it together, as in 0-3,4-7 or 0+2,1+3; ranks not named "
                "wait. Empty: all ranks."
            ),
        ] = "",
    ) -> None:
        self.prepare(context, operation, size_bytes, dtype, None, groups)
