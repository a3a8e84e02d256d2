"""Uneven steps: devices are probed alone, and each rank gets its share of the samples of a step.

A probe is the step itself at several sizes, without communication, on all ranks at the same time.
Slow devices that are emulated are probed with and without emulation, so that the factor is known.
All ranks gather the same figures and work out the same shares (`raybench.stats.shares`). Shares by
speed are then measured, each rank's own step alone, and corrected by how long the ranks would wait
for the last one.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from raybench.conversion import MS_PER_S, NS_PER_S
from raybench.errors import UsageError
from raybench.job.point import (
    BY_ACCUMULATION,
    BY_SPEED,
    EQUAL,
    FAST,
    Point,
    Precision,
    Scalar,
    SlowBy,
)
from raybench.measure.instruments import (
    Timer,
    align_ranks,
    gather_objects,
    max_over_ranks,
    workload_stream,
)
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import RankShare
from raybench.stats.shares import (
    DeviceSpeed,
    Shares,
    balance,
    crossover_batch,
    equal_shares,
    fast_devices,
    fast_shares,
    fit_line,
)
from raybench.workloads.base import Context, PartTimes, Replicas, Workload

Parameters = Mapping[str, Scalar]
BuildWorkload = Callable[[Context, Parameters], Workload]

# Sizes of the probe's steps, over an equal share.
_SIZES = (0.5, 1.0, 1.5, 2.0)
_TRIAL_STEPS = 2
_WARMUP_NS, _TIMED_NS = 100_000_000, 150_000_000
_FEWEST_STEPS, _MOST_STEPS = 3, 200
# Batches are multiples of a power of two, up to this share of an equal batch: on an H200 a step of
# 1025 rows takes 19 % longer than one of 1024 (tf32, mlp).
_GRAIN = 1 / 64
# Of the device's memory: what a share may take by the line through the probe's peaks.
_MEMORY_SHARE = 0.9
# A larger difference of gradients is no rounding. In lower precisions than fp32 it is larger: loss
# weights are rounded to the format of the losses.
_FP32_TOLERANCE, _LOOSE_TOLERANCE = 1e-4, 0.03


class Idle(Workload):
    """The workload of a rank that has no share of the step: it does nothing."""

    items_per_step = 0

    def step(self) -> None:
        """Do nothing."""

    def set_comm_hook(self, hook: object) -> None:
        """Do nothing: there are no gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenStep:
    """A rank's part of an uneven step.

    context, params: what its workload is built with, inside of `workload_stream(context)`.
    shares: samples of each rank, in rank order.
    """

    context: Context
    params: Parameters
    shares: Shares
    share: RankShare
    doubts: tuple[Doubt, ...]

    def build(self, make: BuildWorkload) -> Workload:
        """Return a new workload, an `Idle` without a share; all ranks must call it and close it."""
        return make(self.context, self.params) if self.share.items else Idle()


def share_out(
    make: BuildWorkload,
    context: Context,
    point: Point,
    group: object,
    known: dict[object, GroupProbe],
) -> UnevenStep:
    """Return this rank's part of the step of a point that `is_uneven`; all ranks must call it.

    The devices are probed first, unless `known`, alike on all ranks, has the probe of a point with
    the same steps; a new one is added. group: a hashable name of these ranks and their devices.
    context: of this rank among all, without emulation. A process group formed here stays. Raises
    UsageError where the step cannot be shared or devices slowed as asked, and what the workload
    raises: torch.OutOfMemoryError where its or an equal share does not fit.
    """
    rank = context.rank
    # The last ranks are slow.
    if point.slow_ratio != 1 and rank >= context.world_size - point.slow_count:
        if point.slow_by is SlowBy.COMPUTE:
            context = replace(context, extra_work=1 / point.slow_ratio - 1)
        elif context.device.type != "cuda":
            raise UsageError("slow_by: sms needs CUDA devices; take slow_by: compute")
        else:
            count = torch.cuda.get_device_properties(context.device).multi_processor_count
            context = replace(context, sms=max(1, round(point.slow_ratio * count)))
    maker = StepMaker(make=make, context=context, point=point)
    execution = {**point.execution, "shares": point.shares == BY_ACCUMULATION}
    key = (group, point.workload, *point.params.items(), point.batch_size, *execution.values())
    if key not in known:
        known[key] = maker.probe_group()
    group_probe = known[key]
    shares, own_s = _choose_shares(maker, group_probe)
    context, params = maker.context_among(shares), maker.size(shares[rank])[1]
    with maker.build(context, params, shares[rank]) as workload:
        check = workload.gradient_error
        own_error = None if check is None else float(check())
        error = gather_objects(own_error)[shares.index(max(shares))]
        modules = workload.model.modules() if isinstance(workload.model, nn.Module) else ()
        has_batch_norm = any(
            isinstance(one, _BatchNorm) and not isinstance(one, SyncBatchNorm) for one in modules
        )
    exchange_s = group_probe.exchange_s if all(shares) else group_probe.fast_exchange_s
    probe = group_probe.probes[rank]
    share = RankShare(
        items=shares[rank],
        fixed_ms=probe.speed.fixed_s * MS_PER_S,
        items_per_s=probe.speed.items_per_s,
        slow_ratio=probe.slow_ratio,
        exchange_ms=exchange_s * MS_PER_S,
        predicted_step_ms=(max(own_s) + exchange_s) * MS_PER_S,
        crossover_batch=crossover_batch(
            [one.speed for one in group_probe.probes],
            group_probe.are_fast,
            exchange_s=group_probe.exchange_s,
            fast_exchange_s=group_probe.fast_exchange_s,
        ),
        gradient_error=error,
    )
    doubts = tuple(_doubts(maker, share, has_batch_norm=has_batch_norm))
    return UnevenStep(context=context, params=params, shares=shares, share=share, doubts=doubts)


