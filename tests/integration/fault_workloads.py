"""A workload that fails on chosen ranks, at a chosen step, in a chosen way; every fault is real."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import Field

from raybench.workloads.base import Context
from tests.integration.fault_marks import CGROUP_PREFIX, HARMED, mark, memory_cgroups

ALL_RANKS = -1
_MIB = 1024**2
_WAIT_S = 60


class Faulty:
    """Sums ones over the ranks; the faulty rank fails in the chosen way, and says when."""

    def __init__(
        self,
        context: Context,
        *,
        folder: Annotated[str, Field(description="takes marks.jsonl")],
        number: Annotated[int, Field(ge=0, description="tells points apart")] = 0,
        fault: Annotated[
            str, Field(description="none, wait, child, child_kill, or one of FAULTS")
        ] = "none",
        faulty_rank: Annotated[int, Field(ge=ALL_RANKS, description="-1: all ranks")] = 1,
        faulty_step: Annotated[int, Field(ge=1)] = 3,
        pause_s: Annotated[float, Field(ge=0, description="in each step")] = 0.0,
    ) -> None:
        self.items_per_step = context.batch_size
        self.flops_per_step = 1.0  # not counted: the counting would build it once more
        self._context, self._folder, self._number = context, folder, number
        strikes = faulty_rank in (ALL_RANKS, context.rank) or fault == "wait"
        self._fault = fault if strikes else "none"
        self._checks = fault == "none"
        self._faulty_step, self._steps, self._pause_s = faulty_step, 0, pause_s
        self._mark("built")
        if self._fault in ("raise_init", "hang_init", "exit_init"):
            self._strike()

    def step(self) -> None:
        self._steps += 1
        if self._steps == 1:
            self._mark("step")
        time.sleep(self._pause_s)
        if self._steps == self._faulty_step and self._fault != "none":
            if self._fault == "skip":
                self._mark("fault")
                return
            self._strike()
        total = torch.ones(1, device=self._context.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        # What is left of a broken group or of another point would not give this sum.
        if self._checks and total.item() != self._context.world_size:
            raise ArithmeticError(f"{self._context.world_size} ones add up to {total.item()}")

    def _mark(self, event: str, **facts: object) -> None:
        mark(self._folder, event, number=self._number, rank=self._context.rank, **facts)

    def _strike(self) -> None:
        if self._fault == "wait":
            self._wait()
        elif self._fault in ("child", "child_kill"):
            self._mark("fault", child=subprocess.Popen(["sleep", "3602"]).pid)
            if self._fault == "child_kill":
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            self._mark("fault")
            FAULTS[self._fault](self._context)

    def _wait(self) -> None:
        """Stand still until the harm is done, and as much longer as the file says."""
        self._mark("waiting")
        harmed, deadline_s = Path(self._folder, HARMED), time.monotonic() + _WAIT_S
        while not harmed.exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        if harmed.exists():
            time.sleep(float(harmed.read_text()))


class _Unpicklable(Exception):
    def __init__(self, *, lock: object) -> None:
        super().__init__("holds what cannot travel")
        self.lock = lock


def _raise(_: Context) -> None:
    raise ValueError("the workload says no\nsecond line")


def _raise_unpicklable(_: Context) -> None:
    raise _Unpicklable(lock=open("/dev/null"))  # noqa: SIM115, PTH123 - kept open on purpose


def _run_out(context: Context) -> None:
    """Take device memory until there is none; on a CPU, more than an address can name."""
    if context.device.type == "cpu":
        torch.empty(2**57)
    blocks = []
    while True:
        blocks.append(torch.ones(512 * _MIB // 4, device=context.device))


def _fill_host_memory(_: Context) -> None:
    """Touch memory until the kernel ends this process, in a cgroup of its own."""
    found = memory_cgroups()
    assert found is not None, "no memory cgroup can be made here"
    folder, limit = found
    group = folder / f"{CGROUP_PREFIX}{os.getpid()}"
    group.mkdir()
    group.joinpath(limit).write_text(str(256 * _MIB))
    group.joinpath("cgroup.procs").write_text(str(os.getpid()))
    blocks = []
    while True:
        blocks.append(bytearray(os.urandom(_MIB)) * 16)


def _hold_gil(_: Context) -> None:
    # The regular expression tries 2**60 ways in C and lets no other thread run.
    re.match(r"(a+)+$", "a" * 60 + "b")


def _wait_for_nothing(context: Context) -> None:
    """Take part in another communication than the other ranks, which all wait for ever."""
    dist.recv(torch.ones(1, device=context.device), src=(context.rank + 1) % context.world_size)


def _loop(_: Context) -> None:
    while True:
        pass


def _device_error(context: Context) -> None:
    """An index outside of a tensor, which breaks the CUDA context of this process for good."""
    torch.zeros(8, device=context.device)[torch.tensor([99], device=context.device)].item()


def _device_hang(context: Context) -> None:
    torch.cuda._sleep(2**62)
    torch.cuda.synchronize(context.device)


FAULTS: dict[str, Callable[[Context], object]] = {
    "raise_init": _raise,
    "hang_init": lambda _: time.sleep(3600),
    "exit_init": lambda _: os._exit(3),
    "raise": _raise,
    "unpicklable": _raise_unpicklable,
    "oom": _run_out,
    "host_memory": _fill_host_memory,
    "exit": lambda _: os._exit(3),
    "sys_exit": lambda _: sys.exit(3),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda _: ctypes.memset(0, 0, 1),  # type: ignore[func-returns-value]
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    # Two that a process survives, and keeps.
    "thread": lambda _: threading.Thread(target=time.sleep, args=(3600,), daemon=True).start(),
    "child": lambda _: subprocess.Popen(["sleep", "3601"]),
    "loop": _loop,
    "hold_gil": _hold_gil,
    "sleep": lambda _: time.sleep(3600),
    "mismatch": _wait_for_nothing,
    "device_error": _device_error,
    "device_hang": _device_hang,
}
