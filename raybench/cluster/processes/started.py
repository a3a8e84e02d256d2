"""What srun and torchrun say of a process that they have started. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from raybench.errors import UsageError

# Where srun names no port; torchrun's own store has its.
_FIRST_PORT = 15000
_PORTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedProcess:
    """One of the processes of an srun or a torchrun; the first drives the others.

    by: who started them. id: of the step or run, the same for all. node: number of its node.
    address, port: where the first one can be reached from other hosts. rack: of its node; empty
    where nobody tells.
    """

    by: str
    id: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    address: str
    port: int
    rack: str = ""

    @property
    def is_on_one_host(self) -> bool:
        """Whether all of them are on this host."""
        return self.local_world_size == self.world_size


def read_started(environment: Mapping[str, str]) -> StartedProcess | None:
    """Read what a launcher has set; None for a process that is alone. Raises UsageError."""
    try:
        if "SLURM_STEP_NUM_TASKS" in environment:
            found = _of_srun(environment)
        elif "LOCAL_WORLD_SIZE" in environment:
            found = _of_torchrun(environment)
        else:
            return None
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"--launcher processes: srun or torchrun has started this process, but {error} is not "
            "as they set it; unset SLURM_STEP_NUM_TASKS and LOCAL_WORLD_SIZE to run on this host"
        ) from None
    return found if found.world_size > 1 else None


def _of_srun(given: Mapping[str, str]) -> StartedProcess:
    node, step = int(given["SLURM_NODEID"]), f"{given['SLURM_JOB_ID']}.{given['SLURM_STEP_ID']}"
    port = given.get("MASTER_PORT") or _FIRST_PORT + int(given["SLURM_JOB_ID"]) % _PORTS
    return StartedProcess(
        by="srun",
        id=step,
        rank=int(given["SLURM_PROCID"]),
        world_size=int(given["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(given["SLURM_LOCALID"]),
        local_world_size=tasks_per_node(given["SLURM_STEP_TASKS_PER_NODE"])[node],
        node=node,
        address=given.get("MASTER_ADDR") or first_host(given["SLURM_STEP_NODELIST"]),
        port=int(port),
        rack=leaf_switch(given.get("SLURM_TOPOLOGY_ADDR", "")),
    )


def _of_torchrun(given: Mapping[str, str]) -> StartedProcess:
    return StartedProcess(
        by="torchrun",
        id=f"{given.get('TORCHELASTIC_RUN_ID', 'none')}-{given['MASTER_PORT']}",
        rank=int(given["RANK"]),
        world_size=int(given["WORLD_SIZE"]),
        local_rank=int(given["LOCAL_RANK"]),
        local_world_size=int(given["LOCAL_WORLD_SIZE"]),
        node=int(given["GROUP_RANK"]),
        address=given["MASTER_ADDR"],
        # That one itself is taken by torchrun's store.
        port=int(given["MASTER_PORT"]) + 1,
    )


def tasks_per_node(text: str) -> list[int]:
    """Read Slurm's short form: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts


def leaf_switch(path: str) -> str:
    """Read the switch next to a node, the last but the node itself: of `s0.s4.gpu3` it is s4."""
    return path.rpartition(".")[0].rpartition(".")[2]


def first_host(nodes: str) -> str:
    """Read the first of Slurm's list of hosts: of `gpu[03-05,9],x1` it is gpu03."""
    if found := re.match(r"([^,\[]*)\[([^\],-]+)[^\]]*\]([^,]*)", nodes):
        return "".join(found.groups())
    return nodes.partition(",")[0]
