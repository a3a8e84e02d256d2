"""What a group of workers is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raybench.job.point import SCRIPT, Point, Precision

if TYPE_CHECKING:
    from raybench.job.model import Measure
    from raybench.records.environment import Code


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Where a worker stands in its group, in the words of torch.distributed."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A process group to be formed: its own name in the store, never used twice.

    Keys left behind by an earlier group make gloo fail to connect, so no prefix is reused.
    """

    name: str
    store_address: str
    store_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker group is asked to do: one point, and how to measure it.

    code: what every worker must have loaded; None where any will do.
    precisions: a worker times large matrix products in each of these and in that of the point, each
    once in its life, before the point. None: it times none, not even in that of the point.
    """

    point: Point
    settings: Measure
    seed: int = 0
    profile: bool = False
    code: Code | None = None
    precisions: tuple[Precision, ...] | None = ()

    @property
    def is_script(self) -> bool:
        """Return whether the workload is a script, whose steps run in a child of each worker."""
        return self.point.workload == SCRIPT

    @property
    def user_class(self) -> str:
        """The workload if the point names a class, as `package.module:Class`; "" for a built-in."""
        return self.point.workload if ":" in self.point.workload else ""

    @property
    def worker_environment(self) -> Mapping[str, str]:
        """Variables that workers must start with; {} for a script, whose own processes get them."""
        return {} if self.is_script else self.point.env
