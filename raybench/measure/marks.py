"""Moments inside a step: of collectives, optimizers and regions, on the device where it is one.

Without `from __future__ import annotations`: DDP compares a hook's annotations with its classes.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from raybench.measure.timing import Step
from raybench.records import RegionTime

# A CUDA event, or nanoseconds of `time.perf_counter_ns`.
Mark = torch.cuda.Event | int


def marker(device: torch.device) -> Callable[[], Mark]:
    """Return what marks the moment: on a GPU, when the work queued on the stream so far is done."""
    return _event if device.type == "cuda" else time.perf_counter_ns


def milliseconds(start: Mark, end: Mark) -> float:
    """From one mark to another of the same device; work up to `end` must be done."""
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / 1e6
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


# When a bucket was ready and when it was reduced.
Interval = tuple[float, float]


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """ready: the gradients of the bucket are there. reduced: its collective is complete."""

    ready: Mark
    work: dist.Work
    reduced: Mark | None = None


class BucketMarks:
    """A communication hook that averages gradients as DDP does by itself, and takes the time."""

    def __init__(self, device: torch.device) -> None:
        self._mark = marker(device)
        self._steps: list[list[_Bucket]] = [[]]

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """To be registered with DDP; one call per bucket.

        state: the process group of those that train together; any other value: of all.
        """
        gradients = bucket.buffer()
        group = state if isinstance(state, dist.ProcessGroup) else None
        # Before the sum, which could overflow.
        gradients.div_(dist.get_world_size(group))
        ready = self._mark()
        work = dist.all_reduce(gradients, group=group, async_op=True)
        assert work is not None
        timed = _Bucket(ready=ready, work=work)
        self._steps[-1].append(timed)

        def reduced(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            # On a GPU this runs on a stream that waits for the collective, before it is done.
            timed.reduced = self._mark()
            return future.value()[0]

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(reduced)
        return future

    def end_step(self) -> None:
        """Count what follows to the next step."""
        self._steps.append([])

    def take(self) -> tuple[tuple[Interval, ...], ...]:
        """Take the buckets of each step that has ended, in the order of their collectives.

        In ms since the first of the step was ready. The steps must be complete.
        """
        steps, self._steps = self._steps[:-1], self._steps[-1:]
        return tuple(_intervals(buckets) for buckets in steps)


def _intervals(buckets: Sequence[_Bucket]) -> tuple[Interval, ...]:
    intervals = []
    for bucket in buckets:
        # NCCL's process group keeps the gradients of a collective that nobody has waited for.
        bucket.work.wait()
        # DDP itself waits for what follows the mark.
        assert bucket.reduced is not None, "a step returned before its gradients were reduced"
        ready_ms = milliseconds(buckets[0].ready, bucket.ready)
        intervals.append((ready_ms, milliseconds(buckets[0].ready, bucket.reduced)))
    return tuple(intervals)


def comm_ms(buckets: Sequence[Interval]) -> float:
    """Add up the time in collectives.

    They run one after the other: while a bucket that is ready waits for the one before it, the
    time is that one's. Sum over buckets of reduced - max(ready, reduced of the bucket before).
    """
    free_ms, total_ms = float("-inf"), 0.0
    for ready_ms, reduced_ms in buckets:
        total_ms += max(0.0, reduced_ms - max(ready_ms, free_ms))
        free_ms = max(free_ms, reduced_ms)
    return total_ms


def tail_ms(buckets: Sequence[Interval]) -> float:
    """Measure from the last gradient being ready to the end of the last collective.

    Meanwhile the rank has nothing left to compute but the optimizer's step, which needs the result.
    """
    return max(reduced for _, reduced in buckets) - max(ready for ready, _ in buckets)


class OptimizerMarks:
    """Times of `Optimizer.step`, whoever calls it, step by step."""

    def __init__(self, device: torch.device) -> None:
        self._mark = marker(device)
        self._started: list[Mark] = []
        self._steps: list[list[tuple[Mark, Mark]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the `with` block every optimizer of torch.optim is timed."""
        handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def watched(self, step: Step) -> Step:
        """`step`, its optimizers' times kept apart from those of other steps."""

        def step_apart() -> None:
            self._steps.append([])
            step()

        return step_apart

    def median_ms(self) -> float | None:
        """Over the steps in which an optimizer stepped; None where none did."""
        spent_ms = [sum(milliseconds(*span) for span in spans) for spans in self._steps if spans]
        return statistics.median(spent_ms) if spent_ms else None

    def _before(self, *_: object) -> None:
        self._started.append(self._mark())

    def _after(self, *_: object) -> None:
        self._steps[-1].append((self._started.pop(), self._mark()))


# Name -> how long each of its blocks took in a step, in ms.
Spans = Mapping[str, Sequence[float]]


@dataclass(slots=True, kw_only=True)
class _Span:
    name: str
    start: Mark
    end: Mark | None = None


class RegionMarks:
    """Notes when each region begins and ends, step by step; nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._mark = marker(device)
        self._steps: list[list[_Span]] = [[]]

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Time the `with` block."""
        span = _Span(name=name, start=self._mark())
        self._steps[-1].append(span)
        yield
        span.end = self._mark()

    def end_step(self) -> None:
        """Count what follows to the next step."""
        self._steps.append([])

    def take(self) -> list[Spans]:
        """Return the regions of each ended step, whose work must be done."""
        return [_by_name(spans) for spans in self._steps[:-1]]


def _by_name(spans: Sequence[_Span]) -> Spans:
    found: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        assert span.end is not None, "a step returned inside of a region"
        found[span.name].append(milliseconds(span.start, span.end))
    return found


def region_times(steps: Sequence[Spans], step_ms: float) -> tuple[RegionTime, ...]:
    """Compute the median of each region over the steps; 0 ms counts where it was not entered.

    step_ms: what such a step takes.
    """
    names = dict.fromkeys(name for step in steps for name in step)
    return tuple(
        RegionTime(
            name=name,
            calls=max(len(step.get(name, ())) for step in steps),
            ms=(ms := statistics.median(sum(step.get(name, ())) for step in steps)),
            share=ms / step_ms if step_ms else 0.0,
        )
        for name in names
    )
