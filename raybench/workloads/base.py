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

from raybench.point import Precision

if TYPE_CHECKING:
    import torch


class WrongResultError(Exception):
    """A step computed something wrong: what, where, and what it should have been."""


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

    batch_size: items per device and forward pass; 1 for a workload that takes no batch size.
    device: already the current device of the process when it is a CUDA device. On the meta device
    the workload is only built to count the operations of one step: there is no data, and neither
    communication nor compiling is wanted (world_size is 1).
    cuda_graph: steps will be captured in a CUDA graph, so a step may not wait for the device, and
    an optimizer must be capturable.
    seed: the same on all ranks; add the rank where ranks must draw different data.
    """

    device: torch.device
    rank: int
    world_size: int
    local_rank: int
    batch_size: int
    precision: Precision
    cuda_graph: bool = False
    seed: int = 0
    parts: PartTimes = field(default_factory=PartTimes)


class Workload(Protocol):
    """One thing to time. The first line of the class docstring says what it is.

    What it may have besides, each optional:

    takes_batch_size: class attribute; False where batch sizes mean nothing to it. Default True.
    items_per_step: samples (rows, sequences) that this rank finishes in one `step()`.
    close(): called after the last step.
    check(): called between blocks of steps, outside what is timed; raises WrongResultError when a
    step computed something wrong.
    set_comm_hook(hook): called after the timed steps; from then on gradients go through
    `hook(state, bucket)`, a communication hook of DistributedDataParallel, instead of all_reduce;
    with None through all_reduce again. On all ranks, several times, world_size above 1 only. May
    be None where it cannot be had.
    model: the nn.Module that is trained, not wrapped, for times by layer.
    flops_per_step: floating-point operations of one step on this rank, where counting those of
    torch's operators would not find them.
    message_bytes, busbw_factor: of a collective, as nccl-tests counts them.
    memory_bytes: what one step reads from and writes to memory.
    """

    def step(self) -> None:
        """Do one iteration: issue all its work; do not synchronise unless the work itself does."""
