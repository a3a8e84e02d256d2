"""A workload on which one rank hangs in a chosen way, at a chosen step; each way is real."""

import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import Field

from raybench.workloads.base import Context

# More than all of NCCL's buffers: a smaller difference in size need not hang.
_LARGE = 64 << 20
_FOREVER_S = 3600


class _Waiting:
    """Data whose first item never comes."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        time.sleep(_FOREVER_S)
        return index


def process_file(number: int) -> Path:
    """Return the file to which the hanging rank of a point writes its host and process id."""
    return Path(tempfile.gettempdir()) / f"raybench-hang-{number}"


class Hanging:
    """Sums gradients and a loss over the ranks, as a training step does."""

    def __init__(
        self,
        context: Context,
        *,
        way: Annotated[str, Field(description="one of HEALTHY or KINDS")] = "none",
        hanging_rank: Annotated[int, Field(ge=0)] = 1,
        at_step: Annotated[int, Field(ge=1)] = 60,
        number: Annotated[int, Field(ge=0, description="tells points apart")] = 0,
        pause_s: Annotated[float, Field(ge=0, description="in each step, or an evaluation")] = 0.0,
    ) -> None:
        self.items_per_step = 1
        self.flops_per_step = 1.0  # not counted: the counting would build it once more
        self._steps, self._at_step, self._pause_s = 0, at_step, pause_s
        self._number, self._rank = number, context.rank
        # All ranks evaluate or compile.
        is_of_all = way in ("evaluate", "compile")
        self._kind = way if is_of_all or context.rank == hanging_rank else "none"
        device = context.device
        # gloo ends a process where sizes differ, so all are alike there.
        size = 1 << (22 if device.type == "cuda" else 14)
        self._x = torch.randn(256, 256, device=device)
        self._gradient = torch.ones(size, device=device)
        self._loss = torch.ones(1 if device.type == "cuda" else size, device=device)

    def step(self) -> None:
        self._steps += 1
        kind = self._kind if self._steps == self._at_step else "none"
        if kind in KINDS:
            process_file(self._number).write_text(f"{socket.gethostname()} {os.getpid()}")
        if kind in _WAYS:
            _WAYS[kind]()
        elif kind == "evaluate":
            self._evaluate()
        elif self._kind == "compile" and self._steps == 2:
            # In the warm-up, after the first step; each rank compiles longer than the one before.
            self._compile(self._pause_s * (1 + self._rank))
        elif self._kind == "none" and self._pause_s:
            time.sleep(self._pause_s)
        self._x @ self._x
        if kind == "size":
            dist.all_reduce(torch.ones(_LARGE, device=self._x.device))
        elif kind != "skip":
            dist.all_reduce(self._gradient)
        try:
            self._add_loss(kind)
        except ValueError:
            return
        if self._steps % 4 == 0:
            self._loss.fill_(1 + 0 * float(self._loss[0].item()))

    def _add_loss(self, kind: str) -> None:
        if kind == "swallow":
            raise ValueError("a bad batch")
        if kind == "other":
            dist.broadcast(self._loss, 0)
        else:
            dist.all_reduce(self._loss)

    def _evaluate(self) -> None:
        until_s = time.monotonic() + self._pause_s
        while time.monotonic() < until_s:
            (self._x @ self._x).sum().item()

    def _compile(self, seconds: float) -> None:
        until_s, size = time.monotonic() + seconds, 64
        while time.monotonic() < until_s:
            torch._dynamo.reset()
            x = torch.randn(size, 64, device=self._x.device)
            torch.compile(lambda y: torch.softmax(y.relu() @ y.T, 0).sum(), dynamic=False)(x)
            size += 1


def _sleep() -> None:
    time.sleep(_FOREVER_S)


def _loop() -> None:
    while True:
        pass


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _run_kernel() -> None:
    torch.cuda._sleep(10**15)


def _wait_for_data() -> None:
    for _ in torch.utils.data.DataLoader(_Waiting(), num_workers=1):  # type: ignore[arg-type]
        break


_WAYS = {
    "sleep": _sleep,
    "loop": _loop,
    "stop": _stop,
    "lock": _lock,
    "kernel": _run_kernel,
    "data": _wait_for_data,
}
# The way to hang -> the cause that is right.
KINDS = {
    "sleep": "sleeps",
    "loop": "not_entered",
    "stop": "stopped",
    "lock": "waits_for_lock",
    "skip": "skipped",
    "other": "other_collective",
    "data": "waits_for_data",
    "swallow": "skipped",
    "kernel": "device_busy",
    "size": "other_size",
}
# Points in which no rank hangs -> length of a pause in seconds.
HEALTHY = {"none": 3.0, "evaluate": 30.0, "compile": 15.0}
# gloo has no kernels, and ends a process where sizes differ.
ONLY_NCCL = ("kernel", "size")
