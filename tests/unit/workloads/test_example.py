"""The examples of the documents, which a user is told to copy."""

import doctest
from typing import Any

import pytest
import torch
from builders import make_context
from commands import REPOSITORY

from raybench.job.point import USUAL_PRECISIONS, Precision
from raybench.job.settings import parameters_of_class
from raybench.measure.breakdown import Extent, break_down
from raybench.measure.instruments import Timer
from raybench.workloads.base import Workload

EXAMPLE = REPOSITORY / "docs" / "examples" / "convnet.py"


@pytest.mark.parametrize("precision", USUAL_PRECISIONS)
def test_the_example_trains_in_every_precision(precision):
    names: dict[str, Any] = {"__name__": "convnet"}
    exec(EXAMPLE.read_text(), names)
    context = make_context(batch_size=2, precision=precision)
    workload = names["ConvNet"](context, channels=4, image_size=8)
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    workload.step()
    after = list(workload.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert workload.items_per_step == 2


def test_the_example_with_regions_names_all_parts():
    names: dict[str, Any] = {}
    exec((EXAMPLE.parent / "decoder_parts.py").read_text(), names)
    context = make_context(batch_size=2, precision=Precision.BF16)
    workload = names["DecoderParts"](context, width=16, layers=2, seq_len=4)
    workload.step()
    found = break_down(workload, Timer(context.device), context, Extent(samples=3))
    calls = {region.name: region.calls for region in found.regions}
    assert calls == {"forward": 1, "attention": 2, "mlp": 2, "backward": 1}


def test_the_tutorial_class_runs_and_declares_its_settings():
    text = (REPOSITORY / "docs" / "tutorial" / "own-class.md").read_text()
    _, _, rest = text.partition("```python\n")
    names: dict[str, Any] = {}
    exec(rest.partition("```")[0], names)
    shortest = names["Attention"]
    assert [setting.name for setting in parameters_of_class(shortest)] == ["heads", "seq_len"]
    for device in ("cpu", "meta"):
        context = make_context(device=torch.device(device), batch_size=2, precision=Precision.BF16)
        workload = shortest(context, heads=2, seq_len=8)
        workload.step()
        assert workload.q.grad.shape == (2, 2, 8, 64)
        assert workload.items_per_step == 2


def test_the_example_of_the_base_class_runs():
    (example,) = doctest.DocTestFinder(recurse=False).find(Workload, "Workload")
    names: dict[str, Any] = {}
    for statement in example.examples:
        exec(statement.source, names)
    assert [setting.name for setting in parameters_of_class(names["Sum"])] == ["length"]
    workload = names["Sum"](make_context(batch_size=2), length=4)
    workload.step()
    assert workload.items_per_step == 2
