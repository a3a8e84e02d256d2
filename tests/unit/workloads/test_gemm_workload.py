"""Matrix products on the CPU."""

from __future__ import annotations

import pytest
import torch
from builders import make_context

from raybench.job.point import USUAL_PRECISIONS, Precision
from raybench.workloads.base import WrongResultError
from raybench.workloads.compute.kernels import Gemm

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.TF32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
}


def make(precision: Precision = Precision.FP32, rank: int = 0, **shape: int) -> Gemm:
    context = make_context(rank, 2, batch_size=1, precision=precision)
    return Gemm(context, **{"m": 96, "n": 80, "k": 512, **shape})


@pytest.mark.parametrize("precision", USUAL_PRECISIONS)
def test_the_precision_is_the_type_of_the_tensors_and_the_product_is_right(precision):
    gemm = make(precision)
    for _ in range(3):
        gemm.step()
        gemm.check()
    gemm.step()
    assert gemm._product.dtype is DTYPES[precision]
    assert gemm._first.std().item() == pytest.approx(1, abs=0.05)
    assert gemm.flops_per_step == 2 * 96 * 80 * 512


@pytest.mark.parametrize("shape", [{"m": 1, "n": 1, "k": 1}, {"m": 1, "k": 4096}, {"k": 1}])
def test_any_shape_is_checked(shape):
    gemm = make(**shape)
    gemm.step()
    gemm.check()


def test_a_product_that_no_step_wrote_is_found_out():
    gemm = make(rank=1)
    with pytest.raises(WrongResultError, match=r"^rank 1: the product in fp32 is off by nan"):
        gemm.check()
    gemm.step()
    gemm.check()
    with pytest.raises(WrongResultError, match="off by nan"):
        gemm.check()


def test_arithmetic_of_tf32_under_the_name_of_fp32_is_found_out():
    gemm = make(m=512, n=512, k=1024)
    gemm.step()
    kept = (operand.clone() for operand in (gemm._first, gemm._second))
    rounded = [_to_tf32(operand) for operand in kept]
    torch.matmul(*rounded, out=gemm._product)
    with pytest.raises(WrongResultError, match=r"rounding explains 0\.0001"):
        gemm.check()
    as_asked = make(Precision.TF32, m=512, n=512, k=1024)
    torch.matmul(*rounded, out=as_asked._product)
    as_asked.check()


def _to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to 10 bits of the mantissa."""
    bits = tensor.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("precision", USUAL_PRECISIONS)
def test_a_product_of_other_matrices_is_found_out(precision):
    gemm = make(precision)
    gemm.step()
    gemm._product.copy_(gemm._product.roll(1, dims=0))
    with pytest.raises(WrongResultError):
        gemm.check()
