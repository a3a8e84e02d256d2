"""The example of docs/workloads.md, which a user is told to copy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest
import torch

from raybench.point import Precision
from raybench.workloads.base import Context

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "convnet.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convnet", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("precision", Precision)
def test_the_example_trains_in_every_precision(example: ModuleType, precision: Precision) -> None:
    context = Context(
        device=torch.device("cpu"),
        rank=0,
        world_size=1,
        local_rank=0,
        batch_size=2,
        precision=precision,
    )
    workload = example.ConvNet(context, channels=4, image_size=8)
    before = [parameter.detach().clone() for parameter in workload._model.parameters()]
    workload.step()
    after = list(workload._model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert workload.items_per_step == 2


def test_the_parameters_of_the_example_can_be_read_from_its_signature(example: ModuleType) -> None:
    hints = get_type_hints(example.ConvNet.__init__, include_extras=True)
    assert list(hints) == ["context", "channels", "image_size", "memory_format", "return"]


def test_the_document_shows_the_example_as_it_is() -> None:
    assert EXAMPLE.read_text() in (DOCS / "workloads.md").read_text()
