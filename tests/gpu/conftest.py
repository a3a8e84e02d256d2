"""What every test on a GPU leaves behind for the next one."""

import pytest
import torch

from raybench.job.point import Precision
from raybench.workloads import precision


@pytest.fixture(autouse=True)
def _fp32_and_no_memory_afterwards():
    yield
    precision.apply(Precision.FP32)
    torch.cuda.empty_cache()
