"""The example of docs/workloads.md, which a user is told to copy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from raybench.job import registry
from raybench.job.point import USUAL_PRECISIONS, Precision
from raybench.measure.breakdown import Extent, break_down
from raybench.measure.timing import make_timer
from raybench.workloads.base import Context
from raybench.workloads.trained import ddp_defaults

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLE = DOCS / "examples" / "convnet.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convnet", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("precision", USUAL_PRECISIONS)
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
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    workload.step()
    after = list(workload.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert workload.items_per_step == 2


def test_the_parameters_of_the_example_can_be_read_from_its_signature(example: ModuleType) -> None:
    names = [setting.name for setting in registry.parameters(example.ConvNet)]
    own = ["channels", "image_size", "memory_format", "compile"]
    assert names == [*own, *ddp_defaults()]


def test_the_signature_of_the_example_is_read_without_torch() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import convnet, raybench.job.registry\n"
        "raybench.job.registry.settings(convnet.ConvNet)\n"
        "assert not {'torch', 'ray', 'pandas', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(EXAMPLE.parent)], check=True)


@pytest.mark.parametrize("example", ["convnet.py", "decoder_parts.py"])
def test_the_document_shows_the_example_as_it_is(example: str) -> None:
    assert (EXAMPLE.parent / example).read_text() in (DOCS / "workloads.md").read_text()


def test_the_step_of_the_example_with_regions_names_all_of_its_parts() -> None:
    names: dict[str, Any] = {}
    exec((EXAMPLE.parent / "decoder_parts.py").read_text(), names)
    context = Context(
        device=torch.device("cpu"),
        rank=0,
        world_size=1,
        local_rank=0,
        batch_size=2,
        precision=Precision.BF16,
    )
    workload = names["DecoderParts"](context, width=16, layers=2, seq_len=4)
    workload.step()
    found = break_down(workload, make_timer(context.device), context, Extent(steps=3))
    assert {region.name: region.calls for region in found.regions} == {
        "forward": 1,
        "attention": 2,
        "mlp": 2,
        "backward": 1,
    }


def test_the_shortest_workload_of_the_document_runs_and_is_checked_by_its_types() -> None:
    _, _, rest = (DOCS / "workloads.md").read_text().partition("```python\n")
    names: dict[str, Any] = {}
    exec(rest.partition("```")[0], names)
    shortest = names["Attention"]
    assert [setting.name for setting in registry.parameters(shortest)] == ["heads", "seq_len"]
    for device in ("cpu", "meta"):
        context = Context(
            device=torch.device(device),
            rank=0,
            world_size=1,
            local_rank=0,
            batch_size=2,
            precision=Precision.BF16,
        )
        workload = shortest(context, heads=2, seq_len=8)
        workload.step()
        assert workload.q.grad.shape == (2, 2, 8, 64)
        assert workload.items_per_step == 2