def _choose_shares(maker: StepMaker, group_probe: GroupProbe) -> tuple[Shares, tuple[float, ...]]:
    """Return the samples of each rank, and the measured seconds of each rank's own step.

    All ranks must call it. Raises UsageError where shares by speed are not possible.
    """

    def time_each_alone(shares: Shares) -> tuple[float, ...]:
        items = shares[maker.context.rank]
        own_s = maker.time_alone(items, maker.context)[0] if items else 0.0
        return tuple(gather_objects(own_s))

    kind, batch = maker.point.shares, maker.equal_items * len(group_probe.probes)
    speeds = [probe.speed for probe in group_probe.probes]
    if kind in (BY_SPEED, BY_ACCUMULATION):
        try:
            return balance(speeds, batch, maker.unit, time_each_alone)
        except ValueError as error:
            raise UsageError(f"shares: {kind}: {error}") from error
    if kind == EQUAL:
        shares = equal_shares(len(group_probe.probes), batch, maker.unit)
    elif kind == FAST:
        shares = fast_shares(group_probe.are_fast, batch, maker.unit)
    else:
        shares = tuple(map(int, kind.split("/")))
    return shares, time_each_alone(shares)


def gradient_doubt(error: float | None, precision: Precision) -> Doubt | None:
    """Return a doubt if gradients differ from those of one process by more than rounding.

    Args:
        error: relative difference; NaN is a doubt, None is unknown.
    """
    limit = _FP32_TOLERANCE if precision is Precision.FP32 else _LOOSE_TOLERANCE
    if error is None or error <= limit:
        return None
    return Doubt(kind=DoubtKind.OTHER_GRADIENTS, value=error, limit=limit)


