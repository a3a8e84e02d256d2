from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from raybench.job.point import Precision
from raybench.workloads import precision
from raybench.workloads.base import Context

CPU = torch.device("cpu")
ALL: Any = torch.backends
CUDNN: Any = torch.backends.cudnn
MATMUL: Any = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _fp32_afterwards() -> Iterator[None]:
    yield
    precision.apply(Precision.FP32)


def make_context(mode: Precision) -> Context:
    return Context(device=CPU, rank=0, world_size=1, local_rank=0, batch_size=4, precision=mode)


@pytest.mark.parametrize(("before", "after"), list(product(Precision, Precision)))
def test_every_switch_old_and_new_follows_the_precision(
    before: Precision, after: Precision
) -> None:
    precision.apply(before)
    precision.apply(after)

    tf32 = after is Precision.TF32
    mode = "tf32" if tf32 else "ieee"
    assert MATMUL.fp32_precision == mode
    assert CUDNN.fp32_precision == CUDNN.conv.fp32_precision == CUDNN.rnn.fp32_precision == mode
    assert ALL.fp32_precision == mode
    # Reading an old switch raises where it differs from the new ones, and torch.compile reads it.
    assert MATMUL.allow_tf32 is CUDNN.allow_tf32 is tf32
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert precision.effective() == ("tf32" if tf32 else "fp32")


def test_switches_that_a_workload_left_are_set_right_by_the_next_point() -> None:
    CUDNN.conv.fp32_precision = "tf32"
    MATMUL.fp32_precision = "tf32"
    precision.apply(Precision.FP32)
    assert precision.effective() == "fp32"
    assert CUDNN.allow_tf32 is False


def test_a_workload_that_switches_tf32_on_is_seen() -> None:
    precision.apply(Precision.FP32)
    MATMUL.fp32_precision = "tf32"
    assert precision.effective() == "mixed"
    CUDNN.conv.fp32_precision = "tf32"
    CUDNN.rnn.fp32_precision = "tf32"
    assert precision.effective() == "tf32"


def test_the_variable_that_switches_tf32_off_below_torch_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    precision.apply(Precision.TF32)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert precision.effective() == "fp32"


def test_a_cpu_is_said_to_have_no_tf32() -> None:
    sentence = precision.why_not_supported(Precision.TF32, CPU)
    assert sentence == "precision tf32 asked, but a CPU has no TF32: the numbers are fp32's"
    assert all(
        precision.why_not_supported(mode, CPU) is None for mode in Precision if mode != "tf32"
    )


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (Precision.FP32, torch.float32),
        (Precision.TF32, torch.float32),
        (Precision.FP16, torch.float16),
        (Precision.BF16, torch.bfloat16),
    ],
)
def test_autocast_runs_a_matmul_in_the_precision(mode: Precision, dtype: torch.dtype) -> None:
    matrix = torch.ones(4, 4)
    with precision.autocast(make_context(mode)):
        assert (matrix @ matrix).dtype == dtype
