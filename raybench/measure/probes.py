"""How fast each device of a group does a step alone, and what the exchange of gradients adds.

A probe is the step itself at several sizes, without communication, on all ranks at the same time.
Slow devices that are emulated are probed with and without emulation, so that the factor is known.
All ranks gather the same figures.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from raybench.job.point import BY_ACCUMULATION, Point, Scalar
from raybench.measure.timing import align_ranks, make_timer, own_stream, slowest_rank_ns
from raybench.stats.lines import fit_line
from raybench.stats.shares import DeviceSpeed, fast_devices
from raybench.workloads.base import Context, PartTimes, Workload
from raybench.workloads.replicas import Replicas

Parameters = Mapping[str, Scalar]
Make = Callable[[Context, Parameters], Workload]

# Sizes of the probe's steps, over an equal share.
_SIZES = (0.5, 1.0, 1.5, 2.0)
_TRIAL_STEPS = 2
_WARMUP_NS, _TIMED_NS = 100_000_000, 150_000_000
_FEWEST_STEPS, _MOST_STEPS = 3, 200
# Batches are multiples of a power of two, up to this share of an equal batch: on an H200 a step of
# 1025 rows takes 19 % longer than one of 1024 (tf32, mlp).
_GRAIN = 1 / 64
# Of the device's memory: what a share may take by the probe's line.
_MEMORY_SHARE = 0.9
_NS_PER_S = 1e9


class Idle(Workload):
    """In the place of a workload on a rank that has no share of the step."""

    items_per_step = 0

    def step(self) -> None:
        """Do nothing."""

    def set_comm_hook(self, hook: object) -> None:
        """Have no gradients to be reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a rank found of its device.

    speed: by steps of several sizes, with a line through them. equal_s: of a step of an equal
    share, without emulation. slow_ratio: the speed that emulation leaves it, as a share of its
    own; None without.
    """

    speed: DeviceSpeed
    fixed_s_error: float
    items_per_s_error: float
    equal_s: float
    slow_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProbe:
    """What the ranks of a group know of each other's devices, in rank order.

    exchange_s, fast_exchange_s: what the exchange of gradients adds to a step, of all and of the
    fast ones, by steps of equal shares on devices that are not slowed.
    """

    probes: tuple[Probe, ...]
    are_fast: tuple[bool, ...]
    exchange_s: float
    fast_exchange_s: float

    @property
    def speeds(self) -> tuple[DeviceSpeed, ...]:
        """Of the devices."""
        return tuple(probe.speed for probe in self.probes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMaker:
    """Builds the steps of a point with other shares than equal ones.

    make: builds the workload. context: of this rank among all, slow where it is to be.
    """

    make: Make
    context: Context
    point: Point

    @property
    def is_slow(self) -> bool:
        """Whether this rank emulates a slower device."""
        return self.context != self._own_pace

    @property
    def _own_pace(self) -> Context:
        return replace(self.context, extra_work=0.0, sms=None)

    @property
    def equal_items(self) -> int:
        """Samples of a step on each rank, shared out equally."""
        return (self.point.batch_size or 1) * self.point.grad_accumulation

    @property
    def unit(self) -> int:
        """Samples by which the shares of two ranks can differ."""
        batch_size = self.point.batch_size or 1
        if self.point.shares == BY_ACCUMULATION:
            return batch_size
        return self.point.grad_accumulation * _grain(batch_size)

    def size(self, items: int) -> tuple[int, Parameters]:
        """Return batch size and parameters of a step of so many samples."""
        params = self.point.params
        if self.point.shares != BY_ACCUMULATION:
            return items // self.point.grad_accumulation, params
        return self.unit, {**params, "grad_accumulation": items // self.unit}

    @contextmanager
    def build(self, context: Context, params: Parameters, items: int) -> Iterator[Workload]:
        """Build the workload, and close it at the end; one that does nothing without items."""
        with own_stream(context):
            workload = self.make(context, params) if items else Idle()
            try:
                yield workload
            finally:
                workload.close()
                context.replicas.forget()
                del workload
                gc.collect()

    def context_among(self, shares: Sequence[int]) -> Context:
        """Return the context of this rank beside those that have a share; all ranks call it.

        A rank without one has the others' world size, and is none of their group.
        """
        ranks = [rank for rank, items in enumerate(shares) if items]
        group = dist.new_group(ranks) if 1 < len(ranks) < len(shares) else None
        rank = self.context.rank
        if not shares[rank]:
            return replace(self.context, world_size=len(ranks), extra_work=0.0, sms=None)
        return replace(
            self.context,
            batch_size=self.size(shares[rank])[0],
            rank=ranks.index(rank),
            world_size=len(ranks),
            process_group=group,
            loss_weight=len(ranks) * shares[rank] / sum(shares),
        )

    def time_alone(self, items: int) -> float:
        """Time a step of this rank alone, without communication, in seconds; 0 without items."""
        return self._time_alone(items, self.context).seconds if items else 0.0

    def probe_group(self) -> GroupProbe:
        """Probe all devices, and the exchange; on all ranks together."""
        probes = gather(self._probe())
        everybody = (True,) * len(probes)
        are_fast = self._are_fast(probes)
        equal_s = [probe.equal_s for probe in probes]
        exchange_s = self._time_exchange(everybody, equal_s)
        return GroupProbe(
            probes=tuple(probes),
            are_fast=are_fast,
            exchange_s=exchange_s,
            fast_exchange_s=(
                exchange_s if are_fast == everybody else self._time_exchange(are_fast, equal_s)
            ),
        )

    def _are_fast(self, probes: Sequence[Probe]) -> tuple[bool, ...]:
        """Tell the fast devices: by steps of an equal share, which are known better than lines."""
        if self.point.slow_ratio == 1:
            return fast_devices([1 / probe.equal_s for probe in probes])
        first_slow = len(probes) - self.point.slow_count
        return tuple(rank < first_slow for rank in range(len(probes)))

    def _probe(self) -> Probe:
        """Time steps of several sizes on this rank alone, with its emulation and without."""
        own: dict[int, _Step] = {}
        found: dict[int, _Step] = {}
        for items in self._sizes():
            try:
                # In turn, so that a device that warms up does so in both.
                step = self._time_alone(items, self._own_pace)
                found[items] = self._time_alone(items, self.context) if self.is_slow else step
                own[items] = step
            except torch.OutOfMemoryError:
                if items <= self.equal_items:
                    raise
                break
        line = fit_line([(items, step.seconds) for items, step in found.items()])
        ratios = [step.seconds / found[items].seconds for items, step in own.items()]
        return Probe(
            speed=DeviceSpeed(
                fixed_s=line.intercept,
                items_per_s=1 / line.slope,
                most=self._most(found),
                steps=tuple((items, step.seconds) for items, step in found.items()),
            ),
            fixed_s_error=line.intercept_error,
            items_per_s_error=line.slope_error / line.slope**2,
            equal_s=own[self.equal_items].seconds,
            slow_ratio=statistics.median(ratios) if self.is_slow else None,
        )

    def _sizes(self) -> list[int]:
        """List the samples of the probe's steps."""
        units = self.equal_items // self.unit
        return [n * self.unit for n in sorted({max(1, round(one * units)) for one in _SIZES})]

    def _most(self, steps: Mapping[int, _Step]) -> int | None:
        """Estimate how many samples the device's memory holds, by a line through the peaks.

        None on a CPU, which has none of its own, and where the line does not rise.
        """
        if self.context.device.type != "cuda" or len(steps) < 2:
            return None
        line = fit_line([(items, step.peak_bytes) for items, step in steps.items()])
        total = torch.cuda.get_device_properties(self.context.device).total_memory
        return max(0, int((_MEMORY_SHARE * total - line.intercept) / line.slope))

    def _time_alone(self, items: int, context: Context) -> _Step:
        batch_size, params = self.size(items)
        alone = replace(context, batch_size=batch_size, rank=0, world_size=1)
        return self._time(alone, params, items)

    def _time(self, context: Context, params: Parameters, items: int) -> _Step:
        context = replace(context, replicas=Replicas(), parts=PartTimes())
        on_gpu = context.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(context.device)
        with self.build(context, params, items) as workload:
            seconds = _step_s(workload, context)
            peak_bytes = torch.cuda.max_memory_allocated(context.device) if on_gpu else 0
        return _Step(seconds=seconds, peak_bytes=peak_bytes)

    def _time_exchange(self, members: Sequence[bool], equal_s: Sequence[float]) -> float:
        """Time what communication adds to a step of equal shares, on devices that are not slowed.

        equal_s: of each rank, its own such step.
        """
        if sum(members) < 2:
            return 0.0
        shares = [self.equal_items * is_member for is_member in members]
        context = replace(self.context_among(shares), extra_work=0.0, sms=None)
        items = shares[self.context.rank]
        found = self._time(context, self.size(self.equal_items)[1], items).seconds
        own = [s for s, is_member in zip(equal_s, members, strict=True) if is_member]
        return max(0.0, float(max(gather(found if items else 0.0))) - max(own))


