"""The script of a point on one rank, as a workload whose steps another process runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from raybench.job.rules import product_of, render, split_arguments
from raybench.records import Task
from raybench.workloads.base import Context, Workload
from raybench.workloads.scripts.process import Limits, ScriptProcess
from raybench.workloads.scripts.tcp_store import serve_store

# The driver must see where a script that hangs is before it ends it.
_WRITE_S = 0.3
_LEAST_S = 0.1
# torchrun sets none of them: they are for workers, which outlive the loss of a peer.
_OF_WORKERS = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)


class _Rank(NamedTuple):
    """What all ranks know of one. store: address and port of the one that it serves; rank 0's."""

    node_rank: int
    local_rank: int
    device: str
    store: tuple[str, int] | None


class RunningScript(Workload):
    """A script that has made its first step, and waits there.

    address: of this worker's node. is_aborted: whether another rank has failed. deadline_s: when
    the time of the point is up, by `time.monotonic`.
    process: asked for more steps. facts: of the process, as it told them.
    """

    def __init__(
        self,
        context: Context,
        task: Task,
        address: str,
        is_aborted: Callable[[], bool],
        deadline_s: float,
    ) -> None:
        given, settings = task.point.params, task.point.settings
        file = task.code.script if task.code else None
        # It lives as long as the ranks of the script may ask for it.
        self._store = serve_store(address) if context.rank == 0 else None
        store = (address, self._store.port) if self._store else None
        own = _Rank(
            node_rank=int(os.environ["GROUP_RANK"]),
            local_rank=context.local_rank,
            device=_visible_name(context),
            store=store,
        )
        of_worker = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RAY_") and name not in _OF_WORKERS
        }
        environment = {
            **of_worker,
            **_torchrun_variables(_gather(own, context.world_size)),
            **task.point.env,
        }
        left_s = deadline_s - _WRITE_S - time.monotonic()
        self.process = ScriptProcess(
            Path(file.path if file else str(given["path"])).absolute(),
            split_arguments(render(str(given["args"]), settings)),
            step_of=str(given["step_of"]),
            environment=environment,
            folder=Path(file.folder) if file else Path.cwd(),
            limits=Limits(is_aborted=is_aborted, timeout_s=max(_LEAST_S, left_s)),
        )
        items = product_of(render(str(given["items_per_step"]), settings))
        if items is not None:
            self.items_per_step = items
        try:
            self.facts = self.process.wait_for_first_step()
        except BaseException:
            self.close()
            raise

    def step(self) -> None:
        """Run one iteration."""
        self.process.run_steps(1)

    def close(self) -> None:
        """End the script where it is."""
        self.process.end()

    def warnings(self, context: Context) -> list[str]:
        """Tell what makes the script another than the point says."""
        told = []
        if context.device.type == "cuda" and self.facts["clock"] == "host":
            told.append(
                "the parameters of the script's optimizer are not on a GPU: steps are timed by the "
                "host's clock"
            )
        if self.facts["ranks"] != context.world_size:
            told.append(
                f"the script's process group has {self.facts['ranks']} of {context.world_size} "
                "ranks: each may have trained alone"
            )
        return told


def _visible_name(context: Context) -> str:
    """Return what CUDA_VISIBLE_DEVICES calls the device of this rank; empty for a CPU."""
    if context.device.type != "cuda":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = context.device.index
    return visible.split(",")[index].strip() if visible else str(index)


def _gather(own: _Rank, world_size: int) -> list[_Rank]:
    """Exchange what the ranks know of themselves, outside of anything timed."""
    if world_size == 1:
        return [own]
    ranks: list[Any] = [None] * world_size
    dist.all_gather_object(ranks, own)
    return ranks


def _torchrun_variables(ranks: list[_Rank]) -> Mapping[str, str]:
    """Return those of torchrun that the worker has not, or has of its own.

    LOCAL_RANK counts along CUDA_VISIBLE_DEVICES, whichever devices these ranks have.
    """
    node_rank = int(os.environ["GROUP_RANK"])
    here = sorted(rank for rank in ranks if rank.node_rank == node_rank)
    ((address, port),) = (rank.store for rank in ranks if rank.store)
    variables = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GROUP_WORLD_SIZE": str(len({rank.node_rank for rank in ranks})),
        "ROLE_NAME": "default",
        "ROLE_RANK": os.environ["RANK"],
        "ROLE_WORLD_SIZE": os.environ["WORLD_SIZE"],
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # The ranks of the script find its store served, as torchrun's do.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if here[0].device:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(rank.device for rank in here)
    return variables
