"""Who does how much of an uneven step: this rank's part of it, from what probes of all devices say.

Each rank works out the same shares from the same figures. Shares by speed are then measured, each
rank's own step alone, and corrected by how long the ranks would wait for the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from raybench.errors import UsageError
from raybench.job.point import BY_ACCUMULATION, BY_SPEED, EQUAL, FAST, Point, Precision, SlowBy
from raybench.measure.probes import GroupProbe, Idle, Make, Parameters, StepMaker, gather
from raybench.records import RankShare
from raybench.stats.shares import (
    Shares,
    balance,
    crossover_batch,
    equal_shares,
    fast_shares,
)
from raybench.workloads.base import Context, Workload

_MS_PER_S = 1e3
# Beyond these the gradients are other ones; loss weights are rounded to the format of the losses.
_GRADIENT_TOLERANCE = {Precision.FP32: 1e-4}
_LOOSE_GRADIENT_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenStep:
    """A rank's part of an uneven step.

    context, params: what its workload is built with. shares: samples of each rank.
    """

    context: Context
    params: Parameters
    shares: Shares
    share: RankShare
    warnings: tuple[str, ...]

    def build(self, make: Make) -> Workload:
        """Build the workload; one that does nothing on a rank without a share."""
        return make(self.context, self.params) if self.share.items else Idle()


class Sharing:
    """Shares out the steps of the points that a worker runs, and remembers what its probes found.

    All ranks of a point call it together.
    """

    def __init__(self) -> None:
        self._group_probes: dict[object, GroupProbe] = {}

    def share_out(self, make: Make, context: Context, point: Point, group: object) -> UnevenStep:
        """Probe the devices, where that was not done, and find this rank's part of the step.

        group: of the ranks; another one has other devices.
        Raises UsageError where the step cannot be shared out so.
        """
        maker = StepMaker(make=make, context=_slow(context), point=point)
        key = (group, *_what_probes_depend_on(point))
        if key not in self._group_probes:
            self._group_probes[key] = maker.probe_group()
        return _share_out(maker, self._group_probes[key])


def _slow(context: Context) -> Context:
    """Slow this rank, where it is one of the last ones that the point wants slow."""
    if context.slow_ratio == 1 or context.rank < context.world_size - context.slow_count:
        return context
    if context.slow_by is SlowBy.COMPUTE:
        return replace(context, extra_work=1 / context.slow_ratio - 1)
    if context.device.type != "cuda":
        raise UsageError("slow_by: sms needs CUDA devices; take slow_by: compute")
    device = torch.cuda.get_device_properties(context.device)
    return replace(context, sms=max(1, round(context.slow_ratio * device.multi_processor_count)))


def _what_probes_depend_on(point: Point) -> tuple[object, ...]:
    by_passes = point.shares == BY_ACCUMULATION
    execution = {**point.execution, "shares": by_passes}
    return (point.workload, *point.params.items(), point.batch_size, *execution.values())


def _share_out(maker: StepMaker, group_probe: GroupProbe) -> UnevenStep:
    rank = maker.context.rank
    shares, own_s = _choose(maker, group_probe)
    context, params = maker.context_among(shares), maker.size(shares[rank])[1]
    with maker.build(context, params, shares[rank]) as workload:
        error = gather(_gradient_error(workload))[shares.index(max(shares))]
        has_batch_norm = _has_batch_norm(workload)
    exchange_s = group_probe.exchange_s if all(shares) else group_probe.fast_exchange_s
    probe = group_probe.probes[rank]
    share = RankShare(
        items=shares[rank],
        own_ms=own_s[rank] * _MS_PER_S if shares[rank] else None,
        fixed_ms=probe.speed.fixed_s * _MS_PER_S,
        fixed_ms_error=probe.fixed_s_error * _MS_PER_S,
        items_per_s=probe.speed.items_per_s,
        items_per_s_error=probe.items_per_s_error,
        slow_ratio=probe.slow_ratio,
        exchange_ms=exchange_s * _MS_PER_S,
        predicted_step_ms=(max(own_s) + exchange_s) * _MS_PER_S,
        crossover_batch=crossover_batch(
            group_probe.speeds,
            group_probe.are_fast,
            exchange_s=group_probe.exchange_s,
            fast_exchange_s=group_probe.fast_exchange_s,
        ),
        gradient_error=error,
    )
    warnings = tuple(_warnings(maker, share, has_batch_norm=has_batch_norm))
    return UnevenStep(context=context, params=params, shares=shares, share=share, warnings=warnings)


def _choose(maker: StepMaker, group_probe: GroupProbe) -> tuple[Shares, tuple[float, ...]]:
    """Choose the samples of each rank; beside them each rank's own step in seconds, measured."""
    kind, batch = maker.point.shares, maker.equal_items * len(group_probe.probes)
    if kind in (BY_SPEED, BY_ACCUMULATION):
        try:
            return balance(group_probe.speeds, batch, maker.unit, partial(_time_each_alone, maker))
        except ValueError as error:
            raise UsageError(f"shares: {kind}: {error}") from error
    if kind == EQUAL:
        shares = equal_shares(len(group_probe.probes), batch, maker.unit)
    elif kind == FAST:
        shares = fast_shares(group_probe.are_fast, batch, maker.unit)
    else:
        shares = tuple(map(int, kind.split("/")))
    return shares, _time_each_alone(maker, shares)


def _time_each_alone(maker: StepMaker, shares: Shares) -> tuple[float, ...]:
    return tuple(gather(maker.time_alone(shares[maker.context.rank])))


def is_other_gradient(error: float | None, precision: Precision) -> bool:
    """Whether gradients differ from those of one process by more than rounding does."""
    most = _GRADIENT_TOLERANCE.get(precision, _LOOSE_GRADIENT_TOLERANCE)
    return error is not None and error > most


def _gradient_error(workload: Workload) -> float | None:
    return None if workload.gradient_error is None else float(workload.gradient_error())


def _has_batch_norm(workload: Workload) -> bool:
    model = workload.model
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm) for m in modules)


def _warnings(maker: StepMaker, share: RankShare, *, has_batch_norm: bool) -> Iterator[str]:
    point = maker.point
    if share.slow_ratio is not None:
        by = "extra compute" if point.slow_by is SlowBy.COMPUTE else f"{maker.context.sms} SMs"
        yield (
            f"rank {maker.context.rank} emulates a slower device by {by}: {point.slow_ratio:g} of "
            f"its own speed asked, {share.slow_ratio:.3f} measured"
        )
    if has_batch_norm:
        yield (
            "BatchNorm's statistics are those of each rank's own samples: with shares of different "
            "size the gradients are not those of one process; take SyncBatchNorm or GroupNorm"
        )
    if is_other_gradient(share.gradient_error, point.precision) and not has_batch_norm:
        yield (
            f"the gradients differ from those of one process by {share.gradient_error:.1%}: is the "
            "loss multiplied by context.loss_weight?"
        )