def _grain(batch_size: int) -> int:
    """Return the largest power of two that divides the batch and is a small share of it."""
    grain = 1
    while 2 * grain <= _GRAIN * batch_size and batch_size % (2 * grain) == 0:
        grain *= 2
    return grain


def gather(value: Any) -> list[Any]:
    """Gather a plain value of each rank, in rank order."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _step_s(workload: Workload, context: Context) -> float:
    """Return the median of steps in seconds, after others that warm up."""
    timer, is_alone = make_timer(context.device), context.world_size == 1

    def block_ns(steps: int) -> float:
        if not is_alone:
            align_ranks(context.device)
        samples = timer.block(workload.step, steps, context.parts, lead_in=1)
        return statistics.median(samples.step_ns)

    def count(budget_ns: int, step_ns: float) -> int:
        # Ranks that communicate run equally many.
        (longest_ns,) = (
            [round(step_ns)] if is_alone else slowest_rank_ns([round(step_ns)], context.device)
        )
        return min(_MOST_STEPS, max(_FEWEST_STEPS, budget_ns // max(1, longest_ns)))

    trial_ns = block_ns(_TRIAL_STEPS)
    warm_ns = block_ns(count(_WARMUP_NS, trial_ns))
    return block_ns(count(_TIMED_NS, warm_ns)) / _NS_PER_S
