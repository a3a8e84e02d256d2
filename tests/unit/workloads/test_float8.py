"""Precision float8: who takes it, what it needs, and what torchao makes of a model."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from raybench.errors import JobError, UsageError
from raybench.job.model import load_job
from raybench.job.plan import make_plan
from raybench.workloads.float8 import convert_linear_layers
from raybench.workloads.llama import Llama
from raybench.workloads.model_sizes import LLAMA_PRESETS

CPU = torch.device("cpu")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def plan(tmp_path: Path, world_size: int = 1, kind: str = "transformer", **workload: Any) -> Any:
    path = tmp_path / "job.yaml"
    text = ", ".join(f"{name}: {value}" for name, value in {"kind": kind, **workload}.items())
    path.write_text(
        f"version: 1\nname: one\nbaseline: {{}}\nworkload: {{{text}}}\n"
        f"matrix: {{world_size: {world_size}, precision: float8, batch_size: 2}}\n"
    )
    return make_plan(load_job(path))


@pytest.fixture
def torchao_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # Plan asks whether there is one, and loads none.
    module = ModuleType("torchao")
    module.__spec__ = ModuleSpec("torchao", None)
    monkeypatch.setitem(sys.modules, "torchao", module)


def test_plan_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(JobError, match=r"needs torchao: pip install 'raybench\[float8\]'"):
        plan(tmp_path, preset="llama-tiny", seq_len=32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mlp"}, "precision float8 is not for Mlp; transformer takes it"),
        ({"world_size": 2, "tp": 2}, "float8 is not divided by tp; take dp_shard, or bf16"),
        ({"mode": "inference"}, "precision float8 is for mode: train; take bf16"),
    ],
)
def test_plan_refuses_what_is_not_trained_in_float8(
    tmp_path: Path, torchao_is_there: None, options: dict[str, Any], message: str
) -> None:
    sizes = {} if "kind" in options else {"preset": "llama-tiny", "seq_len": 32}
    with pytest.raises(JobError, match=message):
        plan(tmp_path, **sizes, **options)


def test_float8_goes_with_weights_in_bf16(tmp_path: Path, torchao_is_there: None) -> None:
    options = {"preset": "llama-tiny", "seq_len": 32, "dp_shard": 2, "optimizer_dtype": "bf16"}
    (point,) = plan(tmp_path, world_size=2, **options).points
    assert point.precision == "float8"


def test_a_device_without_products_in_float8_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with pytest.raises(UsageError, match=r"compute capability 8\.9 or later, given a CPU"):
        convert_linear_layers(model, CPU)


def gradients(is_float8: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Llama(LLAMA_PRESETS["llama-tiny"], seq_len=16, checkpointing="full").bfloat16()
    if is_float8:
        convert_linear_layers(model.blocks, CPU, emulate=True)
    model(torch.arange(16)[None]).float().square().mean().backward()
    return {name: one.grad.double() for name, one in model.named_parameters()}


@needs_torchao
# Of torchao itself, where Python compiles it.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao", "ignore:invalid escape sequence")
def test_gradients_in_float8_are_those_of_bf16_rounded_to_three_bits() -> None:
    found, wanted = gradients(True), gradients(False)
    shares = [float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted]
    assert min(shares) > 0.005  # as many in bf16 would be
    assert max(shares) < 0.25
