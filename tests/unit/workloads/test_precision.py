"""Precisions: the switches of torch, and what float8 needs and makes of a model."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import permutations
from types import ModuleType
from typing import Any

import pytest
import torch

from jobs import HEAD, plan, problems_of
from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.records.doubts import Doubt, DoubtKind
from raybench.workloads.base import apply_precision, effective_precision, precision_doubts
from raybench.workloads.language_models import LanguageModel, convert_linear_layers
from raybench.workloads.shapes import LLAMA_PRESETS

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


def test_the_variable_that_disables_tf32_is_seen(monkeypatch):
    apply_precision(Precision.TF32)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert effective_precision() == "fp32"


def test_a_cpu_is_said_to_have_no_tf32():
    told = Doubt(kind=DoubtKind.EMULATED_PRECISION, subject="a CPU")
    for precision in Precision:
        apply_precision(precision)
        doubts = tuple(precision_doubts(precision, CPU))
        assert doubts == ((told,) if precision is Precision.TF32 else ())


needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def job(world_size: int = 1, kind: str = "transformer", **workload: Any) -> str:
    text = ", ".join(f"{name}: {value}" for name, value in {"kind": kind, **workload}.items())
    return (
        f"{HEAD}baseline: {{}}\nworkload: {{{text}}}\n"
        f"matrix: {{world_size: {world_size}, precision: float8, batch_size: 2}}\n"
    )


@pytest.fixture
def torchao_is_there(monkeypatch):
    # Plan asks whether there is one, and loads none.
    module = ModuleType("torchao")
    module.__spec__ = ModuleSpec("torchao", None)
    monkeypatch.setitem(sys.modules, "torchao", module)


def test_plan_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    told = problems_of(job(preset="llama-tiny", seq_len=32))[0]
    assert "in the checkout of raybench: pip install -e '.[float8]'" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mlp"}, "precision float8 is not for Mlp; transformer takes it"),
        ({"world_size": 2, "tp": 2}, "float8 is not divided by tp 2; take dp_shard, or bf16"),
        ({"mode": "inference"}, "precision float8 is for mode: train; take bf16"),
    ],
)
def test_plan_refuses_what_is_not_trained_in_float8(torchao_is_there, options, message):
    sizes = {} if "kind" in options else {"preset": "llama-tiny", "seq_len": 32}
    assert message in problems_of(job(**sizes, **options))[0]


def test_float8_goes_with_weights_in_bf16(torchao_is_there):
    options = {"preset": "llama-tiny", "seq_len": 32, "dp_shard": 2, "optimizer_dtype": "bf16"}
    assert plan(job(world_size=2, **options)).points[0].precision == "float8"


def test_a_device_without_products_in_float8_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with pytest.raises(UsageError, match=r"compute capability 8\.9 or later, given a CPU"):
        convert_linear_layers(model, CPU)


def gradients(is_float8: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = LanguageModel(LLAMA_PRESETS["llama-tiny"], seq_len=16, checkpointing="full").bfloat16()
    if is_float8:
        convert_linear_layers(model.blocks, CPU, emulate=True)
    model(torch.arange(16)[None]).float().square().mean().backward()
    return {name: one.grad.double() for name, one in model.named_parameters()}


@needs_torchao
# Of torchao itself, where Python compiles it.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao", "ignore:invalid escape sequence")
def test_float8_gradients_are_bf16_rounded_to_three_bits():
    found, wanted = gradients(True), gradients(False)
    shares = [float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted]
    assert min(shares) > 0.005  # as many in bf16 would be
    assert max(shares) < 0.25