def _doubts(maker: StepMaker, share: RankShare, *, has_batch_norm: bool) -> Iterator[Doubt]:
    """Yield a doubt about emulation, BatchNorm and gradients, each where it applies."""
    point = maker.point
    if share.slow_ratio is not None:
        yield Doubt(
            kind=DoubtKind.EMULATED,
            value=share.slow_ratio,
            limit=point.slow_ratio,
            subject=f"rank {maker.context.rank}",
        )
    if has_batch_norm:
        yield Doubt(kind=DoubtKind.BATCH_NORM)
    elif (doubt := gradient_doubt(share.gradient_error, point.precision)) is not None:
        yield doubt


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedProbe:
    """The measured speed of one rank's device.

    speed: with the emulation, by steps of several sizes, with a line through them.
    equal_s: seconds of a step of an equal share, without emulation. slow_ratio: the speed that
    emulation leaves the device, as a share of its own; None without emulation.
    """

    speed: DeviceSpeed
    equal_s: float
    slow_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProbe:
    """The measured speeds of the devices of a group, in rank order.

    exchange_s, fast_exchange_s: the seconds that the exchange of gradients adds to a step, among
    all ranks and among the fast ones, by steps of equal shares on devices that are not slowed.
    """

    probes: tuple[SpeedProbe, ...]
    are_fast: tuple[bool, ...]
    exchange_s: float
    fast_exchange_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMaker:
    """Builds and times the step of a point with any number of samples on this rank.

    make: builds the workload. context: of this rank among all, with the emulation that it is to
    have. items: samples of a step, a multiple of its passes; with shares by accumulation of `unit`.
    """

    make: BuildWorkload
    context: Context
    point: Point

    @property
    def _context_at_full_speed(self) -> Context:
        """The context of this rank without emulation."""
        return replace(self.context, extra_work=0.0, sms=None)

    @property
    def equal_items(self) -> int:
        """Samples of a step per rank with equal shares, over all its forward passes."""
        return (self.point.batch_size or 1) * self.point.grad_accumulation

    @property
    def unit(self) -> int:
        """The number of samples of which each share that is worked out is a multiple.

        The point's batch_size for shares by accumulation. Else the accumulation times the largest
        power of two that divides batch_size and is at most a 64th of it, or 1 if that is below 1.
        """
        batch_size = self.point.batch_size or 1
        if self.point.shares == BY_ACCUMULATION:
            return batch_size
        most = 2 ** int(math.log2(max(1, _GRAIN * batch_size)))
        return self.point.grad_accumulation * math.gcd(batch_size, most)

    def size(self, items: int) -> tuple[int, Parameters]:
        """Return batch size and parameters of a step of `items` samples, in equal passes."""
        params = self.point.params
        if self.point.shares != BY_ACCUMULATION:
            return items // self.point.grad_accumulation, params
        return self.unit, {**params, "grad_accumulation": items // self.unit}

    @contextmanager
    def build(self, context: Context, params: Parameters, items: int) -> Iterator[Workload]:
        """Yield a workload, an `Idle` for 0 `items`, on its stream; then close it.

        context, params: as `context_among` and `size` give them; all ranks of the context must call
        it. Raises what the workload raises, and as `workload_stream`.
        """
        with workload_stream(context):
            workload = self.make(context, params) if items else Idle()
            try:
                yield workload
            finally:
                workload.close()
                context.replicas.forget()
                del workload
                gc.collect()

    def context_among(self, shares: Sequence[int]) -> Context:
        """Return the context in which this rank builds its share; all ranks must call it.

        shares: samples of each rank, 0 for none. The context has rank and world size among the
        ranks with a share, and the batch size and loss weight of this share. If only some, but more
        than one, have a share, they get a new process group, which stays. The context of a rank
        without a share is only for an `Idle`: it has the old rank, and no emulation.
        """
        ranks = [rank for rank, items in enumerate(shares) if items]
        group = dist.new_group(ranks) if 1 < len(ranks) < len(shares) else None
        rank = self.context.rank
        if not shares[rank]:
            return replace(self._context_at_full_speed, world_size=len(ranks))
        return replace(
            self.context,
            batch_size=self.size(shares[rank])[0],
            rank=ranks.index(rank),
            world_size=len(ranks),
            process_group=group,
            loss_weight=len(ranks) * shares[rank] / sum(shares),
        )

    def probe_group(self) -> GroupProbe:
        """Return what a probe of devices and gradient exchange measures; all ranks must call it.

        If slow devices are emulated, the first ranks are the fast ones, else those above the
        largest gap in speed, all if no gap is above 3 %. If several are fast, but not all, a new
        process group of them stays. Raises as `build`: torch.OutOfMemoryError if memory is short.
        """
        probes = gather_objects(self._probe())
        if self.point.slow_ratio == 1:
            # By steps of an equal share, which are known better than lines.
            are_fast = fast_devices([1 / probe.equal_s for probe in probes])
        else:
            first_slow = len(probes) - self.point.slow_count
            are_fast = tuple(rank < first_slow for rank in range(len(probes)))
        equal_s = [probe.equal_s for probe in probes]
        exchange_s = self._time_exchange((True,) * len(probes), equal_s)
        fast_exchange_s = exchange_s if all(are_fast) else self._time_exchange(are_fast, equal_s)
        return GroupProbe(
            probes=tuple(probes),
            are_fast=are_fast,
            exchange_s=exchange_s,
            fast_exchange_s=fast_exchange_s,
        )

    def _probe(self) -> SpeedProbe:
        """Return this device's speed by steps of several sizes, on this rank alone.

        With its emulation, and without for `slow_ratio`. Sizes that do not fit the memory are left
        out. Raises torch.OutOfMemoryError where an equal share does not fit.
        """
        full_s: dict[int, float] = {}
        own_s: dict[int, float] = {}
        peaks_bytes: dict[int, int] = {}
        is_slow = self.context != self._context_at_full_speed
        units = self.equal_items // self.unit
        for count in sorted({max(1, round(size * units)) for size in _SIZES}):
            items = count * self.unit
            try:
                # In turn, so that a device that warms up does so in both.
                step = at_full_speed = self.time_alone(items, self._context_at_full_speed)
                if is_slow:
                    step = self.time_alone(items, self.context)
            except torch.OutOfMemoryError:
                if items <= self.equal_items:
                    raise
                break
            full_s[items], (own_s[items], peaks_bytes[items]) = at_full_speed[0], step
        most = None
        if self.context.device.type == "cuda" and len(own_s) > 1:
            # About how many the device's memory holds, by a line through the peaks.
            fixed_bytes, item_bytes = fit_line(list(peaks_bytes.items()))
            total = torch.cuda.get_device_properties(self.context.device).total_memory
            most = max(0, int((_MEMORY_SHARE * total - fixed_bytes) / item_bytes))
        steps = tuple(own_s.items())
        fixed_s, item_s = fit_line(steps)
        return SpeedProbe(
            speed=DeviceSpeed(fixed_s=fixed_s, items_per_s=1 / item_s, most=most, steps=steps),
            equal_s=full_s[self.equal_items],
            slow_ratio=statistics.median(full_s[n] / s for n, s in steps) if is_slow else None,
        )

    def time_alone(self, items: int, context: Context) -> tuple[float, int]:
        """Return the median seconds of a step of `items` samples on this rank alone.

        Also the peak bytes of torch's allocator, which is reset before; 0 on a CPU. context: of
        this rank, slowed or not. Raises as `build`: torch.OutOfMemoryError if memory is short.
        """
        batch_size, params = self.size(items)
        alone = replace(context, batch_size=batch_size, rank=0, world_size=1)
        return self._time(alone, params, items)

    def _time(self, context: Context, params: Parameters, items: int) -> tuple[float, int]:
        """Return the median seconds of this rank's step, and its peak of torch's allocator.

        The peak is in bytes, 0 on a CPU. For a context of several ranks all ranks must call it,
        also those outside: they run equally many steps. The workload is built for it, warmed up and
        closed; torch's counter of peak memory is reset.
        """
        context = replace(context, replicas=Replicas(), parts=PartTimes())
        device, is_alone, peak_bytes = context.device, context.world_size == 1, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with self.build(context, params, items) as workload:
            timer = Timer(device)

            def block_ns(steps: int) -> float:
                """Return this rank's median ns of a step in a block, which all begin together."""
                if not is_alone:
                    align_ranks(device)
                samples = timer.time_block(workload.step, steps, context.parts, lead_in=1)
                return statistics.median(samples.step_ns)

            # The budget of each block is for steps as long as in the block before.
            step_ns = block_ns(_TRIAL_STEPS)
            for budget_ns in (_WARMUP_NS, _TIMED_NS):
                own_ns = [round(step_ns)]
                # Ranks that communicate run equally many.
                (longest_ns,) = own_ns if is_alone else max_over_ranks(own_ns, device)
                fits = budget_ns // max(1, longest_ns)
                step_ns = block_ns(min(_MOST_STEPS, max(_FEWEST_STEPS, fits)))
            if device.type == "cuda":
                peak_bytes = torch.cuda.max_memory_allocated(device)
        return step_ns / NS_PER_S, peak_bytes

    def _time_exchange(self, members: Sequence[bool], equal_s: Sequence[float]) -> float:
        """Return the seconds that communication adds to a step of equal shares at full speed.

        All ranks must call it. 0 at least. members: of each rank, whether it takes part; fewer than
        two exchange nothing. equal_s: such a step of each rank alone.
        """
        if sum(members) < 2:
            return 0.0
        shares = [self.equal_items * is_member for is_member in members]
        context = replace(self.context_among(shares), extra_work=0.0, sms=None)
        items = shares[self.context.rank]
        found = self._time(context, self.size(self.equal_items)[1], items)[0]
        alone = [s for s, is_member in zip(equal_s, members, strict=True) if is_member]
        return max(0.0, float(max(gather_objects(found if items else 0.0))) - max(alone))
