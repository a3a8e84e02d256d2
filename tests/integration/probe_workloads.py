"""Workloads of the integration tests: they write down where they ran, and they fail on demand."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import Field
from torch.utils.data import DataLoader

from raybench.workloads.base import Context
from raybench.workloads.networks import Mlp
from tests.integration.fault_workloads import FAULTS

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
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        facts = {
            "sum": int(total.item()),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "known_group": world is not None and world in _seen_groups,
            "environment": {name: os.environ.get(name) for name in names},
            "niceness": os.nice(0),
        }
        path = self._folder / f"{self._context.world_size}-{self._context.rank}.json"
        if not path.exists():
            path.write_text(json.dumps(facts))

    def close(self) -> None:
        if dist.group.WORLD is not None:
            _seen_groups.append(dist.group.WORLD)


class Failing(Mlp):
    """A DDP model and a sum over the ranks, one of which fails in the chosen way in its third step.

    early: in __init__; late: in close(), when the others have answered. Nothing is counted for
    which they would wait.
    """

    flops_per_step = 1.0

    def __init__(
        self,
        context: Context,
        *,
        fault: str = "none",
        faulty_rank: Annotated[int, Field(ge=0, description="the rank that fails")] = 1,
    ) -> None:
        super().__init__(context, hidden=32, layers=2)
        self._context = context
        self._fault = fault if context.rank == faulty_rank else "none"
        self._total = torch.ones(1)
        self._steps = 0
        if self._fault == "early":
            raise ValueError("not even built")

    def step(self) -> None:
        self._steps += 1
        if self._steps == 3 and self._fault in FAULTS:
            FAULTS[self._fault](self._context)
        super().step()
        if dist.is_initialized() and not (self._fault == "skip" and self._steps == 3):
            dist.all_reduce(self._total)

    def close(self) -> None:
        if self._fault == "late":
            time.sleep(2.0)
            raise ValueError("not even closed")


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


class Orphans:
    """Starts children, writes their process ids to a folder, and hangs in its first step.

    The hang is a loop that holds on to Python's lock, with every signal ignored that can be.
    """

    takes_batch_size = False

    def __init__(self, context: Context, *, folder: str) -> None:
        self.items_per_step = 1
        child = subprocess.Popen(["sleep", "600"])
        session = subprocess.Popen(["sleep", "600"], start_new_session=True)
        daemonise = ["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"]
        daemon = subprocess.run(daemonise, stdout=subprocess.PIPE, text=True)
        self._loading = iter(DataLoader(range(100_000), num_workers=1, timeout=60))
        loaders = [worker.pid for worker in self._loading._workers]
        processes = [os.getpid(), child.pid, session.pid, int(daemon.stdout), *loaders]
        Path(folder, f"{context.rank}.tmp").write_text(json.dumps(processes))
        Path(folder, f"{context.rank}.tmp").rename(Path(folder, f"{context.rank}.json"))

    def step(self) -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while time.time() > 0:
            pass
