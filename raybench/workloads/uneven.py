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
# than a step of 1024 (tf32, mlp). The power of two is at most this fraction of an equal batch.
_LARGEST_UNIT_FRACTION = 1 / 64


class Idle(Workload):
    """The workload of a rank that has no share of the step: it does nothing."""

    items_per_step = 0

    def step(self) -> None:
        """Do nothing."""

    def set_comm_hook(self, hook: object) -> None:
        """Do nothing: there are no gradients."""


def slow_down(context: Context, point: Point) -> Context:
    """Return a context that emulates a slower device on the last `slow_count` ranks.

    Raises:
        UsageError: slow_by is sms, but the device is a CPU.
    """
    if point.slow_ratio == 1 or context.rank < context.world_size - point.slow_count:
        return context
    if point.slow_by is SlowBy.COMPUTE:
        # At half the speed (slow_ratio 0.5) a device does all work twice: extra_work 1.
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
    """Batch size and parameters with which a workload is built for a number of samples."""

    batch_size: int
    params: Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedStep:
    """The step of a point whose samples are divided over the ranks in shares."""

    # The context of this rank with all ranks, and with emulation of a slower device if wanted.
    context: Context
    point: Point

    @property
    def context_at_full_speed(self) -> Context:
        """The context of this rank without emulation."""
        return replace(self.context, extra_work=0.0, sms=None)

    @property
    def equal_items(self) -> int:
        """The number of samples per step of a rank with an equal share."""
        return (self.point.batch_size or 1) * self.point.grad_accumulation

    @property
    def unit(self) -> int:
        """The number of samples that divides every share."""
        batch_size = self.point.batch_size or 1
        if self.point.shares == BY_ACCUMULATION:
            # Ranks run different numbers of passes, all with this batch size.
            return batch_size
        # Batch sizes such as 1025 are slow, so each pass has a multiple of a power of two.
        limit = max(1, _LARGEST_UNIT_FRACTION * batch_size)
        largest_power_of_two = 2 ** int(math.log2(limit))
        batch_unit = math.gcd(batch_size, largest_power_of_two)
        return self.point.grad_accumulation * batch_unit

    def size(self, items: int) -> StepSize:
        """Return batch size and parameters of a step of `items` samples, in equal passes."""
        params = self.point.params
        if self.point.shares == BY_ACCUMULATION:
            # Ranks differ in the number of passes, and each pass has `self.unit` samples.
            return StepSize(self.unit, {**params, "grad_accumulation": items // self.unit})
        # Ranks differ in the batch size of a pass.
        return StepSize(items // self.point.grad_accumulation, params)

    def context_among(self, shares: Sequence[int]) -> Context:
        """Return the context for this rank's share. Collective.

        Rank and world size count only the ranks with samples. If some ranks have none, the others
        get a new process group, which stays.

        Args:
            shares: samples of each rank. A rank with 0 samples can only build an `Idle`.
        """
        busy_ranks = [rank for rank, items in enumerate(shares) if items]
        world_size = len(busy_ranks)
        # All ranks have torch's default group, and a single rank needs no group.
        needs_group = 1 < world_size < len(shares)
        group = dist.new_group(busy_ranks) if needs_group else None
        items = shares[self.context.rank]
        if not items:
            return replace(self.context_at_full_speed, world_size=world_size)
        return replace(
            self.context,
            batch_size=self.size(items).batch_size,
            rank=busy_ranks.index(self.context.rank),
            world_size=world_size,
            process_group=group,
            loss_weight=world_size * items / sum(shares),
        )
