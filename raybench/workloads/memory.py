"""Workloads that move memory: `memory` (STREAM's kernels on the device) and `host_copy`.

`raybench plan` imports this module, so torch is imported inside the functions that need it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.model import Answer
from raybench.job.point import Precision
from raybench.workloads.base import Context, Workload, WrongResultError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Operation = Literal["copy", "scale", "add", "triad"]
Direction = Literal["h2d", "d2h", "both"]

_SCALAR = 3.0  # STREAM's own
# A value that no source of a copy has.
_NOT_SENT = -1
_CHECKED_AT_A_TIME = 2**24
# How often a result may be rounded: an error of an epsilon of the operands each, at most.
_ROUNDINGS: Mapping[Operation, int] = {"copy": 0, "scale": 1, "add": 1, "triad": 2}
_TIMED_S = 0.1
# Arrays far above the caches. A CPU's are smaller, and it is slower.
_ARRAY_BYTES = {"cuda": 2**30, "cpu": 2**25}


class Memory(Workload):
    """Copies, scales or adds arrays as STREAM does, on each device: memory bandwidth.

    copy: c = a. scale: c = 3 a. add: c = a + b. triad: c = a + 3 b. One kernel a step, without
    temporary arrays. Counted are the bytes read and written, 2 arrays for copy and scale, 3 for
    add and triad (J. D. McCalpin, https://www.cs.virginia.edu/stream/ref.html). With
    world_size > 1 each device does so at the same time, without communication.
    """

    title = "Memory kernels"
    takes_batch_size = False
    answers = (Answer(metric="memory_gb_s"),)
    memory_bytes: int

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
        self.inputs = [
            torch.randn(
                size_bytes // element.itemsize,
                generator=generator,
                dtype=element,
                device=context.device,
            )
            for _ in range(count - 1)
        ]
        self.output = torch.full_like(self.inputs[0], math.nan)
        self._operation, self._rank = operation, context.rank
        self.memory_bytes = count * size_bytes

    def step(self) -> None:
        """Issue the operation once, as one kernel."""
        import torch

        match self._operation:
            case "copy":
                self.output.copy_(self.inputs[0])
            case "scale":
                torch.mul(self.inputs[0], _SCALAR, out=self.output)
            case "add":
                torch.add(*self.inputs, out=self.output)
            case "triad":
                torch.add(*self.inputs, alpha=_SCALAR, out=self.output)

    def check(self) -> None:
        """Compare the last output with float64 arithmetic; then make it NaN until the next step.

        Raises WrongResultError, which names the first element, where more than rounding differs.
        """
        arrays = [self.output, *self.inputs]
        for start in range(0, len(self.output), _CHECKED_AT_A_TIME):
            found, *inputs = (array[start : start + _CHECKED_AT_A_TIME] for array in arrays)
            wrong = _first_wrong(self._operation, found, inputs)
            if wrong is not None:
                raise WrongResultError(
                    f"rank {self._rank}: {self._operation} left a wrong array: element "
                    f"{start + wrong} of {len(self.output)} is {found[wrong].item():g}"
                )
        self.output.fill_(math.nan)


def _first_wrong(operation: Operation, found: Tensor, inputs: list[Tensor]) -> int | None:
    """Return the index of the first element that rounding does not explain; None: all are right.

    found: the output of the operation on `inputs`, all 1-d and of one type.
    """
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


def memory_gb_s(context: Context) -> float | None:
    """Return GB/s (1e9 bytes) of the triad of the workload `memory`, the median of 0.1 s of steps.

    None on the meta device. It needs 3 GiB on a GPU while it runs, and gives them back.
    """
    import torch
    from torch.utils.benchmark import Timer

    size_bytes = _ARRAY_BYTES.get(context.device.type)
    if size_bytes is None:
        return None
    triad = Memory(replace(context, precision=Precision.FP32), size_bytes=size_bytes)
    timer = Timer("step()", globals={"step": triad.step}, num_threads=torch.get_num_threads())
    step_s = timer.blocked_autorange(min_run_time=_TIMED_S).median
    moved = triad.memory_bytes
    # With the timer, which holds it: its memory is for the workload that asks.
    del triad, timer
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    return moved / step_s / 1e9


class HostCopy(Workload):
    """Copies to the device, from it, or both ways at once: bandwidth of the link to the host.

    Counted are the bytes that cross the link; both ways are twice size_bytes. On a CPU worker,
    which has no such link, it copies within the host's memory.
    """

    takes_batch_size = False
    answers = (Answer(metric="memory_gb_s"),)

    def __init__(
        self,
        context: Context,
        *,
        direction: Annotated[
            Direction, Field(description="h2d: to the device. d2h: from it. both: at once.")
        ] = "h2d",
        size_bytes: Annotated[int, Field(gt=0, multiple_of=8, description="Bytes of one copy.")] = 2
        ** 29,
        pinned: Annotated[
            bool, Field(description="Host memory that the device reads by itself.")
        ] = True,
        local_rank: Annotated[
            int | None,
            Field(ge=0, description="The one of each node that copies; none: all at once."),
        ] = None,
    ) -> None:
        import torch

        # Source and target of each; none on a rank that waits.
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._rank, self._direction = context.rank, direction
        ways = ["h2d", "d2h"] if direction == "both" else [direction]
        if local_rank not in (None, context.local_rank):
            ways = []
        self.memory_bytes = len(ways) * size_bytes
        on_gpu = context.device.type == "cuda"
        host = "cpu" if on_gpu else context.device
        for way in ways:
            at_host = torch.empty(
                size_bytes // 8, dtype=torch.int64, device=host, pin_memory=pinned and on_gpu
            )
            at_device = torch.empty_like(at_host, device=context.device, pin_memory=False)
            source, target = (at_host, at_device) if way == "h2d" else (at_device, at_host)
            source.copy_(torch.arange(len(source), device=source.device))
            target.fill_(_NOT_SENT)
            self._copies.append((source, target))
        # Of the second copy, so that both are made at once.
        self._stream: Any = None
        if on_gpu and len(ways) == 2:
            self._stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Issue the copies once; the current stream waits for all of them."""
        import torch

        if self._stream is None:
            for source, target in self._copies:
                target.copy_(source, non_blocking=True)
            return
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        (first_source, first_target), (source, target) = self._copies
        first_target.copy_(first_source, non_blocking=True)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        current.wait_stream(self._stream)

    def check(self) -> None:
        """Raise WrongResultError where other bytes arrived than were sent.

        Otherwise makes the targets wrong until the next step.
        """
        import torch

        for source, target in self._copies:
            if not torch.equal(target.to(source.device), source):
                raise WrongResultError(
                    f"rank {self._rank}: a copy between host and device ({self._direction}) "
                    "arrived with other bytes than were sent"
                )
            target.fill_(_NOT_SENT)
