"""The process group of a worker: raybench's own, kept while points use the same workers."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from raybench.errors import UsageError
from raybench.measure.timing import align_ranks
from raybench.records import Group, Place, Task

# The driver's deadline ends a point; torch's own must not come before it, nor never.
_TIMEOUT_MARGIN_S = 60.0
_world: Any = dist.distributed_c10d._world


class ProcessGroup:
    """Membership of one worker in the group of its point, if that has one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: Group | None = None
        self._ours: dist.ProcessGroup | None = None

    def join(self, task: Task, place: Place, group: Group | None) -> None:
        """Form `group` if it is another than the last; tell the place as torchrun does."""
        tell_place(place, group)
        if group == self._group:
            return
        if group is None:
            raise AssertionError("the old group must be left before a point runs without one")
        timeout = timedelta(seconds=task.settings.timeout_s + _TIMEOUT_MARGIN_S)
        store = TCPStore(group.store_address, group.store_port, is_master=False, timeout=timeout)
        # No device_id: torch then splits communicators, which crashes after a second init
        # (pytorch#192109).
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=PrefixStore(group.name, store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )
        self._group, self._ours = group, dist.group.WORLD
        align_ranks(self._device)

    def leave(self) -> None:
        """Take down the process group. All its members must be alive and idle."""
        if self._group is not None:
            dist.destroy_process_group()
            self._group = self._ours = None

    def check(self, workload: str) -> None:
        """Without the group the ranks measure alone, and so would those of the next points.

        Raises UsageError.
        """
        if self._group is not None and dist.group.WORLD is not self._ours:
            raise UsageError(
                f"workload {workload} destroyed the process group, which is raybench's and kept "
                "for the next points; leave dist.destroy_process_group() out of it"
            )

    def drop_others(self) -> None:
        """Take down the groups that a workload made, last made first, on every rank alike.

        At world size 1 a workload may have made a default group of its own, and the next point's
        could not be formed.
        """
        for group in reversed([group for group in _world.pg_names if group is not self._ours]):
            if group in _world.pg_map:
                dist.destroy_process_group(group)


def tell_place(place: Place, group: Group | None) -> None:
    """The variables of torchrun, which libraries read."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        GROUP_RANK=str(place.node_rank),
    )
    if group is not None:
        os.environ.update(MASTER_ADDR=group.store_address, MASTER_PORT=str(group.store_port))
