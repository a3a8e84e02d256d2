"""The recipe of a measurement: build, warm up, time, and do it again for each repeat.

The ranks agree before each block on its length: rank 0 decides by its own clock and tells the
others, outside the timed region, so that all run the same number of collectives.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raybench.job import Measure
from raybench.measure.stopping import Progress, next_block
from raybench.measure.timing import Timer, align_ranks, make_timer, no_garbage_collection
from raybench.records import Repetition, Samples
from raybench.workloads.base import Context, Workload

_NS_PER_S = 1e9
# A phase may not eat the whole budget with warm-up: the samples are what is wanted.
_WARMUP_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All repetitions of one rank, and how much one of its steps did."""

    repetitions: tuple[Repetition, ...]
    items_per_step: int


def measure(
    build: Callable[[], Workload], context: Context, settings: Measure, built: Callable[[], None]
) -> Measured:
    """Build, warm up and time the workload `settings.repeats` times.

    built: called after each build, before the first step.
    """
    timer = make_timer(context.device)
    repetitions = []
    items_per_step = 0
    for _ in range(settings.repeats):
        # The workload before this one, cycles included, must be gone: it would count in the peak
        # memory of this one, and may leave no room for it.
        gc.collect()
        with _closed_at_the_end(build()) as workload:
            built()
            items_per_step = workload.items_per_step
            repetitions.append(_repetition(workload, timer, context, settings))
        del workload
    return Measured(repetitions=tuple(repetitions), items_per_step=items_per_step)


@contextmanager
def _closed_at_the_end(workload: Workload) -> Iterator[Workload]:
    """Close the workload, if it can be; what it raises then does not hide an earlier error."""
    close = getattr(workload, "close", lambda: None)
    try:
        yield workload
    except BaseException as error:
        try:
            close()
        except Exception as second:
            error.add_note(f"close() then raised {type(second).__name__}: {second}")
        raise
    close()


def _repetition(
    workload: Workload, timer: Timer, context: Context, settings: Measure
) -> Repetition:
    with no_garbage_collection():
        warmup = _joined(_warm_up(workload, timer, context, settings))
        left_s = settings.max_seconds - _spent_s(warmup.step_ns[1:])
        step_s = _typical_s(warmup.step_ns[1:])
        phase = _phase(workload, timer, context, settings.iterations, left_s, step_s)
        return Repetition(warmup=warmup, timed=_joined(phase))


def _warm_up(
    workload: Workload, timer: Timer, context: Context, settings: Measure
) -> Iterator[Samples]:
    """The cold first iteration (loading, compiling) alone, then the rest within the budget.

    The cold iteration neither counts against the budget nor foretells the others.
    """
    yield _block(workload, timer, context, 1)
    left_s = settings.max_seconds * _WARMUP_SHARE
    yield from _phase(workload, timer, context, settings.warmup - 1, left_s, None)


def _phase(
    workload: Workload,
    timer: Timer,
    context: Context,
    wanted: int,
    left_s: float,
    step_s: float | None,
) -> Iterator[Samples]:
    done = 0
    while True:
        decision = next_block(Progress(done=done, wanted=wanted, step_s=step_s, left_s=left_s))
        iterations = _as_rank_0_says(decision, context)
        if iterations == 0:
            return
        samples = _block(workload, timer, context, iterations)
        done += iterations
        left_s -= _spent_s(samples.step_ns)
        step_s = _typical_s(samples.step_ns)
        yield samples


def _block(workload: Workload, timer: Timer, context: Context, iterations: int) -> Samples:
    align_ranks(context.device)
    return timer.block(workload.step, iterations, context.parts)


def _as_rank_0_says(decision: int, context: Context) -> int:
    if not dist.is_initialized():
        return decision
    told = torch.tensor([decision], dtype=torch.int64, device=context.device)
    dist.broadcast(told, src=0)
    return int(told.item())


def _joined(blocks: Iterator[Samples]) -> Samples:
    """The blocks of a phase as one row of iterations."""
    all_blocks = list(blocks)
    names = {name for block in all_blocks for name in block.part_ns}
    return Samples(
        start_ns=tuple(ns for block in all_blocks for ns in block.start_ns),
        step_ns=tuple(ns for block in all_blocks for ns in block.step_ns),
        host_ns=tuple(ns for block in all_blocks for ns in block.host_ns),
        part_ns={
            name: tuple(
                ns
                for block in all_blocks
                for ns in block.part_ns.get(name, (0,) * len(block.step_ns))
            )
            for name in sorted(names)
        },
    )


def _spent_s(step_ns: tuple[int, ...]) -> float:
    return sum(step_ns) / _NS_PER_S


def _typical_s(step_ns: tuple[int, ...]) -> float | None:
    """The median step time in seconds; None when there is none."""
    return statistics.median(step_ns) / _NS_PER_S if step_ns else None
