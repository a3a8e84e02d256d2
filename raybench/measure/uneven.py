"""Uneven steps: probe the speed of each device, and give each rank its share of the samples.

A probe times the step itself at several sizes, without communication, on all ranks at the same
time. Emulated slow devices are probed with and without emulation, so the real factor is known. All
ranks gather the same figures and compute the same shares (`raybench.stats.shares`). Shares by speed
are then timed without communication and corrected, so that all ranks finish at the same time.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from raybench.conversion import MS_PER_S, NS_PER_S
from raybench.errors import UsageError
from raybench.job.point import BY_ACCUMULATION, BY_SPEED, EQUAL, FAST, Point
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
from raybench.workloads.part import BuildWorkload, Parameters, StepKind, WorkloadPart
from raybench.workloads.training import gradient_doubt
from raybench.workloads.uneven import DividedStep, Idle, has_batch_norm, slow_down

# Sizes of the probe's steps, as multiples of an equal share.
_PROBE_SIZES = (0.5, 1.0, 1.5, 2.0)
# Steps from which to learn the duration of a step.
_TRIAL_STEPS = 2
_WARMUP_NS, _TIMED_NS = 100_000_000, 150_000_000
_FEWEST_STEPS, _MOST_STEPS = 3, 200
# The part of the device's memory that a share may need.
_MEMORY_SHARE = 0.9


def share_out(
    make: BuildWorkload,
    context: Context,
    point: Point,
    group: object,
    probes: dict[object, GroupProbe],
) -> WorkloadPart:
    """Choose how many items each rank gets, and return this rank's part of the step. Collective.

    If a probe forms a process group of the fast ranks, the group is not destroyed.

    Args:
        context: this rank among all ranks, without emulation.
        group: a hashable name of the ranks and their devices.
        probes: probes of earlier points, equal on all ranks; a new probe is added.

    Raises:
        UsageError: these shares, or this emulation of slow devices, are not possible.
        torch.OutOfMemoryError: this rank's share or an equal share does not fit.
    """
    rank = context.rank
    step = DividedStep(context=slow_down(context, point), point=point)
    prober = StepProber(make=make, step=step)
    # A probe times steps of several sizes, so it is valid for all ways to share. Only shares by
    # accumulation need a probe of their own, because they change the number of passes.
    execution = {**point.execution, "shares": point.shares == BY_ACCUMULATION}
    step_settings = (point.workload, *point.params.items(), point.batch_size, *execution.values())
    probe_key = (group, *step_settings)
    if probe_key not in probes:
        probes[probe_key] = prober.probe_group()
    group_probe = probes[probe_key]
    shares, local_steps_s = _choose_shares(prober, group_probe)

    # Check the gradients of the chosen shares. A rank without a share has no gradients, so all
    # ranks use the error on the rank with the largest share.
    share_context, params = step.context_among(shares), step.size(shares[rank]).params
    with prober.build(share_context, params, shares[rank]) as workload:
        check = workload.gradient_error
        local_error = None if check is None else float(check())
        rank_of_largest_share = shares.index(max(shares))
        gradient_error = gather_objects(local_error)[rank_of_largest_share]
        with_batch_norm = has_batch_norm(workload)

    # Ranks without a share exchange no gradients; usually these are the slow ranks.
    exchange_s = group_probe.exchange_s if all(shares) else group_probe.fast_exchange_s
    probe = group_probe.probes[rank]
    share = RankShare(
        items=shares[rank],
        fixed_ms=probe.speed.fixed_s * MS_PER_S,
        items_per_s=probe.speed.items_per_s,
        slow_ratio=probe.slow_ratio,
        exchange_ms=exchange_s * MS_PER_S,
        predicted_step_ms=(max(local_steps_s) + exchange_s) * MS_PER_S,
        crossover_batch=crossover_batch(
            [probe.speed for probe in group_probe.probes],
            group_probe.are_fast,
            exchange_s=group_probe.exchange_s,
            fast_exchange_s=group_probe.fast_exchange_s,
        ),
        gradient_error=gradient_error,
    )
    kind = StepKind(
        workload=point.workload,
        params=tuple(params.items()),
        batch_size=point.batch_size,
        shares=shares,
    )
    return WorkloadPart(
        make=make if share.items else _make_idle,
        context=share_context,
        kind=kind,
        share=share,
        doubts=tuple(_share_doubts(step, share, has_batch_norm=with_batch_norm)),
    )


def _make_idle(context: Context, params: Parameters) -> Workload:
    return Idle()


def _choose_shares(prober: StepProber, group_probe: GroupProbe) -> tuple[Shares, tuple[float, ...]]:
    """Return each rank's samples, and the seconds of its step without communication. Collective."""
    step = prober.step

    def time_local_steps(shares: Shares) -> tuple[float, ...]:
        items = shares[step.context.rank]
        local_step_s = prober.time_alone(items, step.context).step_s if items else 0.0
        return tuple(gather_objects(local_step_s))

    setting = step.point.shares
    world_size = len(group_probe.probes)
    all_items = step.equal_items * world_size  # samples of all ranks in a step
    # Every share is a multiple of `step.unit` samples.
    if setting in (BY_SPEED, BY_ACCUMULATION):
        speeds = [probe.speed for probe in group_probe.probes]
        try:
            return balance(speeds, all_items, step.unit, time_local_steps)
        except ValueError as error:
            raise UsageError(f"shares: {setting}: {error}") from error
    if setting == EQUAL:
        shares = equal_shares(world_size, all_items, step.unit)
    elif setting == FAST:
        shares = fast_shares(group_probe.are_fast, all_items, step.unit)
    else:
        # The samples of each rank, such as 24/8.
        shares = tuple(map(int, setting.split("/")))
    return shares, time_local_steps(shares)


