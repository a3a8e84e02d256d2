"""Workloads that name the parts of their steps."""

import time

import torch

from raybench.workloads.base import Context, Workload

# What a part sleeps, seconds.
SHORT_S, LONG_S = 0.002, 0.004


class Parts(Workload):
    """A step of two parts; the first has the same part inside of it twice."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.items_per_step = context.batch_size

    def step(self) -> None:
        with self.context.region("forward"):
            time.sleep(LONG_S)
            for _ in range(2):
                with self.context.region("attention"):
                    time.sleep(SHORT_S)
        with self.context.region("back\nward"):
            time.sleep(LONG_S)


class Numbered(Parts):
    """A name that is no text."""

    def step(self) -> None:
        with self.context.region(5):  # type: ignore[arg-type]
            time.sleep(SHORT_S)


class Compiled(Parts):
    """A part around compiled code, and one inside of it."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._numbers = torch.ones(4, device=context.device)

        def inside(numbers: torch.Tensor) -> torch.Tensor:
            with context.region("inside"):
                return numbers * 2

        # Generating code would take seconds.
        self._inside = torch.compile(inside, backend="eager", fullgraph=True)

    def step(self) -> None:
        with self.context.region("around"):
            self._inside(self._numbers)
            time.sleep(SHORT_S)
