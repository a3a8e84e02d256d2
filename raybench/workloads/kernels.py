"""Workloads that run one kernel or copy on each device: products, launches, memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from raybench.conversion import BYTES_PER_GB, GIB, MIB
from raybench.errors import UsageError
from raybench.job.answer import Answer
from raybench.job.point import Precision
from raybench.records.metrics import Metric
from raybench.workloads.base import Context, Workload, WrongResultError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Limits for the largest error of an element, in standard deviations of an element (sqrt(k)).
# Rounding a result of 5 standard deviations costs 0.002 in fp16 and 0.02 in bf16. tf32 has an error
# of 1e-3, so the limit of fp32 detects tf32.
_TOLERANCES = {
    Precision.FP32: 1e-4,
    Precision.TF32: 1e-2,
    Precision.FP16: 1e-2,
    Precision.BF16: 5e-2,
}


class Gemm(Workload):
    """Multiplies two matrices, (m, k) by (k, n), on each device: TFLOP/s.

    precision is the number format: fp32 (IEEE) and tf32 multiply float32 tensors, fp16 and bf16
    multiply tensors of that type, without autocast. With world_size > 1 all devices multiply at the
    same time, without communication.
    """

    title = "Matrix products"
    takes_batch_size = False
    answers = (Answer(metric="achieved_tflops_per_device"),)

    def __init__(
        self,
        context: Context,
        *,
        m: Annotated[int, Field(gt=0, description="Rows of the first matrix.")] = 8192,
        n: Annotated[int, Field(gt=0, description="Columns of the second matrix.")] = 8192,
        k: Annotated[int, Field(gt=0, description="Columns of the first, rows of the second.")] = (
            8192
        ),
    ) -> None:
        import torch

        dtype = getattr(torch, context.precision.dtype)
        # Random numbers: zeros need less power, so the clocks would be higher.
        options = {"generator": context.generator(), "dtype": dtype, "device": context.device}
        self.first = torch.randn(m, k, **options)
        self.second = torch.randn(k, n, **options)
        self.product = torch.full((m, n), torch.nan, dtype=dtype, device=context.device)
        self._context = context
        self.flops_per_step = 2.0 * m * n * k

    def step(self) -> None:
        """Issue the product once."""
        import torch

        torch.matmul(self.first, self.second, out=self.product)

    def check(self) -> None:
        """Raise WrongResultError if the last product is wrong by more than rounding.

        The product is NaN before the first step and after each check.
        """
        import torch

        # Compute 64 random rows and columns, always the same, in float64.
        rows, columns = (
            torch.randint(size, (64,), generator=torch.Generator().manual_seed(size))
            for size in self.product.shape
        )
        exact = self.first[rows].double() @ self.second[:, columns].double()
        sampled = self.product[rows][:, columns].double()
        # An element is the sum of k products of standard normal numbers.
        standard_deviation = len(self.second) ** 0.5
        error = float((sampled - exact).abs().max()) / standard_deviation
        allowed = _TOLERANCES[self._context.precision]
        # Not `error > allowed`, so that NaN fails, too.
        if not error <= allowed:
            raise WrongResultError(
                f"rank {self._context.rank}: the product in {self._context.precision} is off by "
                f"{error:.2g} standard deviations of an element; rounding explains {allowed:g}"
            )
        self.product.fill_(torch.nan)


class SameBits(Workload):
    """Multiplies the same two matrices on each device, and digests the bits of the product.

    Devices of one model with the same libraries compute the same bits, so a device that differs
    sometimes computes wrong results. Differences raise no error; the metrics show them.
    """

    takes_batch_size = False
    metrics = (
        Metric(name="digest", description="48-bit hash of the product's bytes", over_ranks="max"),
        Metric(
            name="changed_products",
            description="checks that found other bits than the first",
            over_ranks="sum",
        ),
        Metric(
            name="misplaced_products",
            description="checks whose product had other bits in other rows",
            over_ranks="sum",
        ),
    )

    def __init__(
        self,
        context: Context,
        *,
        size: Annotated[int, Field(gt=0, description="Rows and columns of each matrix.")] = 2048,
    ) -> None:
        import torch

        dtype = getattr(torch, context.precision.dtype)
        # Draw on the host: CUDA's random numbers depend on the model of the device.
        generator = torch.Generator().manual_seed(context.seed)
        self._first, self._second = (
            torch.randn(size, size, generator=generator).to(context.device, dtype) for _ in range(2)
        )
        self.product = torch.empty_like(self._first)
        self.flops_per_step = 2.0 * size**3
        self.digest: int | None = None
        self.changed_products = self.misplaced_products = 0

    def step(self) -> None:
        """Issue the product once."""
        import torch

        torch.matmul(self._first, self._second, out=self.product)

    def check(self) -> None:
        """Update the metrics from the last product, and set the product to 0.

        `digest` keeps its first value.
        """
        import torch

        # Multiply again with the rows in other positions, and move the rows of the product back.
        half = len(self._first) // 2
        moved_product = torch.matmul(self._first.roll(half, 0), self._second)
        self.misplaced_products += not torch.equal(moved_product.roll(-half, 0), self.product)
        digest = digest_of(self.product)
        if self.digest is None:
            self.digest = digest
        self.changed_products += digest != self.digest
        self.product.zero_()


def digest_of(tensor: Tensor) -> int:
    """Return a 48-bit hash of the bytes of the elements; waits for the device."""
    import torch

    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest())


class Launch(Workload):
    """Adds 1 to one number on each device: what the launch of a kernel costs.

    wait: false: launches queue up, and a step is the time between two launches. wait: true: each
    step waits for its result, and is the time from a launch until the host knows the result. With
    world_size > 1 all devices do this at the same time, without communication.
    """

    takes_batch_size = takes_precision = False
    answers = (Answer(metric="step_ms_p50", best="min"),)

    def __init__(
        self,
        context: Context,
        *,
        wait: Annotated[bool, Field(description="Wait for the result in every step.")] = False,
    ) -> None:
        import torch

        if wait and context.cuda_graph:
            raise UsageError(
                "workload launch: wait: true cannot be had with cuda_graph: true, whose steps may "
                "not wait for the device; leave one of them out"
            )
        self.number = torch.zeros(1, dtype=torch.int64, device=context.device)
        self._wait = torch.cuda.synchronize if wait and context.device.type == "cuda" else None
        self._rank = context.rank
        # A replay of a CUDA graph does not run `step`, so the host cannot count steps.
        self._counts_steps = not context.cuda_graph
        self._steps = 0

    def step(self) -> None:
        """Launch the kernel once; with `wait`, wait for its result."""
        self.number.add_(1)
        self._steps += 1
        if self._wait is not None:
            self._wait()

    def check(self) -> None:
        """Raise WrongResultError if the number on the device is not the count of steps.

        With cuda_graph this never raises, because the host does not count replayed steps.
        """
        number = int(self.number)
        if self._counts_steps and number != self._steps:
            raise WrongResultError(
                f"rank {self._rank}: {self._steps} additions of 1 came to {number}"
            )


Operation = Literal["copy", "scale", "add", "triad"]
Direction = Literal["h2d", "d2h", "both"]

_SCALAR = 3.0  # as in STREAM
# Sentinel: no source of a copy has this value.
_NOT_SENT = -1
# Elements that are checked at a time. Small blocks keep the temporary arrays in the cache of a CPU;
# on a GPU each block costs several launches.
_CHECKED_ON_CPU, _CHECKED_ON_GPU = 2**16, 2**24
# How often a result is rounded, each time by at most an epsilon of the operands.
_ROUNDINGS: Mapping[Operation, int] = {"copy": 0, "scale": 1, "add": 1, "triad": 2}
# Array sizes of `memory_gb_s`. A GPU's is far above the caches; a CPU is slower, so its is smaller.
_ARRAY_BYTES = {"cuda": GIB, "cpu": 32 * MIB}


class Memory(Workload):
    """Copies, scales or adds arrays as STREAM does, on each device: memory bandwidth.

    copy: c = a. scale: c = 3 a. add: c = a + b. triad: c = a + 3 b. A step is one kernel without
    temporary arrays. The bytes read and written count: 2 arrays for copy and scale, 3 for add and
    triad (J. D. McCalpin, https://www.cs.virginia.edu/stream/ref.html). With world_size > 1 all
    devices do this at the same time, without communication.
    """

    title = "Memory kernels"
    takes_batch_size = takes_precision = False
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
        if size_bytes % element.itemsize:
            raise UsageError(
                f"workload memory: size_bytes {size_bytes} does not divide into elements of "
                f"{element.itemsize} bytes; give a multiple of {element.itemsize}"
            )
        array_count = 2 if operation in ("copy", "scale") else 3
        options: Any = {
            "generator": context.generator(),
            "dtype": element,
            "device": context.device,
        }
        length = size_bytes // element.itemsize
        self.inputs = [torch.randn(length, **options) for _ in range(array_count - 1)]
        self.output = torch.full_like(self.inputs[0], math.nan)
        self._operation, self._rank = operation, context.rank
        self.memory_bytes = array_count * size_bytes

    def step(self) -> None:
        """Issue the operation once."""
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
        """Raise WrongResultError if the last output differs from float64 by more than rounding.

        The output is NaN before the first step and after each check.
        """
        import torch

        factor = _SCALAR if self._operation in ("scale", "triad") else 1.0
        eps = torch.finfo(self.output.dtype).eps * _ROUNDINGS[self._operation]
        arrays = [self.output, *self.inputs]
        block_length = _block_length(self.output)
        for start in range(0, len(self.output), block_length):
            output, *inputs = (array[start : start + block_length] for array in arrays)
            # Only the last input has a factor.
            *summands, scaled = [array.double() for array in inputs]
            # Rounding is relative to the size of the operands, which may cancel in their sum.
            exact = scaled * factor
            operand_size = exact.abs()
            for array in summands:
                exact, operand_size = exact + array, operand_size + array.abs()
            # Not `error > limit`, so that NaN fails, too.
            is_wrong = ~((output.double() - exact).abs() <= operand_size * eps)
            if bool(is_wrong.any()):
                index = int(is_wrong.nonzero()[0])
                raise WrongResultError(
                    f"rank {self._rank}: {self._operation} left a wrong array: element "
                    f"{start + index} of {len(self.output)} is {output[index].item():g}"
                )
        self.output.fill_(math.nan)


def _block_length(checked: Tensor) -> int:
    return _CHECKED_ON_GPU if checked.is_cuda else _CHECKED_ON_CPU


def memory_gb_s(context: Context) -> float | None:
    """Measure the device's memory bandwidth in GB/s (1e9 bytes) by the triad of `memory`.

    Returns:
        None on the meta device. On a CPU a large cache may hold the arrays.

    Raises:
        torch.OutOfMemoryError: a GPU has less than 3 GiB of free memory.
    """
    import torch
    from torch.utils.benchmark import Timer

    size_bytes = _ARRAY_BYTES.get(context.device.type)
    if size_bytes is None:
        return None
    triad = Memory(context, size_bytes=size_bytes)
    timer = Timer("step()", globals={"step": triad.step}, num_threads=torch.get_num_threads())
    step_s = timer.blocked_autorange(min_run_time=0.1).median
    moved_bytes = triad.memory_bytes
    # The timer also holds the arrays. Free them, because the calling workload needs the memory.
    del triad, timer
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    return moved_bytes / step_s / BYTES_PER_GB


class HostCopy(Workload):
    """Copies to the device, from it, or both ways at once: bandwidth of the link to the host.

    Bandwidth counts the bytes that cross the link, so both ways are twice size_bytes. A CPU worker
    copies within the host's memory.
    """

    takes_batch_size = takes_precision = False
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

        # Source and target of each copy; empty on a rank that waits.
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._rank, self._direction = context.rank, direction
        ways = ["h2d", "d2h"] if direction == "both" else [direction]
        if local_rank not in (None, context.local_rank):
            ways = []
        self.memory_bytes = len(ways) * size_bytes
        on_gpu = context.device.type == "cuda"
        host = "cpu" if on_gpu else context.device
        # Fill each source with numbers that differ from its target.
        for way in ways:
            host_data = torch.empty(
                size_bytes // 8, dtype=torch.int64, device=host, pin_memory=pinned and on_gpu
            )
            device_data = torch.empty_like(host_data, device=context.device, pin_memory=False)
            source, target = (host_data, device_data) if way == "h2d" else (device_data, host_data)
            # Write in place: a temporary of this size would take longer than all copies.
            torch.arange(len(source), out=source)
            target.fill_(_NOT_SENT)
            self._copies.append((source, target))
        # Two copies need two streams to run at the same time.
        self._second_stream: Any = None
        if on_gpu and len(ways) == 2:
            self._second_stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Issue this rank's copies; the current stream waits for them."""
        import torch

        if self._second_stream is None:
            for source, target in self._copies:
                target.copy_(source, non_blocking=True)
            return
        current = torch.cuda.current_stream()
        self._second_stream.wait_stream(current)
        (first_source, first_target), (second_source, second_target) = self._copies
        first_target.copy_(first_source, non_blocking=True)
        with torch.cuda.stream(self._second_stream):
            second_target.copy_(second_source, non_blocking=True)
        current.wait_stream(self._second_stream)

    def check(self) -> None:
        """Raise WrongResultError if the target of a copy has other bytes than its source."""
        import torch

        for _, target in self._copies:
            block_length = _block_length(target)
            for start in range(0, len(target), block_length):
                block = target[start : start + block_length]
                # Make the expected numbers where the target is: copies could repeat an error.
                expected = torch.arange(start, start + len(block), device=target.device)
                if not torch.equal(block, expected):
                    raise WrongResultError(
                        f"rank {self._rank}: a copy between host and device ({self._direction}) "
                        "arrived with other bytes than were sent"
                    )
                block.fill_(_NOT_SENT)
