"""Residual networks of torchvision, where it is installed for this torch."""

import sys
from typing import Any

import pytest
import torch
from builders import make_context
from torch import nn

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.workloads.networks import ResNet


def why_no_torchvision() -> str:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        return f"torchvision cannot be imported: {error}"
    return ""


needs_torchvision = pytest.mark.skipif(bool(why_no_torchvision()), reason=why_no_torchvision())


def make(precision: Precision = Precision.FP32, **parameters: Any) -> ResNet:
    context = make_context(batch_size=4, precision=precision)
    return ResNet(context, **{"preset": "resnet18", "image_size": 64, **parameters})


def test_without_torchvision_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UsageError, match=r"pip install 'raybench\[vision\]'$") as caught:
        make()
    assert torch.__version__ in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_torchvision
def test_a_network_trains_or_runs_on_random_images():
    for mode, channels_last in (("train", False), ("inference", True)):
        network = make(mode=mode, channels_last=channels_last)
        weight = next(m.weight for m in network.model.modules() if isinstance(m, nn.Conv2d))
        assert weight.is_contiguous(memory_format=torch.channels_last) == channels_last
        assert network.model.training == weight.requires_grad == (mode == "train")
        network.step()
        assert network.items_per_step == 4


@needs_torchvision
def test_the_error_of_the_output_is_none_in_fp32_and_some_in_half_precision():
    assert make(mode="inference").output_error == 0
    for cast_weights in (False, True):
        network = make(Precision.BF16, mode="inference", cast_weights=cast_weights)
        assert 1e-4 < network.output_error < 0.5
