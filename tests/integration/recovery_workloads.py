"""Ranks that fail beside others: the others train, or sum, by collectives that need all ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from pydantic import Field

from raybench.workloads.base import Context
from raybench.workloads.mlp import Mlp

Fault = Literal[
    "none", "raise", "oom", "sys_exit", "kill", "segfault", "stop", "loop", "skip", "early", "late"
]

LATE_S = 2.0


class Failing(Mlp):
    """A DDP model on the ranks, of which one fails in the chosen way.

    late: in close(), when the others have answered: nothing is counted for which they would wait.
    """

    flops_per_step = 1.0

    def __init__(
        self,
        context: Context,
        *,
        fault: Fault = "none",
        faulty_rank: Annotated[int, Field(ge=0)] = 1,
    ) -> None:
        super().__init__(context, hidden=32, layers=2)
        self._fault = fault if context.rank == faulty_rank else "none"
        self._total = torch.ones(1)
        self._steps = 0
        if self._fault == "early":
            raise ValueError("not even built")

    def step(self) -> None:
        self._steps += 1
        if self._steps == 3:
            _FAULTS[self._fault]()
        super().step()
        if dist.is_initialized() and not (self._fault == "skip" and self._steps == 3):
            dist.all_reduce(self._total)

    def close(self) -> None:
        if self._fault == "late":
            time.sleep(LATE_S)
            raise ValueError("not even closed")


def _raise() -> None:
    raise ValueError("the workload says no")


def _oom() -> None:
    raise MemoryError("asked for more than there is")


def _spin() -> None:
    ends_s = time.monotonic() + 3600
    while time.monotonic() < ends_s:
        pass


_FAULTS = {
    "none": lambda: None,
    "early": lambda: None,
    "late": lambda: None,
    "skip": lambda: None,
    "raise": _raise,
    "oom": _oom,
    "sys_exit": lambda: sys.exit("enough"),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": _spin,
}
