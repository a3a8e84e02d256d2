"""Where the step of a script goes, as far as hooks tell: its gradients, and its optimizers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from raybench.measure.breakdown import ALL_COLUMNS, NO_BUCKETS, REDUCED, Extent
from raybench.measure.script_timing import ScriptTimer, StepsEndedError
from raybench.records import Breakdown
from raybench.workloads.base import Context, PartTimes
from raybench.workloads.scripts.process import ScriptEndedError
from raybench.workloads.scripts.running_script import RunningScript

# Loaded in the script's process alone.
_MARKS = "raybench.measure.script_marks"
_NS_PER_MS = 1e6
# The first step with another hook, and those with which a block begins.
_LEAD_IN = 3
_ENDED = "unknown: the script ended by itself before"
_NOT_QUEUED = "unknown: the steps of a script cannot be queued beforehand"
_WITH_GAPS = ", with the gaps that the host leaves"


def break_down_script(
    script: RunningScript, timer: ScriptTimer, context: Context, extent: Extent
) -> Breakdown:
    """Run instrumented steps of a script on all ranks: with timed communication, and without.

    The script is used up: its gradients are not reduced any more.
    """
    try:
        return _break_down(script, timer, context, extent)
    except StepsEndedError:
        return Breakdown(methods=dict.fromkeys(ALL_COLUMNS, _ENDED))


def _break_down(
    script: RunningScript, timer: ScriptTimer, context: Context, extent: Extent
) -> Breakdown:
    is_alone = context.world_size == 1
    reason = _mark_parts(script, has_peers=not is_alone)
    if shared := _first_reason(reason, context.world_size):
        return Breakdown(methods=dict.fromkeys(ALL_COLUMNS, shared))
    hooked_ms: tuple[float, ...] = ()
    hooked: Mapping[str, Sequence[float]] = {}
    if not is_alone:
        script.process.time_gradients()
        hooked_ms, hooked = _steps(script, timer, extent.steps)
        if len(hooked["comm_ms"]) < len(hooked_ms):
            return Breakdown(methods=dict.fromkeys(ALL_COLUMNS, NO_BUCKETS))
        script.process.keep_gradients()
    first_ms, _ = _steps(script, timer, extent.steps)
    second_ms, local = _steps(script, timer, extent.steps)
    return Breakdown(
        local_ms=(first_ms, second_ms),
        optimizer_ms=statistics.median(local["optimizer_ms"]),
        hooked_ms=hooked_ms,
        comm_ms=tuple(hooked.get("comm_ms", ())),
        tail_ms=tuple(hooked.get("tail_ms", ())),
        methods=_methods(context),
    )


def _mark_parts(script: RunningScript, *, has_peers: bool) -> str:
    """Have the script note the parts of its steps; why it cannot, else ""."""
    try:
        return script.process.mark_parts(_MARKS, has_peers=has_peers)
    except ScriptEndedError:
        return _ENDED


def _first_reason(reason: str, world_size: int) -> str:
    """Return why gradients cannot be told on some rank, the same on all ranks."""
    if world_size == 1:
        return reason
    reasons: list[Any] = [None] * world_size
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), "")


def _steps(
    script: RunningScript, timer: ScriptTimer, steps: int
) -> tuple[tuple[float, ...], Mapping[str, Sequence[float]]]:
    """Time a block of steps, in ms, and what was noted in each of them."""
    samples = timer.block(script.step, steps, PartTimes(), lead_in=_LEAD_IN)
    return tuple(ns / _NS_PER_MS for ns in samples.step_ns), script.process.parts


def _methods(context: Context) -> dict[str, str]:
    on_gpu = context.device.type == "cuda"
    local = "step with DDP's noop_hook" if context.world_size > 1 else "the step as it is"
    clock = "CUDA events" if on_gpu else "host clock"
    return {
        "local_step_ms": local,
        "compute_ms": f"local step less optimizer_ms{_WITH_GAPS if on_gpu else ''}",
        "host_gap_ms": _NOT_QUEUED if on_gpu else "none: on a CPU the host computes",
        "optimizer_ms": f"{clock} around Optimizer.step",
        **(REDUCED if context.world_size > 1 else {}),
    }
