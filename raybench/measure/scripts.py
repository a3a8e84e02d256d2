"""The steps of a script, which the script's process times and marks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from raybench.conversion import NS_PER_MS
from raybench.measure.breakdown import PLAIN_STEP, REDUCTION_METHODS, Extent, all_not_measured
from raybench.measure.instruments import (
    InBlock,
    MemoryUse,
    Step,
    gather_objects,
    join_blocks,
    max_over_ranks,
)
from raybench.measure.marks import ScriptMarks
from raybench.records.doubts import Doubt, DoubtKind, NotMeasured
from raybench.records.measurement import Breakdown, Failure, Repetition, Samples
from raybench.records.status import Cause
from raybench.workloads.base import Context, PartTimes
from raybench.workloads.scripts.running import RunningScript, ScriptEndedError, ScriptFailedError

# Untimed steps: the first step with another hook, and two steps that fill the device's queue.
_LEAD_IN = 3


class StepsEndedError(Exception):
    """The script ended on a rank before all steps were timed; raised on all ranks."""

    def __init__(self, repetition: Repetition) -> None:
        super().__init__("the script ended before all steps were timed")
        # The steps that all ranks ran; at most half of them are warm-up.
        self.repetition = repetition


class ScriptTimer(MemoryUse):
    """Lets the script's process measure times and memory; replaces both Timer and MemoryUse.

    `paused` and `counting` do nothing.
    """

    def __init__(
        self, script: RunningScript, device: torch.device, in_block: InBlock = nullcontext
    ) -> None:
        """Make a timer.

        Args:
            device: device on which ranks exchange counts.
            in_block: makes a context that surrounds each block of steps.
        """
        # The script's process counts its memory, so nothing is counted in this process.
        super().__init__(torch.device("cpu"))
        self.in_block = in_block
        self.script, self._device_of_ranks = script, device
        self._blocks: list[Samples] = []
        self._warmup_iterations = 0

    def time_block(
        self, step: Step, iterations: int, parts: PartTimes, *, lead_in: int = 0
    ) -> Samples:
        """Let the script run and time iterations. Collective.

        Args:
            step: not used.
            iterations: number of timed iterations, above 0.
            parts: not used.
            lead_in: number of untimed iterations before the timed iterations.

        Raises:
            StepsEndedError: the script of a rank has ended too early.
            ScriptFailedError: this rank's script has failed or has no timed iteration.
            ScriptAbortedError: another rank's script has failed.
        """
        try:
            with self.in_block():
                samples = self.script.run_steps(iterations, lead_in=lead_in)
        except ScriptEndedError:
            samples = Samples()
        allocated_bytes, reserved_bytes = self.script.peaks
        if allocated_bytes is not None and reserved_bytes is not None:
            self.allocated_bytes = max(allocated_bytes, self.allocated_bytes or 0)
            self.reserved_bytes = max(reserved_bytes, self.reserved_bytes or 0)
        # The minimum over ranks.
        fewest = -max_over_ranks([-len(samples.step_ns)], self._device_of_ranks)[0]
        self._blocks.append(_slice(samples, 0, fewest))
        if fewest == iterations:
            return samples
        all_samples = join_blocks(self._blocks)
        count = len(all_samples.step_ns)
        if count == 0:
            message = "the script ended after its first step: it has no iteration that was timed"
            raise ScriptFailedError(
                Failure.of(Cause.NO_STEPS, rank=0, message=message, worker_reusable=True)
            )
        # Without `restart` the warm-up has not ended. At most half of the steps are warm-up.
        warmup_so_far = self._warmup_iterations or count
        warmup = min(warmup_so_far, count // 2)
        raise StepsEndedError(
            Repetition(
                warmup=_slice(all_samples, 0, warmup), timed=_slice(all_samples, warmup, count)
            )
        )

    def restart(self) -> None:
        """Count all iterations so far as warm-up; forget the peak of allocated memory.

        In the warm-up of a script, iterations end with the step of the newest optimizer. After this
        call that optimizer stays the same.
        """
        self._warmup_iterations = sum(len(block.step_ns) for block in self._blocks)
        self.script.end_warmup()
        self.allocated_bytes = None


def _slice(samples: Samples, start: int, end: int) -> Samples:
    return replace(
        samples,
        start_ns=samples.start_ns[start:end],
        step_ns=samples.step_ns[start:end],
        host_ns=samples.host_ns[start:end],
        throttled=samples.throttled[start:end],
    )


def break_down_script(timer: ScriptTimer, context: Context, extent: Extent) -> Breakdown:
    """Time the parts of a script's steps. Collective; call this once, after the timed steps.

    If a part cannot be timed on some rank, the breakdown contains only the reason. It never has
    memory, traffic, regions, device_ms and wall. DDP reduces no gradients afterwards.

    Args:
        extent: only `samples` is used.

    Raises:
        ScriptFailedError: this rank's script has failed.
        ScriptAbortedError: another rank's script has failed. torch may notice this first, and raise
            another error.
    """
    script = timer.script
    has_peers, on_gpu = context.world_size > 1, context.device.type == "cuda"

    def time_steps() -> tuple[tuple[float, ...], Mapping[str, Sequence[float]]]:
        samples = timer.time_block(script.step, extent.samples, PartTimes(), lead_in=_LEAD_IN)
        return tuple(ns / NS_PER_MS for ns in samples.step_ns), script.parts

    # All ranks must be able to time the parts.
    local_reason: NotMeasured | None = None
    error = ""
    try:
        local_reason, error = script.mark_parts(ScriptMarks.__module__, has_peers=has_peers)
    except ScriptEndedError:
        local_reason = NotMeasured.SCRIPT_ENDED
    reasons = [reason for reason in gather_objects(local_reason) if reason]
    if reasons:
        failed = Doubt(kind=DoubtKind.CHECK_FAILED, subject=f"breakdown: {error}")
        return replace(all_not_measured(reasons[0]), doubts=(failed,) if error else ())

    # Time steps with hooked gradients, then two blocks of steps without communication.
    hooked_ms: tuple[float, ...] = ()
    hooked_parts: Mapping[str, Sequence[float]] = {}
    try:
        if has_peers:
            script.time_gradients()
            hooked_ms, hooked_parts = time_steps()
            if len(hooked_parts["comm_ms"]) < len(hooked_ms):
                return all_not_measured(NotMeasured.NO_GRADIENTS_REDUCED)
            script.keep_gradients()
        first_ms, _ = time_steps()
        second_ms, local_parts = time_steps()
    except StepsEndedError:
        return all_not_measured(NotMeasured.SCRIPT_ENDED)

    gaps = ", with the gaps that the host leaves" if on_gpu else ""
    return Breakdown(
        local_ms=(first_ms, second_ms),
        optimizer_ms=statistics.median(local_parts["optimizer_ms"]),
        hooked_ms=hooked_ms,
        comm_ms=tuple(hooked_parts.get("comm_ms", ())),
        tail_ms=tuple(hooked_parts.get("tail_ms", ())),
        methods={
            "local_step_ms": "step with DDP's noop_hook" if has_peers else PLAIN_STEP,
            "compute_ms": f"local step less optimizer_ms{gaps}",
            "optimizer_ms": f"{'CUDA events' if on_gpu else 'host clock'} around Optimizer.step",
            **(REDUCTION_METHODS if has_peers else {}),
        },
        not_measured={
            "host_gap_ms": NotMeasured.SCRIPT_NOT_QUEUED if on_gpu else NotMeasured.GAP_OF_CPU
        },
    )
