"""Workloads of one device, on the CPU: matrix products, memory kernels, copies and launches."""

from typing import Any

import pytest
import torch
from builders import make_context, outcome_of_check

from raybench.errors import UsageError
from raybench.job.point import USUAL_PRECISIONS, Precision
from raybench.workloads.base import WrongResultError
from raybench.workloads.kernels import Gemm, HostCopy, Launch, Memory, SameBits, digest_of

OPERATIONS = ("copy", "scale", "add", "triad")
FLOATS = ("float32", "float64", "float16", "bfloat16")


def make_gemm(precision: Precision = Precision.FP32, **shape: int) -> Gemm:
    return Gemm(make_context(1, 2, precision=precision), **{"m": 96, "n": 80, "k": 512, **shape})


def make_memory(**parameters: Any) -> Memory:
    return Memory(make_context(3, 4), **{"size_bytes": 2**16, **parameters})


@pytest.mark.parametrize("precision", USUAL_PRECISIONS)
def test_products_have_the_precision_and_the_right_values(precision):
    gemm = make_gemm(precision)
    for _ in range(3):
        gemm.step()
        gemm.check()
    gemm.step()
    assert gemm.product.dtype is getattr(torch, precision.dtype)
    assert gemm.first.std().item() == pytest.approx(1, abs=0.05)
    assert gemm.flops_per_step == 2 * 96 * 80 * 512


def test_stale_or_misplaced_products_are_detected():
    gemm = make_gemm()
    with pytest.raises(WrongResultError, match=r"^rank 1: the product in fp32 is off by nan"):
        gemm.check()
    gemm.step()
    gemm.product.copy_(gemm.product.roll(1, dims=0))
    with pytest.raises(WrongResultError, match="rounding explains"):
        gemm.check()


def test_tf32_arithmetic_is_detected_in_fp32():
    gemm = make_gemm(m=512, n=512, k=1024)
    gemm.step()
    kept = (operand.clone() for operand in (gemm.first, gemm.second))
    rounded = [_to_tf32(operand) for operand in kept]
    torch.matmul(*rounded, out=gemm.product)
    with pytest.raises(WrongResultError, match=r"rounding explains 0\.0001"):
        gemm.check()
    as_asked = make_gemm(Precision.TF32, m=512, n=512, k=1024)
    torch.matmul(*rounded, out=as_asked.product)
    as_asked.check()


def _to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to 10 bits of the mantissa."""
    bits = tensor.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_memory_results_are_right_after_every_block(operation, dtype):
    memory = make_memory(operation=operation, dtype=dtype)
    for _ in range(3):
        memory.step()
        memory.check()
    with pytest.raises(WrongResultError, match=f"^rank 3: {operation} left a wrong array: .* nan$"):
        memory.check()


@pytest.mark.parametrize(
    ("operation", "formula"),
    [
        ("copy", lambda a: a),
        ("scale", lambda a: 3 * a),
        ("add", lambda a, b: a + b),
        ("triad", lambda a, b: a + 3 * b),
    ],
)
def test_each_operation_is_that_of_stream(operation, formula):
    memory = make_memory(operation=operation)
    # STREAM counts the arrays that are read and written.
    assert memory.memory_bytes == (len(memory.inputs) + 1) * 2**16
    memory.step()
    torch.testing.assert_close(memory.output, formula(*memory.inputs))


@pytest.mark.parametrize("operation", ["copy", "triad"])
def test_one_wrong_element_is_named(operation):
    # Far beyond the first block.
    memory = make_memory(operation=operation, dtype="float16", size_bytes=2**24)
    memory.step()
    memory.output[2**22 + 5] += 0.1
    with pytest.raises(WrongResultError, match=f"element {2**22 + 5} of {2**23} is "):
        memory.check()


def test_a_digest_covers_every_bit_and_fits_doubles():
    tensor = torch.arange(1000, dtype=torch.float32)
    before = digest_of(tensor)
    tensor.view(torch.int32)[77] ^= 1
    assert digest_of(tensor) != before == int(float(before))
    assert digest_of(tensor[5]) == digest_of(tensor[5:6])  # of no dimension


def test_changed_products_on_one_device_are_counted():
    workload = SameBits(make_context(), size=64)
    for bent in (False, False, True):
        workload.step()
        if bent:
            workload.product[3, 4] += 1
        workload.check()
    assert workload.changed_products == 1


def test_launches_are_counted_on_the_device():
    workload = Launch(make_context(), wait=True)
    for _ in range(5):
        workload.step()
    assert outcome_of_check(workload) == "right"
    workload.number += 1
    assert outcome_of_check(workload) == "rank 0: 5 additions of 1 came to 6"


@pytest.mark.parametrize("direction", ["h2d", "d2h", "both"])
def test_a_copy_that_moves_nothing_is_found_out(direction):
    workload = HostCopy(make_context(), direction=direction, size_bytes=4096)
    assert "arrived with other bytes than were sent" in outcome_of_check(workload)
    workload.step()
    assert outcome_of_check(workload) == "right"
    assert workload.memory_bytes == (8192 if direction == "both" else 4096)


def test_a_wrong_number_far_inside_a_copy_is_found(monkeypatch):
    copy = torch.Tensor.copy_

    def copy_with_error(target, source, **options):
        copy(target, source, **options)
        target[-5] += 1

    # Three blocks and a part of one.
    workload = HostCopy(make_context(), direction="d2h", size_bytes=8 * (3 * 2**16 + 8))
    workload.step()
    assert outcome_of_check(workload) == "right"
    monkeypatch.setattr(torch.Tensor, "copy_", copy_with_error)
    workload.step()
    assert "arrived with other bytes than were sent" in outcome_of_check(workload)


def test_only_the_local_rank_that_is_named_copies():
    idle = HostCopy(make_context(rank=1, world_size=2), local_rank=0, size_bytes=4096)
    idle.step()
    assert outcome_of_check(idle) == "right"
    assert idle.memory_bytes == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_memory(size_bytes=1001), "memory: size_bytes 1001 does not divide into elem"),
        (
            lambda: Launch(make_context(cuda_graph=True), wait=True),
            "launch: wait: true cannot be had with cuda_graph",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(make, message):
    with pytest.raises(UsageError, match=f"^workload {message}"):
        make()
