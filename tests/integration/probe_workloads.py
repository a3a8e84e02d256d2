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


class Probe(Mlp):
    """A DDP model and a sum over the ranks; one rank may fail or be slow.

    A fault strikes in the third step; early: in __init__; late: in close(), when the others have
    answered. One class for all tests that share workers: another would cost them their processes.
    """

    flops_per_step = 1.0  # not counted: the ranks without the fault would wait for that

    def __init__(
        self,
        context: Context,
        *,
        hidden: int = 32,
        layers: int = 2,
        sums: Annotated[
            bool, Field(description="each step ends with the sum over the ranks")
        ] = True,
        faulty_rank: Annotated[int, Field(ge=0, description="the rank that fails or is slow")] = 1,
        fault: str = "none",
        delay_ms: Annotated[float, Field(ge=0, description="of the slow rank, in each step")] = 0.0,
        folder: Annotated[str, Field(description="where each rank writes its facts, if any")] = "",
    ) -> None:
        super().__init__(context, hidden=hidden, layers=layers)
        is_faulty = context.rank == faulty_rank
        self._context, self._sums, self._folder = context, sums, folder
        self._fault = fault if is_faulty else "none"
        self._delay_s = delay_ms / 1e3 if is_faulty else 0.0
        self._steps = 0
        if self._fault == "early":
            raise ValueError("not even built")

    def step(self) -> None:
        self._steps += 1
        time.sleep(self._delay_s)
        if self._steps == 3 and self._fault in FAULTS:
            FAULTS[self._fault](self._context)
        super().step()
        if not self._sums:
            return
        total = torch.tensor([self._context.rank + 1])
        if dist.is_initialized():
            dist.all_reduce(total)
        if self._folder:
            self._write_facts(int(total.item()))

    def _write_facts(self, total: int) -> None:
        world = dist.group.WORLD
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
        names += ["PROBE_GIVEN", "PROBE_KEPT"]
        facts = {
            "sum": total,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "known_group": world is not None and world in _seen_groups,
            "environment": {name: os.environ.get(name) for name in names},
            "niceness": os.nice(0),
        }
        path = Path(self._folder, f"{self._context.world_size}-{self._context.rank}.json")
        if not path.exists():
            path.write_text(json.dumps(facts))

    def close(self) -> None:
        if self._folder and dist.group.WORLD is not None:
            _seen_groups.append(dist.group.WORLD)
        if self._fault == "late":
            time.sleep(2.0)
            raise ValueError("not even closed")


class OtherProbe(Probe):
    """The same, as another class of the user's."""


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
