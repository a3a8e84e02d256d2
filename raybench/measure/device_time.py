"""What a step takes when its work is queued beforehand, and the optimizer's part of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from raybench.measure.agreement import slowest_rank_ns
from raybench.measure.marks import Mark, marker, milliseconds

Step = Callable[[], None]

# Steps issued one at a time to an idle device, to learn how long the host needs for one.
_ISSUED_ALONE = 5
# A host that needs less of a step than this stays ahead of the device by itself.
_AHEAD_SHARE = 0.75
# The device is held back for longer than the host needs, which varies.
_HOLD_MARGIN = 1.5
_HOLD_AT_MOST_MS = 1000.0
_CALIBRATION_CYCLES = 10_000_000
_NS_PER_MS = 1e6


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


def time_queued_steps(
    step: Step, optimizer: OptimizerMarks, local_ms: float, steps: int
) -> float | None:
    """Median time in ms of a step on the GPU, the gaps left by a slow host taken out.

    A host that is much faster than the device, whose step takes local_ms, leaves none. Otherwise
    the device is held back before each step for longer than the host needs to issue it. None
    on all ranks where that is longer than a second on one of them. All ranks must call it.

    A step that waits for the device keeps the gap behind its wait, and one with more launches
    than the driver queues (about 1000) some of its gaps.
    """
    device = torch.device("cuda")
    issue_ms = _issue_ms(step)
    # Not always: an idling device cools, and would then compute faster than in the timed steps.
    hold_ms = 0.0 if issue_ms < _AHEAD_SHARE * local_ms else _HOLD_MARGIN * issue_ms
    # Of all ranks: a step may communicate in its own way, so all run equally many.
    (longest_ns,) = slowest_rank_ns([round(hold_ms * _NS_PER_MS)], device)
    if longest_ns > _HOLD_AT_MOST_MS * _NS_PER_MS:
        return None
    hold_cycles = round(hold_ms * _cycles_per_ms()) if hold_ms else 0
    mark, spans = marker(device), []
    step_apart = optimizer.watched(step)
    with optimizer.watching():
        for _ in range(steps):
            if hold_cycles:
                _spin(hold_cycles)
            start = mark()
            step_apart()
            spans.append((start, mark()))
    torch.cuda.synchronize()
    return statistics.median(milliseconds(start, end) for start, end in spans)


def _issue_ms(step: Step) -> float:
    """Median time in ms that the host needs to issue a step while the device is idle."""
    spent_ns = []
    for _ in range(_ISSUED_ALONE):
        torch.cuda.synchronize()
        start_ns = time.perf_counter_ns()
        step()
        spent_ns.append(time.perf_counter_ns() - start_ns)
    return statistics.median(spent_ns) / _NS_PER_MS


def _cycles_per_ms() -> float:
    """How far the clock of torch's spin kernel counts in a millisecond, by running it."""
    mark = marker(torch.device("cuda"))
    # The first launch of a kernel loads it.
    _spin(1)
    start = mark()
    _spin(_CALIBRATION_CYCLES)
    end = mark()
    torch.cuda.synchronize()
    return _CALIBRATION_CYCLES / milliseconds(start, end)


def _spin(cycles: int) -> None:
    """Keep the device's stream busy; the host goes on."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
