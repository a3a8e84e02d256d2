"""Small networks: the data of `linear`, and those of torchvision, where it is installed."""

import multiprocessing
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import builders
import pytest
import torch
from commands import REPOSITORY, refusal_of
from torch import nn

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.job.settings import settings_of_class
from raybench.workloads.base import Context
from raybench.workloads.networks import Linear, ResNet, load_batches
from raybench.workloads.training import Batch, slices


def make_context(**changes: Any) -> Context:
    return builders.make_context(**{"batch_size": 4, **changes})


def load(context: Context, *, rows: int = 18, distributed_sampler: bool = True) -> Iterator[Batch]:
    """Rows that hold their own number."""
    numbers = torch.arange(rows, dtype=torch.float32).unsqueeze(1)
    options = {"num_workers": 0, "pin_memory": False, "distributed_sampler": distributed_sampler}
    return load_batches(context, numbers, -numbers, **options)


def epoch(loader: Iterator[Batch], batches: int) -> list[int]:
    return [int(row) for inputs, _ in islice(loader, batches) for row in inputs]


def test_slices_are_views_that_repeat_the_full_batches():
    rows = torch.arange(7)
    inputs, targets = list(islice(slices(rows, -rows, 3), 2))[1]
    assert inputs.data_ptr() == rows[3:].data_ptr()
    assert torch.equal(targets, -inputs)
    seen = [inputs.tolist() for inputs, _ in islice(slices(rows, rows, 3), 4)]
    assert seen == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_ranks_share_the_rows_in_full_batches():
    loaders = [load(make_context(rank=rank, world_size=2)) for rank in (0, 1)]
    first, second = (epoch(loader, 2) for loader in loaders)
    assert len(first) == len(second) == 8
    assert not set(first) & set(second)
    inputs, targets = next(loaders[0])
    assert torch.equal(inputs, -targets)


def test_every_epoch_is_shuffled_and_the_loader_repeats():
    loader = load(make_context(rank=1, world_size=2), rows=16)
    orders = [epoch(loader, 2) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2]
    # set_epoch shuffles all rows anew before they are shared out.
    assert set(orders[0]) != set(orders[1])


def test_without_sampler_each_rank_reads_all_rows():
    contexts = [make_context(rank=rank, world_size=2) for rank in (0, 1)]
    loaders = [load(context, rows=16, distributed_sampler=False) for context in contexts]
    first, second = (epoch(loader, 4) for loader in loaders)
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second


def test_waiting_for_the_loader_is_the_data_part():
    for data, parts in (("dataloader", ["data"]), ("device", [])):
        context = make_context()
        workload = Linear(context, data=data, rows=8)
        workload.step()
        assert list(context.parts.take()) == parts
        workload.close()


def test_an_epoch_lasts_as_long_as_its_steps():
    workload = Linear(make_context(), data="dataloader", rows=32, grad_accumulation=2)
    assert workload.epoch_s == 4
    workload.close()
    # Each rank has rows of its own on its device.
    assert Linear(make_context(), rows=32).epoch_s is None


def test_the_loaders_processes_are_gone_after_close():
    context = make_context()
    workload = Linear(context, data="dataloader", rows=8, num_workers=1)
    for _ in range(3):  # over the end of an epoch
        workload.step()
    (process,) = multiprocessing.active_children()
    workload.close()
    process.join(timeout=60)
    assert multiprocessing.active_children() == []


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(UsageError, match=r"64 is more than the 60 rows .*all of them"):
        Linear(make_context(batch_size=64), rows=60)
    with pytest.raises(UsageError, match=r"64 is more than the 50 rows .*100 rows over 2 ranks"):
        Linear(make_context(batch_size=64, world_size=2), data="dataloader", rows=100)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"data": "device", "num_workers": 2}, "num_workers needs data: dataloader"),
        ({"data": "device", "pin_memory": True}, "pin_memory needs data: dataloader"),
        ({"data": "device", "distributed_sampler": False}, "distributed_sampler needs data: data"),
        ({"data": "dataloader", "cuda_graph": True}, "cuda_graph: true needs data: device"),
    ],
)
def test_settings_without_loader_or_graph_are_refused(given, rule):
    usual = {name: setting.default for name, setting in settings_of_class(Linear).items()}
    assert rule in (Linear.why_not({**usual, **given}) or "")
    assert Linear.why_not({**usual, "data": given["data"]}) is None


def why_no_torchvision() -> str:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        return f"torchvision cannot be imported: {error}"
    return ""


needs_torchvision = pytest.mark.skipif(bool(why_no_torchvision()), reason=why_no_torchvision())


def make(precision: Precision = Precision.FP32, **parameters: Any) -> ResNet:
    return ResNet(
        make_context(precision=precision), **{"preset": "resnet18", "image_size": 64, **parameters}
    )


def test_without_torchvision_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    told = refusal_of(UsageError, make)
    assert told.endswith("pip install -e '.[vision]'")
    assert torch.__version__ in told


@pytest.mark.parametrize("words", ["plan", "sweep --dry-run --device cuda"])
def test_a_plan_warns_of_a_missing_torchvision(words, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    done = command(*words.split(), REPOSITORY / "jobs" / "resnet50_amp.yaml", results=None)
    assert (done.code, done.err.count("\n")) == (0, 1), done
    assert done.err.endswith("in the checkout of raybench: pip install -e '.[vision]' (warning)\n")
    assert "resnet50_amp.yaml:15:18: workload.kind: needs torchvision" in done.err


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
def test_half_precision_has_an_output_error_unlike_fp32():
    assert make(mode="inference").output_error == 0
    for cast_weights in (False, True):
        network = make(Precision.BF16, mode="inference", cast_weights=cast_weights)
        assert 1e-4 < network.output_error < 0.5
