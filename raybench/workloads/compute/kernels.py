"""The workload `gemm`: one matrix product, the operation that peak rates are quoted for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raybench.job.answer import Answer
from raybench.job.point import Precision
from raybench.workloads.base import Context, Workload, WrongResultError

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


class Gemm(Workload):
    """Multiplies two matrices, (m, k) by (k, n), on each device: TFLOP/s.

    precision is the number format: fp32 (IEEE) and tf32 multiply float32 tensors, fp16 and bf16
    tensors of that type, without autocast. With world_size > 1 each device does so at the same
    time, without communication.
    """

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
        # `raybench plan` reads this signature and must not pay for importing torch.
        import torch

        dtype = getattr(torch, context.precision.dtype)
        # Random, not zeros: those need less power, and so leave the clocks higher.
        options = {
            "generator": context.generator(),
            "dtype": dtype,
            "device": context.device,
        }
        self._first = torch.randn(m, k, **options)
        self._second = torch.randn(k, n, **options)
        self._product = torch.full((m, n), torch.nan, dtype=dtype, device=context.device)
        self._matmul = torch.matmul
        self._context = context
        self.flops_per_step = 2.0 * m * n * k

    def step(self) -> None:
        """Issue the product once."""
        self._matmul(self._first, self._second, out=self._product)

    def check(self) -> None:
        """Compare elements of the last product with float64's; then make it wrong for the next.

        64 random rows and columns are compared where they cross. Raises WrongResultError.
        """
        import torch

        rows, columns = (
            torch.randint(size, (_SAMPLED,), generator=torch.Generator().manual_seed(size))
            for size in self._product.shape
        )
        rows, columns = rows.to(self._context.device), columns.to(self._context.device)
        exact = self._first[rows].double() @ self._second[:, columns].double()
        found = self._product[rows][:, columns].double()
        error = float((found - exact).abs().max()) / len(self._second) ** 0.5
        allowed = _TOLERANCES[self._context.precision]
        # Not `error > allowed`: an element that is not a number must fail too.
        if not error <= allowed:
            raise WrongResultError(
                f"rank {self._context.rank}: the product in {self._context.precision} is off by "
                f"{error:.2g} standard deviations of an element; rounding explains {allowed:g}"
            )
        self._product.fill_(torch.nan)
