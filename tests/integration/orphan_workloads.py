"""A workload that has children of all kinds and then never comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from torch.utils.data import DataLoader

from raybench.workloads.base import Context


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
        self._loading = iter(DataLoader(range(100_000), num_workers=1, timeout=60))  # type: ignore[arg-type]
        loaders = [worker.pid for worker in self._loading._workers]  # type: ignore[attr-defined]
        processes = [os.getpid(), child.pid, session.pid, int(daemon.stdout), *loaders]
        Path(folder, f"{context.rank}.tmp").write_text(json.dumps(processes))
        Path(folder, f"{context.rank}.tmp").rename(Path(folder, f"{context.rank}.json"))

    def step(self) -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while time.time() > 0:
            pass
