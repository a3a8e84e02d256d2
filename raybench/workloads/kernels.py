"""Workloads of a single kernel on each device: `gemm`, `same_bits` and `launch`.

`raybench plan` imports this module, so torch is imported inside the functions that need it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.answer import Answer
from raybench.job.point import Precision
from raybench.records import Metric
from raybench.workloads.base import Context, Workload, WrongResultError

if TYPE_CHECKING:
    from torch import Tensor

_SAMPLED = 64
# Of the largest error among the sampled elements, in units of sqrt(k), which is the standard
# deviation of an element. Rounding the result alone gives 5 standard deviations half of the
# format's epsilon: 0.002 in fp16, 0.02 in bf16. The inputs of tf32 are rounded to 10 bits, which
# is seen in fp32 at 1e-3 and so tells TF32 apart from it.
_TOLERANCES = {
    Precision.FP32: 1e-4,
    Precision.TF32: 1e-2,
    Precision.FP16: 1e-2,
    Precision.BF16: 5e-2,
}
# A hash of so many bytes is an integer that a double holds exactly, and so a column of numbers.
_DIGEST_BYTES = 6


class Gemm(Workload):
    """Multiplies two matrices, (m, k) by (k, n), on each device: TFLOP/s.

    precision is the number format: fp32 (IEEE) and tf32 multiply float32 tensors, fp16 and bf16
    tensors of that type, without autocast. With world_size > 1 each device does so at the same
    time, without communication.
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
        # Random, not zeros: those need less power, and so leave the clocks higher.
        options = {
            "generator": context.generator(),
            "dtype": dtype,
            "device": context.device,
        }
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
        """Compare the last product with that in float64, where 64 random rows and columns cross.

        Raises WrongResultError where the error is more than rounding explains. Afterwards the
        product is NaN until the next step.
        """
        import torch

        rows, columns = (
            torch.randint(size, (_SAMPLED,), generator=torch.Generator().manual_seed(size))
            for size in self.product.shape
        )
        rows, columns = rows.to(self._context.device), columns.to(self._context.device)
        exact = self.first[rows].double() @ self.second[:, columns].double()
        found = self.product[rows][:, columns].double()
        error = float((found - exact).abs().max()) / len(self.second) ** 0.5
        allowed = _TOLERANCES[self._context.precision]
        # Not `error > allowed`: an element that is not a number must fail too.
        if not error <= allowed:
            raise WrongResultError(
                f"rank {self._context.rank}: the product in {self._context.precision} is off by "
                f"{error:.2g} standard deviations of an element; rounding explains {allowed:g}"
            )
        self.product.fill_(torch.nan)


class SameBits(Workload):
    """Multiplies the same two matrices on each device, and digests the bits of the product.

    Devices of one model with the same libraries give the same bits; one that does not computes
    something wrong now and then. Nothing is raised: what differs is said by the metrics.
    """

    takes_batch_size = False
    metrics = (
        Metric(
            name="digest",
            description="first 48 bits of a hash of the product's bytes",
            over_ranks="max",
        ),
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
        # Made on the host: CUDA's random numbers depend on the model of the device.
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
        """Update the three metrics from the last product; afterwards it is 0 until the next step.

        The product is computed once more with its rows in other places: where the bits differ then,
        either the device is wrong or its library treats rows differently by their place.
        """
        import torch

        half = len(self._first) // 2
        moved = torch.matmul(self._first.roll(half, 0), self._second).roll(-half, 0)
        self.misplaced_products += not torch.equal(moved, self.product)
        digest = digest_of(self.product)
        self.digest = digest if self.digest is None else self.digest
        self.changed_products += digest != self.digest
        self.product.zero_()


def digest_of(tensor: Tensor) -> int:
    """Return a hash of the bytes of a tensor, 48 bits, which a double holds exactly.

    Copies it to the host, and so waits for the device.
    """
    import torch

    content = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest())


class Launch(Workload):
    """Adds 1 to one number on each device: what the launch of a kernel costs.

    wait: false: launches queue up, and a step is the time between two of them. wait: true: each
    step waits for its result, and is the time from a launch until the host knows it is done. With
    world_size > 1 each device does so at the same time, without communication.
    """

    takes_batch_size = False
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
        self._counts = not context.cuda_graph
        self._steps = 0

    def step(self) -> None:
        """Launch the kernel once; with `wait`, wait for its result."""
        self.number.add_(1)
        self._steps += 1
        if self._wait is not None:
            self._wait()

    def check(self) -> None:
        """Raise WrongResultError where the number on the device is not the count of steps.

        Not in CUDA graphs: the host knows nothing of steps that are replayed.
        """
        found = int(self.number)
        if self._counts and found != self._steps:
            raise WrongResultError(
                f"rank {self._rank}: {self._steps} additions of 1 came to {found}"
            )
