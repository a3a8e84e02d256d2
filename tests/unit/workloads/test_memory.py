"""STREAM's operations on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import make_context

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.workloads.base import WrongResultError
from raybench.workloads.compute.memory import Memory

OPERATIONS = ("copy", "scale", "add", "triad")
DTYPES = ("float32", "float64", "float16", "bfloat16")


def make(precision: Precision = Precision.FP32, **parameters: Any) -> Memory:
    context = make_context(3, 4, batch_size=1, precision=precision)
    return Memory(context, **{"size_bytes": 2**16, **parameters})


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_right_after_every_block_of_steps(operation, dtype):
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
def test_each_operation_is_that_of_stream(operation, formula):
    memory = make(operation=operation)
    # STREAM counts the arrays that are read and written.
    assert memory.memory_bytes == (len(memory._inputs) + 1) * 2**16
    memory.step()
    torch.testing.assert_close(memory._output, formula(*memory._inputs))


@pytest.mark.parametrize("operation", ["copy", "triad"])
def test_one_wrong_element_is_named(operation):
    # In the second of the parts that are compared one after the other.
    memory = make(operation=operation, dtype="float16", size_bytes=2**24)
    memory.step()
    memory._output[2**22 + 5] += 0.1
    with pytest.raises(WrongResultError, match=f"element {2**22 + 5} of {2**23} is "):
        memory.check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size_bytes": 1001}, "size_bytes 1001 does not divide into elements of 4 bytes; give"),
        ({"precision": Precision.TF32}, "precision tf32 means nothing to it; leave precision out"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments, message):
    with pytest.raises(UsageError) as caught:
        make(**arguments)
    assert str(caught.value).startswith("workload memory: ")
    assert message in str(caught.value)
