"""The steps of a script, which its own process times: the timer and the peak memory of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from raybench.measure.timing import Step, fewest_of_ranks, join_blocks
from raybench.records import Cause, Failure, Repetition, Samples
from raybench.workloads.base import PartTimes
from raybench.workloads.scripts.process import (
    ScriptEndedError,
    ScriptFailedError,
    ScriptProcess,
)


class StepsEndedError(Exception):
    """The script has come to its end on a rank. repetition: what it had, as much on each rank."""

    def __init__(self, repetition: Repetition) -> None:
        super().__init__("the script has ended")
        self.repetition = repetition

    @property
    def warning(self) -> str:
        """Say in a sentence what was measured."""
        timed, warmup = (
            len(phase.step_ns) for phase in (self.repetition.timed, self.repetition.warmup)
        )
        return (
            f"the script ended by itself before enough was measured: its last {timed} iterations "
            f"are timed, and the {warmup} before them warm-up; let it make more steps"
        )


class ScriptTimer:
    """Has the process of the script time its steps, and keeps what it gave.

    It is a Timer, and in place of a PeakMemory: allocated_bytes and reserved_bytes are those of the
    allocator in that process.
    """

    def __init__(self, process: ScriptProcess, device: torch.device) -> None:
        self._process, self._device = process, device
        self._blocks: list[Samples] = []
        self._warmup_iterations = 0
        self.allocated_bytes: int | None = None
        self.reserved_bytes: int | None = None

    def block(self, step: Step, iterations: int, parts: PartTimes, *, lead_in: int = 0) -> Samples:
        """As Timer.block; `step` is the script's own. Raises StepsEndedError, on all ranks.

        Also ScriptFailedError, where there is not one iteration.
        """
        try:
            samples = self._process.run_steps(iterations, lead_in=lead_in)
        except ScriptEndedError:
            samples = Samples()
        self._read_peaks()
        done = fewest_of_ranks(len(samples.step_ns), self._device)
        self._blocks.append(_cut(samples, 0, done))
        if done < iterations:
            raise StepsEndedError(self._split())
        return samples

    def forget(self) -> None:
        """As PeakMemory.forget. All iterations until now were warm-up."""
        self._warmup_iterations = sum(len(block.step_ns) for block in self._blocks)
        self._process.forget_memory()
        self.allocated_bytes = None

    def _read_peaks(self) -> None:
        allocated_bytes, reserved_bytes = self._process.peaks
        if allocated_bytes is not None and reserved_bytes is not None:
            self.allocated_bytes = max(allocated_bytes, self.allocated_bytes or 0)
            self.reserved_bytes = max(reserved_bytes, self.reserved_bytes or 0)

    def _split(self) -> Repetition:
        """Split what there is as it was taken, with half of it as warm-up at most."""
        taken = join_blocks(self._blocks)
        count = len(taken.step_ns)
        if not count:
            message = "the script ended after its first step: it has no iteration that was timed"
            raise ScriptFailedError(
                Failure.of(Cause.NO_STEPS, rank=0, message=message, worker_reusable=True)
            )
        warmup = min(self._warmup_iterations or count, count // 2)
        return Repetition(warmup=_cut(taken, 0, warmup), timed=_cut(taken, warmup, count))


def _cut(samples: Samples, start: int, end: int) -> Samples:
    """Keep some iterations of a block without parts."""
    return replace(
        samples,
        start_ns=samples.start_ns[start:end],
        step_ns=samples.step_ns[start:end],
        host_ns=samples.host_ns[start:end],
        throttled=samples.throttled[start:end],
    )
