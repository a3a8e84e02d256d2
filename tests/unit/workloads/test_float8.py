"""Precision float8: who takes it, what it needs, and what torchao makes of a model."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from jobs import HEAD, plan, problems_of
from raybench.errors import UsageError
from raybench.workloads.language_models import LanguageModel, convert_linear_layers
from raybench.workloads.shapes import LLAMA_PRESETS

CPU = torch.device("cpu")
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
    assert "needs torchao: pip install 'raybench[float8]'" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mlp"}, "precision float8 is not for Mlp; transformer takes it"),
        ({"world_size": 2, "tp": 2}, "float8 is not divided by tp; take dp_shard, or bf16"),
        ({"mode": "inference"}, "precision float8 is for mode: train; take bf16"),
    ],
)
def test_plan_refuses_what_is_not_trained_in_float8(torchao_is_there, options, message):
    sizes = {} if "kind" in options else {"preset": "llama-tiny", "seq_len": 32}
    assert message in problems_of(job(**sizes, **options))[0]


def test_float8_goes_with_weights_in_bf16(torchao_is_there):
    options = {"preset": "llama-tiny", "seq_len": 32, "dp_shard": 2, "optimizer_dtype": "bf16"}
    (point,) = plan(job(world_size=2, **options)).points
    assert point.precision == "float8"


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
def test_gradients_in_float8_are_those_of_bf16_rounded_to_three_bits():
    found, wanted = gradients(True), gradients(False)
    shares = [float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted]
    assert min(shares) > 0.005  # as many in bf16 would be
    assert max(shares) < 0.25
