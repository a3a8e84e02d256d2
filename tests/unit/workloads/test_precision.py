from itertools import permutations
from typing import Any

import pytest
import torch

from raybench.job.point import Precision
from raybench.workloads.base import apply_precision, effective_precision, precision_warning

CPU = torch.device("cpu")
ALL: Any = torch.backends
CUDNN: Any = torch.backends.cudnn
MATMUL: Any = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _fp32_afterwards():
    yield
    apply_precision(Precision.FP32)


@pytest.mark.parametrize(
    ("before", "after"), list(permutations((Precision.FP32, Precision.TF32, Precision.BF16), 2))
)
def test_every_switch_old_and_new_follows_the_precision(before, after):
    apply_precision(before)
    apply_precision(after)

    tf32 = after is Precision.TF32
    mode = "tf32" if tf32 else "ieee"
    assert MATMUL.fp32_precision == mode
    assert CUDNN.fp32_precision == CUDNN.conv.fp32_precision == CUDNN.rnn.fp32_precision == mode
    assert ALL.fp32_precision == mode
    # Reading an old switch raises where it differs from the new ones, and torch.compile reads it.
    assert MATMUL.allow_tf32 is CUDNN.allow_tf32 is tf32
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert effective_precision() == ("tf32" if tf32 else "fp32")


def test_a_workload_that_switches_tf32_on_is_seen():
    apply_precision(Precision.FP32)
    MATMUL.fp32_precision = "tf32"
    assert effective_precision() == "mixed"
    CUDNN.conv.fp32_precision = "tf32"
    CUDNN.rnn.fp32_precision = "tf32"
    assert effective_precision() == "tf32"


def test_the_variable_that_switches_tf32_off_below_torch_is_seen(monkeypatch):
    apply_precision(Precision.TF32)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert effective_precision() == "fp32"


def test_a_cpu_is_said_to_have_no_tf32():
    sentence = precision_warning(Precision.TF32, CPU)
    assert sentence == "precision tf32 asked, but a CPU has no TF32: the numbers are fp32's"
    assert all(precision_warning(mode, CPU) is None for mode in Precision if mode != "tf32")
