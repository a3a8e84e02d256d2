"""Uneven steps: how the samples of a step are divided over ranks, and how a device is slowed.

`raybench.measure.uneven` probes the devices and chooses the shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from raybench.errors import UsageError
from raybench.job.point import BY_ACCUMULATION, Point, SlowBy
from raybench.workloads.base import Context, Workload
from raybench.workloads.part import Parameters

# Batches are multiples of a power of two, because on an H200 a step of 1025 rows takes 19 % longer
# than a step of 1024 (tf32, mlp). The power of two is at most this share of an equal batch.
_LARGEST_UNIT = 1 / 64


class Idle(Workload):
    """The workload of a rank that has no share of the step: it does nothing."""

    items_per_step = 0

    def step(self) -> None:
        """Do nothing."""

    def set_comm_hook(self, hook: object) -> None:
        """Do nothing: there are no gradients."""


def slow_down(context: Context, point: Point) -> Context:
    """Return the context, with emulation if this rank is one of the last `slow_count` ranks.

    Raises:
        UsageError: multiprocessors cannot be taken away, because the device is a CPU.
    """
    if point.slow_ratio == 1 or context.rank < context.world_size - point.slow_count:
        return context
    if point.slow_by is SlowBy.COMPUTE:
        return replace(context, extra_work=1 / point.slow_ratio - 1)
    if context.device.type != "cuda":
        raise UsageError("slow_by: sms needs CUDA devices; take slow_by: compute")
    count = torch.cuda.get_device_properties(context.device).multi_processor_count
    return replace(context, sms=max(1, round(point.slow_ratio * count)))


def has_batch_norm(workload: Workload) -> bool:
    """Return whether the model has BatchNorm layers whose statistics depend on the local batch."""
    modules = workload.model.modules() if isinstance(workload.model, nn.Module) else ()
    return any(
        isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
        for module in modules
    )


class StepSize(NamedTuple):
    """How a workload is built for a number of samples."""

    batch_size: int
    params: Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedStep:
    """The step of a point whose samples are divided over the ranks in shares."""

    # This rank among all ranks, with its emulation.
    context: Context
    point: Point

    @property
    def context_at_full_speed(self) -> Context:
        """The context of this rank without emulation."""
        return replace(self.context, extra_work=0.0, sms=None)

    @property
    def equal_items(self) -> int:
        """The samples of a rank with an equal share, in all its forward passes."""
        return (self.point.batch_size or 1) * self.point.grad_accumulation

    @property
    def unit(self) -> int:
        """The number of samples that divides every share."""
        batch_size = self.point.batch_size or 1
        if self.point.shares == BY_ACCUMULATION:
            return batch_size
        # In each forward pass: the largest power of two that divides batch_size and is at most a
        # 64th of it.
        largest_power = 2 ** int(math.log2(max(1, _LARGEST_UNIT * batch_size)))
        return self.point.grad_accumulation * math.gcd(batch_size, largest_power)

    def size(self, items: int) -> StepSize:
        """Return batch size and parameters of a step of `items` samples, in equal passes."""
        params = self.point.params
        # A larger share has more passes if shares are by accumulation, otherwise larger batches.
        if self.point.shares != BY_ACCUMULATION:
            return StepSize(items // self.point.grad_accumulation, params)
        return StepSize(self.unit, {**params, "grad_accumulation": items // self.unit})

    def context_among(self, shares: Sequence[int]) -> Context:
        """Return the context for this rank's share. Collective.

        Rank and world size count only the ranks that have a share. If at least two, but not all
        ranks have one, they get a new process group, which stays.

        Args:
            shares: samples of each rank. A rank with 0 samples can only build an `Idle`.
        """
        # The ranks that have a share.
        ranks = [rank for rank, items in enumerate(shares) if items]
        group = dist.new_group(ranks) if 1 < len(ranks) < len(shares) else None
        rank = self.context.rank
        if not shares[rank]:
            return replace(self.context_at_full_speed, world_size=len(ranks))
        return replace(
            self.context,
            batch_size=self.size(shares[rank]).batch_size,
            rank=ranks.index(rank),
            world_size=len(ranks),
            process_group=group,
            loss_weight=len(ranks) * shares[rank] / sum(shares),
        )
