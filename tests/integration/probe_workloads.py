"""Workloads of the integration tests: they write down where they ran, and they fail on demand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from pydantic import Field

from raybench.workloads.base import Context
from raybench.workloads.mlp import Mlp

Fault = Literal["none", "raise", "kill", "hang", "oom", "exit", "unpicklable"]


# Process groups of earlier points of this process; kept, so that no new one is taken for it.
_seen_groups: list[dist.ProcessGroup] = []


class Probe:
    """Sums the ranks by a real all_reduce and writes what torch.distributed says to a folder."""

    def __init__(
        self,
        context: Context,
        *,
        folder: Annotated[str, Field(description="where each rank writes its file")],
    ) -> None:
        self.items_per_step = context.batch_size
        self._context = context
        self._folder = Path(folder)

    def step(self) -> None:
        total = torch.tensor([self._context.rank + 1])
        world = dist.group.WORLD
        if world is not None:
            dist.all_reduce(total)
        facts = {
            "sum": int(total.item()),
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "host": socket.gethostname(),
            "known_group": world is not None and world in _seen_groups,
            "environment": {
                name: os.environ.get(name)
                for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
            },
            "niceness": os.nice(0),
        }
        path = self._folder / f"{self._context.world_size}-{self._context.rank}.json"
        if not path.exists():
            path.write_text(json.dumps(facts))

    def close(self) -> None:
        if dist.group.WORLD is not None:
            _seen_groups.append(dist.group.WORLD)


class Faulty:
    """Works, but for one rank, which fails in the chosen way in the third step."""

    def __init__(
        self,
        context: Context,
        *,
        fault: Fault = "none",
        faulty_rank: Annotated[int, Field(ge=0, description="the rank that fails")] = 0,
    ) -> None:
        self.items_per_step = context.batch_size
        self._fault = fault if faulty_rank == context.rank else "none"
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps == 3:
            _FAULTS[self._fault]()
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))


class Mess:
    """Writes down what it sees of its process, and leaves that in a mess of the chosen kind."""

    def __init__(
        self,
        context: Context,
        *,
        folder: Annotated[str, Field(description="where each rank writes its file")],
        mess: Literal["none", "groups", "thread", "child"] = "none",
    ) -> None:
        self.items_per_step = 1
        self.flops_per_step = 1.0  # not counted: the counting would build it once more
        self._context = context
        self._mess = mess
        groups = sorted(dist.distributed_c10d._world.pg_names.values())
        facts = {"pid": os.getpid(), "groups": len(groups)}
        Path(folder, f"{context.rank}.json").write_text(json.dumps(facts))

    def step(self) -> None:
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))

    def close(self) -> None:
        if self._mess == "groups":
            for _ in range(2):
                dist.all_reduce(torch.ones(1), group=dist.new_group(list(range(2))))
        if self._mess == "thread" and self._context.rank == 1:
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        if self._mess == "child" and self._context.rank == 1:
            subprocess.Popen(["sleep", "3601"])


class _Unpicklable(Exception):
    def __init__(self, *, lock: object) -> None:
        super().__init__("holds what cannot travel")
        self.lock = lock


def _raise() -> None:
    raise ValueError("the workload says no\nsecond line")


def _raise_unpicklable() -> None:
    raise _Unpicklable(lock=open("/dev/null"))  # noqa: SIM115, PTH123 - kept open on purpose


def _oom() -> None:
    raise MemoryError("asked for more than there is")


_FAULTS = {
    "none": lambda: None,
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
    "oom": _oom,
    "exit": lambda: os._exit(3),
    "unpicklable": _raise_unpicklable,
}


class Straggler(Mlp):
    """An mlp on two ranks, one of which sleeps in each step before it computes."""

    def __init__(
        self,
        context: Context,
        *,
        slow_rank: Annotated[int, Field(ge=0)] = 1,
        delay_ms: Annotated[float, Field(ge=0)] = 0.0,
    ) -> None:
        super().__init__(context, hidden=256, layers=4)
        self._delay_s = delay_ms / 1e3 if context.rank == slow_rank else 0.0

    def step(self) -> None:
        time.sleep(self._delay_s)
        super().step()


class SaysItsProcess:
    """Prints the id of its process, which the results keep as its log."""

    def __init__(self, context: Context) -> None:
        self.items_per_step = context.batch_size
        print(f"process {os.getpid()}", flush=True)

    def step(self) -> None:
        time.sleep(0.002)
