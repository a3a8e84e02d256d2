"""Training data through a DataLoader, as real training has it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.context import BaseContext

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from raybench.errors import UsageError
from raybench.workloads.base import Context
from raybench.workloads.training.trained import Batch


def check_batch_size(context: Context, rows: int, origin: str) -> None:
    """Raise UsageError when `rows` rows of this rank do not fill one batch."""
    if context.batch_size > rows:
        raise UsageError(
            f"workload linear: batch_size {context.batch_size} is more than the {rows} rows "
            f"that each rank has ({origin}); lower batch_size or raise rows"
        )


class LoaderBatches:
    """Full batches from a DataLoader, epoch after epoch, copied to the device.

    The part `data` is the time that the host waits for the loader. The copy to the device is not
    in it: from pageable memory it waits for the device's earlier work too, which is no waiting
    for data; from pinned memory it is only queued.

    rows: that this rank goes through in an epoch.
    """

    def __init__(
        self,
        context: Context,
        dataset: TensorDataset,
        *,
        num_workers: int,
        pin_memory: bool,
        distributed_sampler: bool,
    ) -> None:
        self._sampler = _sampler(context, dataset) if distributed_sampler else None
        self._context = context
        self.rows = len(dataset) if self._sampler is None else len(self._sampler)
        # A CPU run has nothing to pin for; the loader would warn.
        self._pinned = pin_memory and context.device.type == "cuda"
        self._loader = DataLoader(
            dataset,
            batch_size=context.batch_size,
            sampler=self._sampler,
            shuffle=self._sampler is None,
            generator=torch.Generator().manual_seed(context.seed + context.rank),
            drop_last=True,
            num_workers=num_workers,
            pin_memory=self._pinned,
            persistent_workers=num_workers > 0,
            multiprocessing_context=_server_of_forks() if num_workers else None,
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
        """End the worker processes."""
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


def _server_of_forks() -> BaseContext:
    """Make what the loader's processes are forked from, which has imported torch.

    A process with the threads of CUDA, NCCL and Ray must not be forked: a lock that one of them
    holds stays locked in the child. And to import torch takes each process seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data"])
    return context


def loader_batches(
    context: Context,
    inputs: Tensor,
    targets: Tensor,
    *,
    num_workers: int,
    pin_memory: bool,
    distributed_sampler: bool,
) -> LoaderBatches:
    """Make a loader over rows in host memory, which all ranks share out when the sampler does.

    Raises UsageError when a rank has too few rows for one batch.
    """
    divided = distributed_sampler and context.world_size > 1
    rows = len(inputs) // context.world_size if divided else len(inputs)
    origin = f"{len(inputs)} rows over {context.world_size} ranks" if divided else "all of them"
    check_batch_size(context, rows, origin)
    return LoaderBatches(
        context,
        TensorDataset(inputs, targets),
        num_workers=num_workers,
        pin_memory=pin_memory,
        distributed_sampler=divided,
    )


def _sampler(
    context: Context, dataset: Dataset[tuple[Tensor, ...]]
) -> DistributedSampler[tuple[Tensor, ...]]:
    return DistributedSampler(
        dataset,
        num_replicas=context.world_size,
        rank=context.rank,
        seed=context.seed,
        drop_last=True,
    )
