"""`raybench.measure` on a GPU: its clock, and the L2 cache."""

import subprocess
import sys
from functools import partial

import pytest
import torch

import raybench

pytestmark = pytest.mark.gpu
# Two inputs and an output that stay in the L2 cache of data centre GPUs.
SMALL = 2**20


def sum_of(length):
    a, b, out = (torch.zeros(length, device="cuda") for _ in range(3))
    return partial(torch.add, a, b, out=out)


def test_a_matrix_product_is_timed_by_events():
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    timing = raybench.measure(lambda: a @ a, items=4096, seconds=0.6)
    assert "samples of a step by CUDA events on 1 rank of NVIDIA" in timing.method or (
        "steps by CUDA events on 1 rank of NVIDIA" in timing.method
    )
    assert timing.method.endswith("; the L2 cache was not flushed.")
    tflops = 2 * 4096**3 / timing.median_ms / 1e9
    assert 50 < tflops < 2500
    assert timing.interval_ms[1] / timing.interval_ms[0] < 1.1


def test_a_flush_empties_the_cache():
    warm = raybench.measure(sum_of(SMALL), seconds=0.6)
    cold = raybench.measure(sum_of(SMALL), seconds=0.6, flush_l2=True)
    assert "samples of a step by" in cold.method
    assert cold.method.endswith("; the L2 cache was flushed before each step.")
    large = raybench.measure(sum_of(2**27), seconds=0.6)
    # From memory, the small sum takes its share of the large one at least.
    assert cold.median_ms > large.median_ms / 128
    print(warm, cold, large, sep="\n")


def test_a_step_bound_by_launches_is_doubted():
    one = torch.zeros(1, device="cuda")
    timing = raybench.measure(lambda: one.add_(1), seconds=0.6)
    assert any("waits for the host" in doubt for doubt in timing.doubts), timing


ON_THE_CPU = """
import raybench, torch
timing = raybench.measure(sum, setup=lambda: range(1000), seconds=0.2)
assert "perf_counter" in timing.method, timing
assert not torch.cuda.is_initialized()
timing = raybench.measure(torch.Tensor.sum, setup=lambda: torch.ones(9, device="cuda"), seconds=0.2)
assert "CUDA events" in timing.method, timing
"""


def test_the_step_decides_whether_the_gpu_is_timed():
    subprocess.run([sys.executable, "-c", ON_THE_CPU], check=True, timeout=120)


def test_functions_run_on_gpu_workers():
    def build(context):
        return torch.ones(2**20, device=context.device)

    timing = raybench.measure(
        torch.Tensor.sum, workers=1, setup=build, seconds=0.6, address="local"
    )
    assert "CUDA events on 1 rank of NVIDIA" in timing.method
