"""The built-in workloads on a CUDA device: `pytest -m gpu tests/gpu`."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from raybench.job.point import USUAL_PRECISIONS, Precision
from raybench.workloads import training as trained
from raybench.workloads.base import apply_precision, effective_precision
from raybench.workloads.networks import Linear, Mlp
from raybench.workloads.transformer import Transformer
from tests.gpu.gpus import make_context

pytestmark = pytest.mark.gpu


BUILDS = {
    "linear": Linear,
    "linear with a loader": partial(Linear, data="dataloader", num_workers=2, pin_memory=True),
    "mlp": partial(Mlp, hidden=1024, layers=4, grad_accumulation=2),
    "transformer": partial(Transformer, preset="124m", seq_len=256),
    "transformer with checkpointing": partial(
        Transformer, preset="124m", seq_len=256, activation_checkpointing=True
    ),
}


@pytest.mark.parametrize("mode", USUAL_PRECISIONS)
@pytest.mark.parametrize("name", BUILDS)
def test_a_workload_trains_on_the_device(name, mode, monkeypatch):
    monkeypatch.setattr(trained, "LEARNING_RATE", 1e-3)
    workload = BUILDS[name](make_context(mode))
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    for _ in range(5):
        workload.step()
    after = [parameter.detach() for parameter in workload.model.parameters()]
    assert all(parameter.is_cuda and parameter.isfinite().all() for parameter in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.cuda.max_memory_allocated() > 0
    assert effective_precision() == ("tf32" if mode is Precision.TF32 else "fp32")
    workload.close()


# Inductor advises to switch TF32 on: fp32 is meant to do without.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
# Importing inductor: torch's own use of torch.jit.script_method (fixed in pytorch#189914).
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mode", [Precision.FP32, Precision.TF32, Precision.BF16])
def test_a_compiled_workload_trains_in_every_precision(mode, monkeypatch):
    monkeypatch.setattr(trained, "LEARNING_RATE", 1e-3)
    workload = Mlp(make_context(mode), hidden=256, layers=2, compile=True)
    weight = next(workload.model.parameters())
    before = weight.detach().clone()
    for _ in range(3):
        workload.step()
    assert not torch.equal(before, weight.detach())
    workload.close()
    torch._dynamo.reset()


def relative_error(operation, *operands):
    exact = operation(*(operand.double() for operand in operands))
    return ((operation(*operands) - exact).abs().max() / exact.abs().max()).item()


def random_operands(*shape, count):
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cuda") for _ in range(count)]


# TF32 keeps 10 bits of the mantissa, relative rounding 5e-4; fp32 keeps 23, 6e-8.
@pytest.mark.parametrize(
    ("operation", "shape"), [(torch.matmul, (1024, 1024)), (functional.conv2d, (64, 64, 8, 8))]
)
def test_fp32_is_exact_and_tf32_is_not(operation, shape):
    operands = random_operands(*shape, count=2)
    apply_precision(Precision.FP32)
    assert relative_error(operation, *operands) < 1e-5
    apply_precision(Precision.TF32)
    assert 5e-5 < relative_error(operation, *operands) < 1e-2


def test_attention_in_fp32_is_exact():
    # Its kernels multiply on tensor cores: this shows that they do not round to TF32.
    attention = partial(functional.scaled_dot_product_attention, is_causal=True)
    operands = random_operands(2, 4, 256, 64, count=3)
    apply_precision(Precision.FP32)
    assert relative_error(attention, *operands) < 1e-5
