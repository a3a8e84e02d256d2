"""The request to a group of workers: run one point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raybench.job.point import SCRIPT, Point, Precision

if TYPE_CHECKING:
    from raybench.job.model import Measure
    from raybench.records.code import Code

_OWN_MODULES = "raybench."


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Position of a worker in its group, as torch.distributed defines it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The name of a process group and the store in which its ranks meet."""

    # Prefix of the group's keys in the store. Unique, because gloo fails if it finds the keys of an
    # earlier group.
    name: str
    store_address: str
    store_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One point for a group of workers, and how to measure it."""

    point: Point
    settings: Measure
    seed: int = 0
    profile: bool = False
    # The code that every worker must have loaded; None: any code.
    code: Code | None = None
    # Precisions besides the precision of the point in which each worker once times large matrix
    # products. None: no such timing, not even in the precision of the point.
    precisions: tuple[Precision, ...] | None = ()

    @property
    def is_script(self) -> bool:
        """Whether the workload is a script, whose steps run in a child of each worker."""
        return self.point.workload == SCRIPT

    @property
    def user_class(self) -> str:
        """The class as `package.module:Class`; empty for a workload of raybench."""
        workload = self.point.workload
        is_class = ":" in workload
        return workload if is_class and not workload.startswith(_OWN_MODULES) else ""

    @property
    def worker_environment(self) -> Mapping[str, str]:
        """Variables for new workers; empty for a script, whose own processes get them."""
        return {} if self.is_script else self.point.env
