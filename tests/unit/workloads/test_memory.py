"""STREAM's operations on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.workloads.base import Context, WrongResultError
from raybench.workloads.memory import Memory

OPERATIONS = ("copy", "scale", "add", "triad")
DTYPES = ("float32", "float64", "float16", "bfloat16")


def make(precision: Precision = Precision.FP32, **parameters: Any) -> Memory:
    context = Context(
        device=torch.device("cpu"),
        rank=3,
        world_size=4,
        local_rank=3,
        batch_size=1,
        precision=precision,
    )
    return Memory(context, **{"size_bytes": 2**16, **parameters})


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_right_after_every_block_of_steps(operation: str, dtype: str) -> None:
    memory = make(operation=operation, dtype=dtype)
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
def test_each_operation_is_that_of_stream(operation: str, formula: Any) -> None:
    memory = make(operation=operation)
    memory.step()
    torch.testing.assert_close(memory._output, formula(*memory._inputs))


@pytest.mark.parametrize(
    ("operation", "arrays"), [("copy", 2), ("scale", 2), ("add", 3), ("triad", 3)]
)
def test_bytes_are_counted_as_stream_counts_them(operation: str, arrays: int) -> None:
    assert make(operation=operation, dtype="bfloat16").memory_bytes == arrays * 2**16


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_wrong_element_is_named(operation: str) -> None:
    # In the second of the parts that are compared one after the other.
    memory = make(operation=operation, dtype="float16", size_bytes=2**24)
    memory.step()
    memory._output[2**22 + 5] += 0.1
    with pytest.raises(WrongResultError, match=f"element {2**22 + 5} of {2**23} is "):
        memory.check()


def test_checking_leaves_the_inputs_as_they_are() -> None:
    memory = make(dtype="float64")
    before = [array.clone() for array in memory._inputs]
    memory.step()
    memory.check()
    assert all(torch.equal(a, b) for a, b in zip(before, memory._inputs, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size_bytes": 1001}, "size_bytes 1001 does not divide into elements of 4 bytes; give"),
        ({"precision": Precision.TF32}, "precision tf32 means nothing to it; leave precision out"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(**arguments)
    assert str(caught.value).startswith("workload memory: ")
    assert message in str(caught.value)
