"""Which of torch's attention kernels a step runs."""

from __future__ import annotations

import pytest
import torch
from torch import library
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from raybench.measure.profiling import attention_kernels

TOKENS = torch.ones(1, 2, 8, 16, requires_grad=True)


def attend(query: torch.Tensor = TOKENS) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, TOKENS, TOKENS)


@library.custom_op("raybench_tests::attend", mutates_args=())
def attend_by_own_operator(query: torch.Tensor) -> torch.Tensor:
    return attend(query)


def test_the_kernel_that_torch_takes_is_named_forward_and_backward():
    for backend, kernel in ((SDPBackend.MATH, "math"), (SDPBackend.FLASH_ATTENTION, "flash")):
        with sdpa_kernel(backend):
            assert attention_kernels(attend) == (kernel,)
            assert attention_kernels(lambda: attend().sum().backward()) == (kernel,)
    assert attention_kernels(lambda: TOKENS + 1) == ()


def test_all_kernels_of_a_step_are_named_also_in_an_operator_of_ones_own():
    def step() -> None:
        attend_by_own_operator(TOKENS.detach())
        with sdpa_kernel(SDPBackend.MATH):
            attend()

    assert attention_kernels(step) == ("flash", "math")


def test_a_step_that_fails_leaves_no_profiler_behind():
    with pytest.raises(ZeroDivisionError):
        attention_kernels(lambda: 1 / 0)
    assert not torch._C._autograd._profiler_enabled()
    assert attention_kernels(attend) == ("flash",)
