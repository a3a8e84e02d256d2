"""A training script that runs in a process of its own: its timer, and where its steps go.

The process of the script times its steps. Hooks in that process tell how long its gradients and its
optimizers take.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from raybench.measure.breakdown import ALL_COLUMNS, NO_BUCKETS, REDUCED, Extent
from raybench.measure.timers import Step, gather_objects, join_blocks, min_over_ranks
from raybench.records import Breakdown, Cause, Failure, Repetition, Samples
from raybench.workloads.base import Context, PartTimes
from raybench.workloads.script import (
    RunningScript,
    ScriptEndedError,
    ScriptFailedError,
    ScriptProcess,
)

# Loaded in the script's process alone, where its ScriptMarks takes the time of parts.
_MARKS_MODULE = "raybench.measure.marks"
_NS_PER_MS = 1e6
# The first step with another hook, and two that fill the queue of the device.
_LEAD_IN = 3
_ENDED = "unknown: the script ended by itself before"
_NOT_QUEUED = "unknown: the steps of a script cannot be queued beforehand"
_WITH_GAPS = ", with the gaps that the host leaves"


class StepsEndedError(Exception):
    """The script ended on a rank before all steps were timed; raised on all ranks.

    repetition: the steps that it made, equally many on each rank.
    """

    def __init__(self, repetition: Repetition) -> None:
        super().__init__("the script has ended")
        self.repetition = repetition

    @property
    def warning(self) -> str:
        """Say in a sentence how many iterations were measured."""
        timed, warmup = (
            len(phase.step_ns) for phase in (self.repetition.timed, self.repetition.warmup)
        )
        return (
            f"the script ended by itself before enough was measured: its last {timed} iterations "
            f"are timed, and the {warmup} before them warm-up; let it make more steps"
        )


class ScriptTimer:
    """Has the process of the script time its steps, and keeps all samples.

    It is a Timer, and takes the place of a PeakMemory: allocated_bytes and reserved_bytes are the
    peaks of torch's allocator in the process of the script.
    """

    def __init__(self, process: ScriptProcess, device: torch.device) -> None:
        self._process, self._device = process, device
        self._blocks: list[Samples] = []
        self._warmup_iterations = 0
        self.allocated_bytes: int | None = None
        self.reserved_bytes: int | None = None

    def time_block(
        self, step: Step, iterations: int, parts: PartTimes, *, lead_in: int = 0
    ) -> Samples:
        """Return the durations of iterations that the script runs and times; all must call it.

        Raises StepsEndedError where the script ends before that many iterations, and
        ScriptFailedError where it ends before the first iteration that was timed.
        """
        try:
            samples = self._process.run_steps(iterations, lead_in=lead_in)
        except ScriptEndedError:
            samples = Samples()
        allocated_bytes, reserved_bytes = self._process.peaks
        if allocated_bytes is not None and reserved_bytes is not None:
            self.allocated_bytes = max(allocated_bytes, self.allocated_bytes or 0)
            self.reserved_bytes = max(reserved_bytes, self.reserved_bytes or 0)
        done = min_over_ranks(len(samples.step_ns), self._device)
        self._blocks.append(_cut(samples, 0, done))
        if done < iterations:
            raise StepsEndedError(self._split())
        return samples

    def restart(self) -> None:
        """Count all iterations until now as warm-up, and their memory not at all."""
        self._warmup_iterations = sum(len(block.step_ns) for block in self._blocks)
        self._process.forget_memory()
        self.allocated_bytes = None

    def _split(self) -> Repetition:
        """Split all samples into warm-up and timed ones; at most half of them are warm-up."""
        samples = join_blocks(self._blocks)
        count = len(samples.step_ns)
        if not count:
            message = "the script ended after its first step: it has no iteration that was timed"
            raise ScriptFailedError(
                Failure.of(Cause.NO_STEPS, rank=0, message=message, worker_reusable=True)
            )
        warmup = min(self._warmup_iterations or count, count // 2)
        return Repetition(warmup=_cut(samples, 0, warmup), timed=_cut(samples, warmup, count))


def _cut(samples: Samples, start: int, end: int) -> Samples:
    """Return iterations `start` to `end` of samples without parts."""
    return replace(
        samples,
        start_ns=samples.start_ns[start:end],
        step_ns=samples.step_ns[start:end],
        host_ns=samples.host_ns[start:end],
        throttled=samples.throttled[start:end],
    )


def break_down_script(
    script: RunningScript, timer: ScriptTimer, context: Context, extent: Extent
) -> Breakdown:
    """Run instrumented steps of a script on all ranks, and return where their time goes.

    First with timed communication, where there are several ranks, then without any. Afterwards the
    script's gradients are not reduced any more. Where the script ends, or its gradients cannot be
    hooked on some rank, the breakdown has only `methods`, which say why.
    """
    try:
        return _break_down(script, timer, context, extent)
    except StepsEndedError:
        return Breakdown(methods=dict.fromkeys(ALL_COLUMNS, _ENDED))


def _break_down(
    script: RunningScript, timer: ScriptTimer, context: Context, extent: Extent
) -> Breakdown:
    has_peers = context.world_size > 1
    try:
        reason = script.process.mark_parts(_MARKS_MODULE, has_peers=has_peers)
    except ScriptEndedError:
        reason = _ENDED
    reasons = gather_objects(reason) if has_peers else [reason]
    if any(reasons):
        return Breakdown(methods=dict.fromkeys(ALL_COLUMNS, next(filter(None, reasons))))
    hooked_ms: tuple[float, ...] = ()
    hooked: Mapping[str, Sequence[float]] = {}
    if has_peers:
        script.process.time_gradients()
        hooked_ms, hooked = _time_steps(script, timer, extent.steps)
        if len(hooked["comm_ms"]) < len(hooked_ms):
            return Breakdown(methods=dict.fromkeys(ALL_COLUMNS, NO_BUCKETS))
        script.process.keep_gradients()
    first_ms, _ = _time_steps(script, timer, extent.steps)
    second_ms, local = _time_steps(script, timer, extent.steps)
    return Breakdown(
        local_ms=(first_ms, second_ms),
        optimizer_ms=statistics.median(local["optimizer_ms"]),
        hooked_ms=hooked_ms,
        comm_ms=tuple(hooked.get("comm_ms", ())),
        tail_ms=tuple(hooked.get("tail_ms", ())),
        methods=_methods(context),
    )


def _time_steps(
    script: RunningScript, timer: ScriptTimer, steps: int
) -> tuple[tuple[float, ...], Mapping[str, Sequence[float]]]:
    """Return the durations of a block of steps, and the times of their parts by name, in ms."""
    samples = timer.time_block(script.step, steps, PartTimes(), lead_in=_LEAD_IN)
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
