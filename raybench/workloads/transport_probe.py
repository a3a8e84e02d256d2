"""The workload `transport_probe`: a collective in processes of its own, to read what it says.

NCCL tells which way its bytes go once, when a communicator is made, and to a process that was
started with NCCL_DEBUG. So that no line is written while something is timed, each worker starts
a process for it beside its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from raybench.workloads.base import Context, Workload

_TIMEOUT_S = 90.0
# So short that it does not matter, and not nothing.
_STEP_S = 0.001


class TransportProbe(Workload):
    """Lets the ranks do one collective in other processes, and prints what NCCL or gloo tell of it.

    The lines are in the output of each rank. Raises RuntimeError when a process fails.
    """

    takes_batch_size = False
    # It is communication: nobody is to count its arithmetic.
    message_bytes = 4
    busbw_factor = 1.0

    def __init__(self, context: Context) -> None:
        print(_run_process(context), flush=True)

    def step(self) -> None:
        """Do nothing: what there is to know was printed."""
        time.sleep(_STEP_S)


def _run_process(context: Context) -> str:
    """Run the collective with the other ranks and return its lines."""
    import torch.distributed as dist

    name = [f"{os.getpid()}-{time.monotonic_ns()}"]
    if context.world_size > 1:
        # All ranks meet under the name that rank 0 has chosen: no name is used twice.
        dist.broadcast_object_list(name, device=context.device)
    device = str(context.device)
    command = [sys.executable, "-m", "raybench.workloads.transport_process", device, name[0]]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=dict(os.environ)
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout
