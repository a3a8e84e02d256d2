"""What a workload is: a class that is built on a device and does one step at a time.

A workload declares its parameters as keyword-only arguments of `__init__`, with types and
defaults. The job file is checked against them, and `raybench workloads NAME` lists them.
Importing the module must not need torch if `raybench plan` is to stay fast: import torch
where the workload is built.

    class Sum:
        \"""Adds up a random vector on each device.\"""

        def __init__(self, context: Context, *, length: PositiveInt = 1024) -> None:
            import torch

            self._vector = torch.rand(length, device=context.device)
            self.items_per_step = context.batch_size

        def step(self) -> None:
            self._vector.sum()

`torch.distributed` is set up as under torchrun: when world_size > 1 the default process group
is initialised, and RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on are in the environment.
TF32 is already switched as the precision asks; autocast and gradient scaling are the workload's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from raybench.plan import Precision

if TYPE_CHECKING:
    import torch


class PartTimes:
    """Host time of the current iteration by part of the step, in nanoseconds.

    For what the host waits for, such as the next batch. Work on the device is not timed here.
    """

    def __init__(self) -> None:
        self._spent_ns: dict[str, int] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time spent inside the `with` block to part `name`."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            spent_ns = time.perf_counter_ns() - start_ns
            self._spent_ns[name] = self._spent_ns.get(name, 0) + spent_ns

    def take(self) -> dict[str, int]:
        """What was spent since the last call."""
        spent_ns, self._spent_ns = self._spent_ns, {}
        return spent_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where and how a workload is to be built.

    batch_size: items per device and forward pass.
    device: already the current device of the process when it is a CUDA device.
    seed: the same on all ranks; add the rank where ranks must draw different data.
    """

    device: torch.device
    rank: int
    world_size: int
    local_rank: int
    batch_size: int
    precision: Precision
    seed: int = 0
    parts: PartTimes = field(default_factory=PartTimes)


class Workload(Protocol):
    """One thing to time. The first line of the class docstring says what it is.

    items_per_step: samples (rows, sequences) that this rank finishes in one `step()`.
    A `close()` method, if there is one, is called after the last step.
    """

    items_per_step: int

    def step(self) -> None:
        """Do one iteration: issue all its work; do not synchronise unless the work itself does."""