def _share_doubts(step: DividedStep, share: RankShare, *, has_batch_norm: bool) -> Iterator[Doubt]:
    """Yield doubts about an emulated device, BatchNorm layers and the gradients of a share."""
    point = step.point
    if share.slow_ratio is not None:
        yield Doubt(
            kind=DoubtKind.EMULATED,
            value=share.slow_ratio,
            limit=point.slow_ratio,
            subject=f"rank {step.context.rank}",
        )
    if has_batch_norm:
        # BatchNorm changes the gradients, so do not compare them.
        yield Doubt(kind=DoubtKind.BATCH_NORM)
        return
    doubt = gradient_doubt(share.gradient_error, point.precision)
    if doubt is not None:
        yield doubt


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedProbe:
    """The measured speed of one rank's device."""

    # With emulation if the job slows this device.
    speed: DeviceSpeed
    # Seconds of a step of an equal share, without emulation.
    equal_s: float
    # Speed with emulation / speed without emulation; None if the job does not slow this device.
    slow_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProbe:
    """The measured speeds of the devices of a group, in rank order."""

    probes: tuple[SpeedProbe, ...]
    are_fast: tuple[bool, ...]
    # Seconds that the exchange of gradients adds to a step of equal shares without emulation.
    exchange_s: float
    # The same with the fast ranks only.
    fast_exchange_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """The median duration and the peak memory of a step on this rank."""

    step_s: float
    # The peak of torch's allocator; 0 on a CPU.
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProber:
    """Builds and times a step with any number of samples on this rank."""

    make: BuildWorkload
    step: DividedStep

    @contextmanager
    def build(self, context: Context, params: Parameters, items: int) -> Iterator[Workload]:
        """Yield a workload on its stream, then close it. Collective among the context's ranks.

        Args:
            context: a result of `DividedStep.context_among`.
            params: a result of `DividedStep.size`.
            items: samples of the step; 0 yields an `Idle`.
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

    def probe_group(self) -> GroupProbe:
        """Probe the devices and the gradient exchange. Collective.

        The process group that times the exchange of the fast ranks is not destroyed.

        Raises:
            torch.OutOfMemoryError: an equal share does not fit.
        """
        point = self.step.point
        probes = gather_objects(self._probe())
        if point.slow_ratio == 1:
            # The durations of an equal share are more precise than the fitted lines.
            are_fast = fast_devices([1 / probe.equal_s for probe in probes])
        else:
            # The job emulates slow devices on the last ranks.
            first_slow_rank = len(probes) - point.slow_count
            are_fast = tuple(rank < first_slow_rank for rank in range(len(probes)))
        equal_s = [probe.equal_s for probe in probes]
        all_ranks = (True,) * len(probes)
        exchange_s = self._time_exchange(members=all_ranks, local_steps_s=equal_s)
        fast_exchange_s = exchange_s
        if not all(are_fast):
            fast_exchange_s = self._time_exchange(members=are_fast, local_steps_s=equal_s)
        return GroupProbe(
            probes=tuple(probes),
            are_fast=are_fast,
            exchange_s=exchange_s,
            fast_exchange_s=fast_exchange_s,
        )

    def _probe(self) -> SpeedProbe:
        """Time steps of several sizes on this rank, as far as they fit in memory."""
        # Steps without emulation, and with emulation if the job slows this device, by samples.
        full_speed_steps: dict[int, TimedStep] = {}
        steps: dict[int, TimedStep] = {}
        context, full_speed_context = self.step.context, self.step.context_at_full_speed
        is_slowed = context != full_speed_context
        # Sizes are whole numbers of units, each once, in ascending order.
        equal_units = self.step.equal_items // self.step.unit
        sizes_in_units = {max(1, round(size * equal_units)) for size in _PROBE_SIZES}
        for units in sorted(sizes_in_units):
            items = units * self.step.unit
            try:
                # Alternate, so that a device that warms up affects both series.
                full_speed_step = step = self.time_alone(items, full_speed_context)
                if is_slowed:
                    step = self.time_alone(items, context)
            except torch.OutOfMemoryError:
                if items <= self.step.equal_items:
                    raise
                break
            full_speed_steps[items], steps[items] = full_speed_step, step

        most_items = None
        if context.device.type == "cuda" and len(steps) > 1:
            # Estimate how many samples fit in memory, by a line through the peaks.
            peaks_bytes = [(items, step.peak_bytes) for items, step in steps.items()]
            fixed_bytes, item_bytes = fit_line(peaks_bytes)
            total = torch.cuda.get_device_properties(context.device).total_memory
            most_items = max(0, int((_MEMORY_SHARE * total - fixed_bytes) / item_bytes))
        steps_s = tuple((items, step.step_s) for items, step in steps.items())
        fixed_s, item_s = fit_line(steps_s)
        speed = DeviceSpeed(
            fixed_s=fixed_s, items_per_s=1 / item_s, most_items=most_items, steps=steps_s
        )
        ratios = [full_speed_steps[items].step_s / step_s for items, step_s in steps_s]
        return SpeedProbe(
            speed=speed,
            equal_s=full_speed_steps[self.step.equal_items].step_s,
            slow_ratio=statistics.median(ratios) if is_slowed else None,
        )

    def time_alone(self, items: int, context: Context) -> TimedStep:
        """Time a step of `items` samples on this rank, without communication.

        Raises:
            torch.OutOfMemoryError: the step does not fit.
        """
        batch_size, params = self.step.size(items)
        context = replace(context, batch_size=batch_size, rank=0, world_size=1)
        return self._time_step(context, params, items)

    def _time_step(self, context: Context, params: Parameters, items: int) -> TimedStep:
        """Build, warm up and time a step. Collective if the context has several ranks."""
        context = replace(context, replicas=Replicas(), parts=PartTimes())
        device, is_alone, peak_bytes = context.device, context.world_size == 1, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with self.build(context, params, items) as workload:
            timer = Timer(device)

            def median_step_ns(steps: int) -> float:
                if not is_alone:
                    align_ranks(device)
                samples = timer.time_block(workload.step, steps, context.parts, lead_in=1)
                return statistics.median(samples.step_ns)

            # The previous block tells how many steps fit into the budget of the next block.
            step_ns = median_step_ns(_TRIAL_STEPS)
            for budget_ns in (_WARMUP_NS, _TIMED_NS):
                longest_ns = round(step_ns)
                if not is_alone:  # ranks that communicate must run the same number of steps
                    (longest_ns,) = max_over_ranks([longest_ns], device)
                fitting = budget_ns // max(1, longest_ns)
                step_ns = median_step_ns(min(_MOST_STEPS, max(_FEWEST_STEPS, fitting)))
            if device.type == "cuda":
                peak_bytes = torch.cuda.max_memory_allocated(device)
        return TimedStep(step_s=step_ns / NS_PER_S, peak_bytes=peak_bytes)

    def _time_exchange(self, members: Sequence[bool], local_steps_s: Sequence[float]) -> float:
        """Return the seconds that communication adds to a step of equal shares. Collective.

        Args:
            members: whether each rank has a share.
            local_steps_s: each rank's seconds of the step without communication, at full speed.
        """
        if sum(members) < 2:
            return 0.0
        step = self.step
        shares = [step.equal_items if is_member else 0 for is_member in members]
        # Switch the emulation of slow devices off: the local steps ran at full speed, too.
        context = replace(step.context_among(shares), extra_work=0.0, sms=None)
        params = step.size(step.equal_items).params
        items = shares[step.context.rank]
        timed = self._time_step(context, params, items)
        slowest_step_s = float(max(gather_objects(timed.step_s if items else 0.0)))
        slowest_local_step_s = max(
            step_s for step_s, is_member in zip(local_steps_s, members, strict=True) if is_member
        )
        return max(0.0, slowest_step_s - slowest_local_step_s)
