"""Where a step's time goes: instrumented steps, run after the timed ones.

With events and hooks only. A profiler would tell more, but once CUPTI was in use the later
launches of the process stay slower (pytorch#144455).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from raybench.measure.buckets import BucketMarks, comm_ms, tail_ms
from raybench.measure.device_time import OptimizerMarks, queued_steps
from raybench.measure.timing import Timer, align_ranks, no_garbage_collection
from raybench.records import Breakdown
from raybench.workloads.base import Context, Workload

SetHook = Callable[[Any], None]

_WARMUP_STEPS = 2
_NS_PER_MS = 1e6

_ALL = (
    "local_step_ms",
    "compute_ms",
    "comm_ms",
    "comm_exposed_ms",
    "wait_ms",
    "optimizer_ms",
    "host_gap_ms",
)
_GRAPH = "unknown: steps replayed from a CUDA graph are not taken apart"
_IS_COMMUNICATION = "none: the step itself is communication"
_NO_BUCKETS = "unknown: DistributedDataParallel reduced no gradients"
_ON_CPU = "none: on a CPU the host computes"
_TOO_SLOW = "unknown: the host needs too long to queue a whole step"
_NO_OPTIMIZER = "none: no optimizer of torch.optim stepped"
_REDUCED = {
    "comm_ms": "each bucket of gradients from ready to reduced, minimum over ranks",
    "comm_exposed_ms": "step less the same step with DDP's noop_hook",
    "wait_ms": "last gradient ready to last one reduced, less the minimum over ranks",
    "slowest_rank": "waits least in the last collective",
}


def break_down(workload: Workload, timer: Timer, context: Context, steps: int) -> Breakdown:
    """Run instrumented steps on all ranks: `steps` with timed communication, `steps` without
    communication and, on a GPU, `steps` whose work is queued beforehand; a few more to warm up.

    The workload is used up: if it has peers, its gradients are not reduced any more.
    """
    if context.cuda_graph:
        return Breakdown(methods=dict.fromkeys(_ALL, _GRAPH))
    with no_garbage_collection():
        if context.world_size == 1:
            return _local(workload, timer, context, steps, _Communication())
        set_hook = hook_setter(workload, context)
        if isinstance(set_hook, str):
            return Breakdown(methods=dict.fromkeys(_ALL, set_hook))
        communication = _communication(workload, set_hook, context, steps)
        set_hook(noop_hook)
        return _local(workload, timer, context, steps, communication)


def hook_setter(workload: Workload, context: Context) -> SetHook | str:
    """What lets gradients go another way: the workload's own, or that of the models that the
    context has wrapped; why there is none.
    """
    own: SetHook | None = getattr(workload, "set_comm_hook", None)
    return own or context.replicas.why_no_hook() or context.replicas.set_comm_hook


@dataclass(frozen=True, slots=True, kw_only=True)
class _Communication:
    """An entry per step; empty where there was none."""

    comm_ms: tuple[float, ...] = ()
    tail_ms: tuple[float, ...] = ()
    methods: Mapping[str, str] = field(default_factory=dict)


def _communication(
    workload: Workload, set_hook: SetHook, context: Context, steps: int
) -> _Communication:
    """Steps whose buckets are timed, one after the other as the timed ones are: ranks that are
    brought together before each step would differ by the jitter of their hosts.
    """
    marks = BucketMarks(context.device)
    set_hook(marks.hook)
    for _ in range(_WARMUP_STEPS):
        workload.step()
    marks.end_step()
    align_ranks(context.device)
    for _ in range(steps):
        workload.step()
        marks.end_step()
    _synchronize(context.device)
    timed = marks.take()[1:]
    if not all(timed):
        return _Communication(methods=dict.fromkeys(_REDUCED, _NO_BUCKETS))
    return _Communication(
        comm_ms=tuple(comm_ms(buckets) for buckets in timed),
        tail_ms=tuple(tail_ms(buckets) for buckets in timed),
        methods=_REDUCED,
    )


def _local(
    workload: Workload, timer: Timer, context: Context, steps: int, communication: _Communication
) -> Breakdown:
    """Steps without communication: how long they take, and the device for them."""
    on_gpu = context.device.type == "cuda"
    for _ in range(_WARMUP_STEPS):
        workload.step()
    optimizer = OptimizerMarks(context.device)
    if on_gpu:
        local_ms = _median_ms(timer, workload.step, context, steps)
        device_ms = queued_steps(workload.step, optimizer, local_ms, steps)
    else:
        with optimizer.watching():
            local_ms = _median_ms(timer, optimizer.watched(workload.step), context, steps)
        device_ms = None
    optimizer_ms = optimizer.median_ms()
    return Breakdown(
        local_step_ms=local_ms,
        device_ms=device_ms,
        optimizer_ms=optimizer_ms,
        comm_ms=communication.comm_ms,
        tail_ms=communication.tail_ms,
        methods={
            **_local_methods(context, queued=device_ms is not None),
            **({} if optimizer_ms is not None else {"optimizer_ms": _NO_OPTIMIZER}),
            **communication.methods,
        },
    )


def _median_ms(timer: Timer, step: Callable[[], None], context: Context, steps: int) -> float:
    align_ranks(context.device)
    samples = timer.block(step, steps, context.parts)
    return statistics.median(samples.step_ns) / _NS_PER_MS


def _local_methods(context: Context, *, queued: bool) -> dict[str, str]:
    local = "step with DDP's noop_hook" if context.world_size > 1 else "the step as it is"
    if context.device.type != "cuda":
        return {
            "local_step_ms": local,
            "compute_ms": "local step less data_ms and optimizer_ms",
            "optimizer_ms": "host clock around Optimizer.step",
            "host_gap_ms": _ON_CPU,
        }
    if not queued:
        return {
            "local_step_ms": local,
            **dict.fromkeys(("compute_ms", "optimizer_ms", "host_gap_ms"), _TOO_SLOW),
        }
    return {
        "local_step_ms": local,
        "compute_ms": "device's time for the local step, queued beforehand, less optimizer_ms",
        "optimizer_ms": "CUDA events around Optimizer.step, queued beforehand",
        "host_gap_ms": "local step less the same step queued beforehand",
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
