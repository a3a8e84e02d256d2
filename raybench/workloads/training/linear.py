"""The workload `linear`: the small DDP test that PyTorch's tutorials use, and its DataLoader.

`raybench plan` imports this module, so torch is imported inside the functions that need it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from raybench.errors import UsageError
from raybench.records import Metric
from raybench.workloads.base import Context
from raybench.workloads.training.model import (
    Batch,
    Compile,
    GradAccumulation,
    Mode,
    Model,
    Recipe,
    slices,
)

if TYPE_CHECKING:
    from torch import Tensor

# Inputs of the layer, which has one output.
FEATURES = 1024


class Linear(Model):
    """Trains or runs nn.Linear(1024, 1) on random rows with MSE and Adam: Python and launch cost.

    Its batch size in the published test is 64. data: device: every rank has `rows` rows of its
    own on the device, and batches are slices. data: dataloader: `rows` rows in host memory, in
    shuffled order, through a torch DataLoader; the time spent waiting for it is the part `data`.
    """

    items = "rows"
    metrics = (
        Metric(
            name="epoch_s",
            unit="s",
            description="all rows of the data set once, at the mean step",
            over_ranks="max",
            over_step="seconds",
        ),
    )
    title = "Linear layer"
    epoch_s: float | None = None

    def __init__(
        self,
        context: Context,
        *,
        data: Annotated[
            Literal["device", "dataloader"], Field(description="Where the rows come from.")
        ] = "device",
        rows: Annotated[
            int, Field(gt=0, description="Rows of the data set; with data: device, of each rank.")
        ] = 10_000,
        num_workers: Annotated[
            int, Field(ge=0, description="Loader: number of its processes; 0 loads in the step.")
        ] = 0,
        pin_memory: Annotated[
            bool, Field(description="Loader: batches in pinned memory; no effect on a CPU.")
        ] = False,
        distributed_sampler: Annotated[
            bool, Field(description="Loader: the ranks share the rows out, else each reads all.")
        ] = True,
        grad_accumulation: GradAccumulation = 1,
        compile: Compile = False,
        mode: Mode = "train",
    ) -> None:
        import torch
        from torch import nn
        from torch.nn import functional

        # On the meta device there is nothing to load.
        if data == "device" or context.device.type == "meta":
            _check_batch_size(context, rows, "all of them")
            generator, device = context.generator(), context.device
            inputs = torch.randn(rows, FEATURES, generator=generator, device=device)
            targets = torch.randn(rows, 1, generator=generator, device=device)
            batches, own_rows = slices(inputs, targets, context.batch_size), None
        else:
            # One data set for all ranks, as a file would be.
            generator = torch.Generator().manual_seed(context.seed)
            batches, own_rows = load_batches(
                context,
                torch.randn(rows, FEATURES, generator=generator),
                torch.randn(rows, 1, generator=generator),
                num_workers=num_workers,
                pin_memory=pin_memory,
                distributed_sampler=distributed_sampler,
            )
        recipe = Recipe(
            loss=functional.mse_loss,
            optimizer="adam",
            grad_accumulation=grad_accumulation,
            compile=compile,
        )
        self.build(mode, context, recipe, lambda: nn.Linear(FEATURES, 1), batches)
        if own_rows is not None:
            # Rows on the device are each rank's own, no data set that they go through together.
            self.epoch_s = own_rows / self.items_per_step

    @classmethod
    def why_not(cls, settings: Mapping[str, Any]) -> str | None:
        """Return why a point with these settings cannot be run, one sentence; None where it can."""
        if settings["data"] == "dataloader" and settings["cuda_graph"]:
            return (
                "cuda_graph: true needs data: device; a graph replays its steps without the "
                "DataLoader"
            )
        for name in ("num_workers", "pin_memory"):
            # Such a point would be a repeat of another under a wrong name.
            if settings["data"] == "device" and settings[name]:
                return f"{name} needs data: dataloader; leave it out where data is device"
        return super().why_not(settings)

    @classmethod
    def parameter_count(cls, params: Mapping[str, str]) -> int | None:
        """Return the number of parameters of the layer, which is always the same."""
        return FEATURES + 1


def _check_batch_size(context: Context, rows: int, origin: str) -> None:
    """Raise UsageError when the rows of this rank do not fill a batch; origin: why so few."""
    if context.batch_size > rows:
        raise UsageError(
            f"workload linear: batch_size {context.batch_size} is more than the {rows} rows "
            f"that each rank has ({origin}); lower batch_size or raise rows"
        )


def load_batches(
    context: Context,
    inputs: Tensor,
    targets: Tensor,
    *,
    num_workers: int,
    pin_memory: bool,
    distributed_sampler: bool,
) -> tuple[Iterator[Batch], int]:
    """Return endless full batches from a DataLoader, and the rows of this rank in an epoch.

    The batches are on the device. The processes of the loader start here, and end when the iterator
    is closed or dropped. inputs, targets: rows in host memory, the same on all ranks, which share
    them out with `distributed_sampler`. Raises UsageError when a rank has too few rows for a batch.
    """
    from torch import Generator
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dataset = TensorDataset(inputs, targets)
    sampler: DistributedSampler[tuple[Tensor, ...]] | None = None
    rows, origin = len(inputs), "all of them"
    if distributed_sampler and context.world_size > 1:
        sampler = DistributedSampler(
            dataset,
            num_replicas=context.world_size,
            rank=context.rank,
            seed=context.seed,
            drop_last=True,
        )
        origin = f"{rows} rows over {context.world_size} ranks"
        rows = len(sampler)
    _check_batch_size(context, rows, origin)
    processes = None
    if num_workers:
        # A process with the threads of CUDA, NCCL and Ray must not be forked: a lock that one of
        # them holds stays locked in the child. And to import torch takes each process seconds.
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(["torch.utils.data"])
    loader = DataLoader(
        dataset,
        batch_size=context.batch_size,
        sampler=sampler,
        shuffle=sampler is None,
        generator=Generator().manual_seed(context.seed + context.rank),
        drop_last=True,
        num_workers=num_workers,
        # A CPU run has nothing to pin for; the loader would warn.
        pin_memory=pin_memory and context.device.type == "cuda",
        persistent_workers=num_workers > 0,
        multiprocessing_context=processes,
    )
    # Here and not at the first step: the processes start during the set-up.
    return _batches_of(loader, sampler, iter(loader), context), rows


def _batches_of(
    loader: Any, sampler: Any, iterator: Iterator[list[Tensor]], context: Context
) -> Iterator[Batch]:
    """Yield the batches of the loader on the device, epoch after epoch; iterator: its first epoch.

    The part `data` is the time that the host waits for the loader. The copy to the device is not
    in it: from pageable memory it waits for the device's earlier work too, which is no waiting
    for data; from pinned memory it is only queued.
    """
    epoch, device, is_pinned = 0, context.device, loader.pin_memory
    while True:
        with context.parts.part("data"):
            batch = next(iterator, None)
            if batch is None:
                epoch += 1
                if sampler is not None:
                    sampler.set_epoch(epoch)
                iterator = iter(loader)
                batch = next(iterator)
        inputs, targets = batch
        yield inputs.to(device, non_blocking=is_pinned), targets.to(device, non_blocking=is_pinned)
