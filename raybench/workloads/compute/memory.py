"""The workload `memory`: the four operations of STREAM on each device's memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.answer import Answer
from raybench.job.point import Precision
from raybench.workloads.base import Context, Workload, WrongResultError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

Operation = Literal["copy", "scale", "add", "triad"]

_SCALAR = 3.0  # STREAM's own
_CHECKED_AT_A_TIME = 2**24
# How often a result may be rounded: an error of an epsilon of the operands each, at most.
_ROUNDINGS: Mapping[Operation, int] = {"copy": 0, "scale": 1, "add": 1, "triad": 2}


class Memory(Workload):
    """Copies, scales or adds arrays as STREAM does, on each device: memory bandwidth.

    copy: c = a. scale: c = 3 a. add: c = a + b. triad: c = a + 3 b. One kernel a step, without
    temporary arrays. Counted are the bytes read and written, 2 arrays for copy and scale, 3 for
    add and triad (J. D. McCalpin, https://www.cs.virginia.edu/stream/ref.html). With
    world_size > 1 each device does so at the same time, without communication.
    """

    takes_batch_size = False
    answers = (Answer(metric="memory_gb_s"),)

    def __init__(
        self,
        context: Context,
        *,
        operation: Annotated[
            Operation, Field(description="c = a, c = 3 a, c = a + b, or c = a + 3 b.")
        ] = "triad",
        size_bytes: Annotated[
            int,
            Field(gt=0, description="Bytes of each array; well above the caches, or it is theirs."),
        ] = 2**28,
        dtype: Annotated[
            Literal["float32", "float64", "float16", "bfloat16"],
            Field(description="Type of the elements."),
        ] = "float32",
    ) -> None:
        # `raybench plan` reads this signature and must not pay for importing torch.
        import torch

        element: torch.dtype = getattr(torch, dtype)
        if context.precision is not Precision.FP32:
            raise UsageError(
                f"workload memory: precision {context.precision} means nothing to it; "
                "leave precision out and give dtype"
            )
        if size_bytes % element.itemsize:
            raise UsageError(
                f"workload memory: size_bytes {size_bytes} does not divide into elements of "
                f"{element.itemsize} bytes; give a multiple of {element.itemsize}"
            )
        generator = context.generator()
        count = 2 if operation in ("copy", "scale") else 3
        self._inputs = [
            torch.randn(
                size_bytes // element.itemsize,
                generator=generator,
                dtype=element,
                device=context.device,
            )
            for _ in range(count - 1)
        ]
        self._output = torch.full_like(self._inputs[0], math.nan)
        self._operation, self._rank = operation, context.rank
        self._compute = _computing(operation, self._inputs, self._output)
        self.memory_bytes = count * size_bytes

    def step(self) -> None:
        """Issue the operation once."""
        self._compute()

    def check(self) -> None:
        """Compare the last output with float64 arithmetic; then make it wrong for the next check.

        Raises WrongResultError.
        """
        arrays = [self._output, *self._inputs]
        for start in range(0, len(self._output), _CHECKED_AT_A_TIME):
            found, *inputs = (array[start : start + _CHECKED_AT_A_TIME] for array in arrays)
            wrong = _first_wrong(self._operation, found, inputs)
            if wrong is not None:
                raise WrongResultError(
                    f"rank {self._rank}: {self._operation} left a wrong array: element "
                    f"{start + wrong} of {len(self._output)} is {found[wrong].item():g}"
                )
        self._output.fill_(math.nan)


def _computing(operation: Operation, inputs: list[Tensor], out: Tensor) -> Callable[[], object]:
    from functools import partial

    import torch

    match operation:
        case "copy":
            return partial(out.copy_, inputs[0])
        case "scale":
            return partial(torch.mul, inputs[0], _SCALAR, out=out)
        case "add":
            return partial(torch.add, *inputs, out=out)
        case "triad":
            return partial(torch.add, *inputs, alpha=_SCALAR, out=out)


def _first_wrong(operation: Operation, found: Tensor, inputs: list[Tensor]) -> int | None:
    import torch

    factor = _SCALAR if operation in ("scale", "triad") else 1.0
    *summands, scaled = [array.double() for array in inputs]
    exact = scaled * factor
    size = exact.abs()
    for array in summands:
        exact, size = exact + array, size + array.abs()
    allowed = size * torch.finfo(found.dtype).eps * _ROUNDINGS[operation]
    # Negated: an element that is not a number must fail too.
    is_wrong = ~((found.double() - exact).abs() <= allowed)
    return int(is_wrong.nonzero()[0]) if bool(is_wrong.any()) else None
