"""The workload `torchrun_launch`: torchrun on each node at the same time, as a user types it.

One worker a node starts it there, in the environment that workers have. What is timed is the
program that torchrun runs; it uses nothing of raybench's measuring.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field

from raybench.workloads.base import Context, Workload

_TIMEOUT_S = 280.0
_STEP_S = 0.001


class TorchrunLaunch(Workload):
    """Runs a module by torchrun on the nodes of its ranks; prints what its rank 0 answers.

    Raises RuntimeError with the last words of torchrun where there is no answer.
    """

    takes_batch_size = False
    # It is communication: nobody is to count its arithmetic.
    message_bytes = 4
    busbw_factor = 1.0

    def __init__(
        self,
        context: Context,
        *,
        module: Annotated[str, Field(description="What `python -m` runs.")],
        spec: Annotated[str, Field(description="JSON object that it is given.")],
        addresses: Annotated[str, Field(description="Of the nodes, by rank, commas between.")],
        processes: Annotated[int, Field(gt=0, description="Ranks of torchrun on each node.")],
    ) -> None:
        with tempfile.TemporaryDirectory(prefix="raybench-torchrun-") as folder:
            output = Path(folder) / "answer.json"
            given = json.dumps({**json.loads(spec), "output": str(output)})
            launcher = _launcher(context, addresses.split(","), processes)
            errors = _run([*launcher, "-m", module, given])
            if context.rank == 0 and not output.exists():
                raise RuntimeError(errors)
            if context.rank == 0:
                print(f"raybench: torchrun {output.read_text(encoding='utf-8')}", flush=True)

    def step(self) -> None:
        """Do nothing: the answer was printed."""
        time.sleep(_STEP_S)


def _launcher(context: Context, addresses: list[str], processes: int) -> list[str]:
    import torch.distributed as dist

    here = addresses[context.rank]
    meeting = [f"{addresses[0]}:{_free_port(addresses[0]) if context.rank == 0 else 0}"]
    if context.world_size > 1:
        dist.broadcast_object_list(meeting, device=context.device)
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={context.world_size}", f"--nproc-per-node={processes}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={meeting[0]}", "--rdzv-id=raybench"),
        # Not by the host's own name, which is a loopback address on many.
        f"--rdzv-conf=is_host={str(context.rank == 0).lower()}",
        f"--local-addr={here}",
    ]


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as asked:
        port: int = asked.getsockname()[1]
        return port


def _run(command: list[str]) -> str:
    """Run it and return its last words; none of its processes stays behind."""
    # What this process was told of its own rank is not for those of torchrun.
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    left_out = {*own, "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        errors = process.communicate(timeout=_TIMEOUT_S)[1]
    finally:
        process.terminate()
    lines = [line for line in errors.splitlines() if line.strip()]
    told = [line for line in lines if "Error: " in line and "ChildFailed" not in line]
    return next(iter(told), lines[-1] if lines else f"torchrun ended with {process.returncode}")
