"""The workload `script`: a training script as one gives it to torchrun, not changed in anything.

`Script` declares its parameters; a worker runs `RunningScript` in its place. `raybench plan`
imports this module, so torch is imported inside the functions that need it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.rules import product_of, render, split_arguments
from raybench.records import Task
from raybench.workloads.base import Context, Workload
from raybench.workloads.scripts.process import Limits, ScriptProcess

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

# The driver must see where a script that hangs is before it ends it.
_WRITE_S = 0.3
_LEAST_S = 0.1
# torchrun sets none of them: they are for workers, which outlive the loss of a peer.
_OF_WORKERS = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)


class Script(Workload):
    """Runs a training script, unchanged, as torchrun does.

    Each rank is a process of its own below its worker, which is ended when enough is measured. An
    iteration ends where the step of an optimizer of torch.optim returns.
    """

    # Parameters in whose texts {name} stands for a setting of the point, which any axis may give.
    templates: ClassVar[tuple[str, ...]] = ("args", "items_per_step")
    # Only where the job gives one.
    needs_batch_size: ClassVar[bool] = False

    def __init__(
        self,
        context: Context,
        *,
        path: Annotated[
            str,
            Field(
                min_length=1,
                description="The file, from the current directory or that of the job file.",
            ),
        ],
        args: Annotated[
            str, Field(description="Its arguments; {batch_size} stands for that setting.")
        ] = "",
        items_per_step: Annotated[
            str,
            Field(
                description="Samples of an iteration on one rank, as in {batch_size} or "
                "{batch_size} * 8. Without it there is no throughput."
            ),
        ] = "",
        step_of: Annotated[
            str,
            Field(
                description="Class of the optimizer whose step ends an iteration; by default the "
                "last one to make its first step."
            ),
        ] = "",
    ) -> None:
        self._run(context)

    def step(self) -> None:
        """Raise UsageError: the script runs in a process of its own."""
        self._run()

    @staticmethod
    def _run(*_: Any) -> None:
        raise UsageError("a script runs as the workload of a point only, not in this process")


class _Rank(NamedTuple):
    """What each rank tells all others.

    device: its name in CUDA_VISIBLE_DEVICES; empty for a CPU. store: address and port of the TCP
    store that it serves, of rank 0 only.
    """

    node_rank: int
    local_rank: int
    device: str
    store: tuple[str, int] | None


class RunningScript(Workload):
    """A script that has made its first step, and waits there.

    store: a TCP store for the ranks of the script, served by rank 0; None on the others.
    is_aborted: tells whether another rank has failed. deadline_s: when the time of the point is up,
    by `time.monotonic`.
    process: runs further steps on request. facts: what the process told of itself at its first
    step: `clock`, cuda or host, and `ranks`, the size of its process group.

    Raises ScriptFailedError and ScriptAbortedError as `ScriptProcess.wait_for_first_step`.
    """

    def __init__(
        self,
        context: Context,
        task: Task,
        store: TCPStore | None,
        is_aborted: Callable[[], bool],
        deadline_s: float,
    ) -> None:
        given, settings = task.point.params, task.point.settings
        file = task.code.script if task.code else None
        # It lives as long as the ranks of the script may ask for it.
        self._store = store
        own = _Rank(
            node_rank=int(os.environ["GROUP_RANK"]),
            local_rank=context.local_rank,
            device=_visible_name(context),
            store=(store.host, store.port) if store else None,
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
        """Return a sentence for each way in which the script runs otherwise than the point says."""
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
    """Return what each rank tells, by rank. All ranks call it, outside of anything timed."""
    if world_size == 1:
        return [own]
    import torch.distributed as dist

    ranks: list[Any] = [None] * world_size
    dist.all_gather_object(ranks, own)
    return ranks


def _torchrun_variables(ranks: list[_Rank]) -> Mapping[str, str]:
    """Return the variables of torchrun that this worker lacks or has with another value.

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
