"""The workload `linear`: the small DDP test that PyTorch's tutorials use, and its DataLoader.

`raybench plan` imports this module, so torch is imported inside the functions that need it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from raybench.errors import UsageError
from raybench.records.metric import Metric
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

        self._loader: LoaderBatches | None = None
        _check_data(context, data, num_workers, pin_memory=pin_memory)
        # On the meta device there is nothing to load.
        if data == "device" or context.device.type == "meta":
            _check_batch_size(context, rows, "all of them")
            generator, device = context.generator(), context.device
            inputs = torch.randn(rows, FEATURES, generator=generator, device=device)
            targets = torch.randn(rows, 1, generator=generator, device=device)
            batches: Iterator[Batch] = slices(inputs, targets, context.batch_size)
        else:
            # One data set for all ranks, as a file would be.
            generator = torch.Generator().manual_seed(context.seed)
            batches = self._loader = LoaderBatches(
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
        if self._loader is not None:
            # Rows on the device are each rank's own, no data set that they go through together.
            self.epoch_s = self._loader.rows / self.items_per_step

    @classmethod
    def parameter_count(cls, params: Mapping[str, str]) -> int | None:
        """Return the number of parameters of the layer."""
        return FEATURES + 1

    def close(self) -> None:
        """Free the model and the data, and end the loader's processes."""
        loader = self._loader
        super().close()
        if loader is not None:
            loader.close()


def _check_data(context: Context, data: str, num_workers: int, *, pin_memory: bool) -> None:
    """Raise UsageError where parameters of the loader, or a CUDA graph, do not fit `data`."""
    if data == "device" and (num_workers or pin_memory):
        # Such a point would be a repeat of another under a wrong name.
        raise UsageError(
            f"workload linear: num_workers ({num_workers}) and pin_memory ({pin_memory}) need "
            "data: dataloader; leave them out where data is device"
        )
    if data != "device" and context.cuda_graph:
        raise UsageError(
            "workload linear: cuda_graph: true needs data: device; a graph replays its steps "
            "without the DataLoader"
        )


def _check_batch_size(context: Context, rows: int, origin: str) -> None:
    """Raise UsageError when the rows of this rank do not fill one batch; origin: why so few."""
    if context.batch_size > rows:
        raise UsageError(
            f"workload linear: batch_size {context.batch_size} is more than the {rows} rows "
            f"that each rank has ({origin}); lower batch_size or raise rows"
        )


class LoaderBatches:
    """An endless iterator over full batches from a DataLoader, copied to the device.

    The part `data` is the time that the host waits for the loader. The copy to the device is not
    in it: from pageable memory it waits for the device's earlier work too, which is no waiting
    for data; from pinned memory it is only queued.

    inputs, targets: rows in host memory, the same on all ranks; the sampler shares them out.
    rows: number of rows that this rank goes through in an epoch.

    Raises UsageError when a rank has too few rows for one batch.
    """

    def __init__(
        self,
        context: Context,
        inputs: Tensor,
        targets: Tensor,
        *,
        num_workers: int,
        pin_memory: bool,
        distributed_sampler: bool,
    ) -> None:
        from torch import Generator
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

        dataset = TensorDataset(inputs, targets)
        self._sampler: DistributedSampler[tuple[Tensor, ...]] | None = None
        self.rows, origin = len(inputs), "all of them"
        if distributed_sampler and context.world_size > 1:
            self._sampler = DistributedSampler(
                dataset,
                num_replicas=context.world_size,
                rank=context.rank,
                seed=context.seed,
                drop_last=True,
            )
            origin = f"{self.rows} rows over {context.world_size} ranks"
            self.rows = len(self._sampler)
        _check_batch_size(context, self.rows, origin)
        self._context = context
        # A CPU run has nothing to pin for; the loader would warn.
        self._pinned = pin_memory and context.device.type == "cuda"
        self._loader = DataLoader(
            dataset,
            batch_size=context.batch_size,
            sampler=self._sampler,
            shuffle=self._sampler is None,
            generator=Generator().manual_seed(context.seed + context.rank),
            drop_last=True,
            num_workers=num_workers,
            pin_memory=self._pinned,
            persistent_workers=num_workers > 0,
            multiprocessing_context=_forkserver_with_torch() if num_workers else None,
        )
        self._epoch = 0
        # Here and not at the first step: the worker processes start during the set-up.
        self._iterator = iter(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        with self._context.parts.part("data"):
            inputs, targets = self._next_on_host()
        device, pinned = self._context.device, self._pinned
        return inputs.to(device, non_blocking=pinned), targets.to(device, non_blocking=pinned)

    def close(self) -> None:
        """End the loader's worker processes."""
        # The loader has no public way but this: they end with the last reference.
        del self._iterator, self._loader

    def _next_on_host(self) -> list[Tensor]:
        batch = next(self._iterator, None)
        if batch is None:
            self._epoch += 1
            if self._sampler is not None:
                self._sampler.set_epoch(self._epoch)
            self._iterator = iter(self._loader)
            batch = next(self._iterator)
        rows: list[Tensor] = batch
        return rows


def _forkserver_with_torch() -> BaseContext:
    """Return a multiprocessing context whose server process has imported torch before it forks.

    A process with the threads of CUDA, NCCL and Ray must not be forked: a lock that one of them
    holds stays locked in the child. And to import torch takes each process seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data"])
    return context
