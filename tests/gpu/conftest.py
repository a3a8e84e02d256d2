"""What every test on a GPU leaves behind for the next one."""

import pytest
import torch

from raybench.job.point import Precision
from raybench.workloads.base import apply_precision


@pytest.fixture(autouse=True)
def _fp32_and_no_memory_afterwards():
    yield
    apply_precision(Precision.FP32)
    torch.cuda.empty_cache()
