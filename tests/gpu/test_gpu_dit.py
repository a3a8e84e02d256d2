"""The diffusion transformer on a CUDA device: kernels of attention, compiled blocks, graphs."""

from functools import partial

import pytest
import torch

from raybench.job.model import Measure
from raybench.job.point import Precision
from raybench.measure import phases
from raybench.workloads.attention import attend_with_logsumexp, choose_kernel, merge
from raybench.workloads.dit import Dit
from tests.gpu.gpus import make_context

pytestmark = pytest.mark.gpu

SMALL = {"preset": "tiny", "height": 256, "width": 256, "text_tokens": 64}


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_each_kernel_gives_log_sum_exp_for_merging(kernel):
    # As the workload has them: heads inside of tokens, and a number that no tile divides.
    shape = (3, 1, 1200, 24, 128)
    generator = torch.Generator("cuda").manual_seed(1)
    drawn = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    query, key, value = drawn.transpose(2, 3).unbind()
    attention = partial(attend_with_logsumexp, kernel)
    scores = query.float() @ key.float().transpose(-1, -2) / 128**0.5
    whole, logsumexp = attention(query, key, value)
    torch.testing.assert_close(logsumexp.float(), scores.logsumexp(-1), rtol=1e-3, atol=1e-2)
    parts = [
        attention(query, key[:, :, own], value[:, :, own])
        for own in (slice(0, 400), slice(400, 1200))
    ]
    expected = scores.softmax(-1) @ value.float()
    for found in (whole, merge(parts)):
        assert float((found - expected).norm() / expected.norm()) < 1e-2


def test_torch_chooses_a_kernel_with_log_sum_exp():
    tokens = torch.empty(1, 24, 4608, 128, device="cuda", dtype=torch.bfloat16)
    print("attention: auto is", choose_kernel("auto", tokens))
    assert choose_kernel("auto", tokens) in ("flash", "cudnn")


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_agree_and_each_kind_compiles_once():
    from torch._dynamo.utils import counters

    outputs = []
    for compiled in (False, True):
        counters.clear()
        workload = Dit(make_context(Precision.BF16, batch_size=1), **SMALL, compile=compiled)
        workload.step()
        outputs.append(workload.output)
    error = (outputs[0] - outputs[1]).float().norm() / outputs[0].float().norm()
    assert float(error) < 2e-2
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("scope", ["double_block", "loop"])
def test_steps_are_measured_as_replays_of_a_graph(scope):
    context = make_context(Precision.BF16, batch_size=1, cuda_graph=True)
    settings = Measure(warmup=2, iterations=3, breakdown=False)
    done = phases.measure(
        lambda: Dit(context, **SMALL, scope=scope, steps=2),  # type: ignore[arg-type]
        context,
        settings,
    )
    assert len(done.repetitions[0].timed.step_ns) == 3
    assert done.flops_per_step is not None
