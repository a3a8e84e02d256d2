from __future__ import annotations

import multiprocessing
import time
from itertools import islice

import pytest
import torch
from torch import Tensor

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.workloads.base import Context
from raybench.workloads.data import LoaderBatches, loader_batches
from raybench.workloads.linear import Linear
from raybench.workloads.trained import slices


def make_context(*, rank: int = 0, world_size: int = 1, batch_size: int = 4) -> Context:
    return Context(
        device=torch.device("cpu"),
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        batch_size=batch_size,
        precision=Precision.FP32,
    )


def make_loader(
    context: Context, *, rows: int = 18, distributed_sampler: bool = True, num_workers: int = 0
) -> LoaderBatches:
    """Rows that hold their own number."""
    numbers = torch.arange(rows, dtype=torch.float32).unsqueeze(1)
    return loader_batches(
        context,
        numbers,
        -numbers,
        num_workers=num_workers,
        pin_memory=False,
        distributed_sampler=distributed_sampler,
    )


def epoch(loader: LoaderBatches, batches: int) -> list[int]:
    return [int(row) for inputs, _ in islice(loader, batches) for row in inputs]


def test_slices_cover_the_full_batches_over_and_over() -> None:
    rows = torch.arange(7)
    seen = [inputs.tolist() for inputs, _ in islice(slices(rows, rows, 3), 4)]
    assert seen == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_slices_are_views_and_pair_inputs_with_targets() -> None:
    inputs, targets = torch.rand(8, 2), torch.rand(8, 1)
    some_inputs, some_targets = list(islice(slices(inputs, targets, 4), 2))[1]
    assert some_inputs.data_ptr() == inputs[4:].data_ptr()
    assert torch.equal(some_targets, targets[4:])


def test_the_ranks_share_the_rows_out_and_every_batch_is_full() -> None:
    loaders = [make_loader(make_context(rank=rank, world_size=2)) for rank in (0, 1)]
    first, second = (epoch(loader, 2) for loader in loaders)
    assert len(first) == len(second) == 8
    assert not set(first) & set(second)


def test_every_epoch_has_another_order_and_the_loader_never_ends() -> None:
    loader = make_loader(make_context(rank=1, world_size=2), rows=16)
    orders = [epoch(loader, 2) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2]
    # set_epoch shuffles all rows anew before they are shared out.
    assert set(orders[0]) != set(orders[1])


def test_without_the_sampler_each_rank_reads_all_rows_in_its_own_order() -> None:
    contexts = [make_context(rank=rank, world_size=2) for rank in (0, 1)]
    loaders = [make_loader(context, rows=16, distributed_sampler=False) for context in contexts]
    first, second = (epoch(loader, 4) for loader in loaders)
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second


def test_targets_stay_with_their_rows() -> None:
    inputs, targets = next(make_loader(make_context()))
    assert torch.equal(inputs, -targets)


def test_only_waiting_for_the_loader_is_the_data_part() -> None:
    context = make_context()
    loader = make_loader(context)
    slow = loader._next_on_host

    def slower() -> list[Tensor]:
        time.sleep(0.05)
        return slow()

    loader._next_on_host = slower  # type: ignore[method-assign]
    next(loader)
    parts = context.parts.take()
    assert list(parts) == ["data"]
    assert parts["data"] >= 50_000_000

    device_context = make_context()
    workload = Linear(device_context, rows=8)
    workload.step()
    assert device_context.parts.take() == {}


def test_the_workload_records_the_data_part_with_a_loader_only() -> None:
    context = make_context()
    workload = Linear(context, data="dataloader", rows=8, grad_accumulation=2)
    workload.step()
    assert context.parts.take()["data"] > 0
    workload.close()


@pytest.mark.parametrize(("is_divided", "rows"), [(True, 16), (False, 32)])
def test_an_epoch_has_the_rows_that_a_rank_reads_which_are_all_of_them_without_a_sampler(
    is_divided: bool, rows: int
) -> None:
    loader = make_loader(make_context(world_size=2), rows=32, distributed_sampler=is_divided)
    assert loader.rows == rows


def test_the_seconds_of_an_epoch_are_those_of_its_steps() -> None:
    workload = Linear(make_context(), data="dataloader", rows=32, grad_accumulation=2)
    assert workload.epoch_s == 4
    workload.close()
    # Each rank has rows of its own on its device.
    assert Linear(make_context(), rows=32).epoch_s is None


def test_the_loaders_processes_are_gone_after_close() -> None:
    context = make_context()
    workload = Linear(context, data="dataloader", rows=8, num_workers=1)
    for _ in range(3):  # over the end of an epoch
        workload.step()
    (process,) = multiprocessing.active_children()
    workload.close()
    process.join(timeout=60)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("data", ["device", "dataloader"])
def test_a_batch_of_more_rows_than_there_are_is_one_clear_line(data: str) -> None:
    with pytest.raises(UsageError) as caught:
        Linear(make_context(batch_size=64), data=data, rows=60)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "workload linear: batch_size 64 is more than the 60 rows that each rank has "
        "(all of them); lower batch_size or raise rows"
    )


def test_a_batch_of_more_rows_than_the_share_of_a_rank_names_the_share() -> None:
    with pytest.raises(UsageError, match=r"64 is more than the 50 rows .*100 rows over 2 ranks"):
        Linear(make_context(batch_size=64, world_size=2), data="dataloader", rows=100)


def test_loader_settings_without_a_loader_are_refused() -> None:
    with pytest.raises(UsageError, match=r"num_workers \(2\) .* need data: dataloader"):
        Linear(make_context(), num_workers=2)
