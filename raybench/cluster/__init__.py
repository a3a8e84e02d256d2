"""What the sweep asks of a cluster: of Ray's workers, or of the one in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from raybench.cluster.allocator import Strategy
from raybench.records import Answer, Device, DeviceSample, Task
from raybench.records.device_facts import DeviceFacts

# Ray reads these when it is imported, and this package is imported before it. The uv hook would
# build a new environment for every worker (ray#59639). A thread that still asks after
# `ray.shutdown` would start a second Ray, on the host's outside address. The others keep Ray's own
# lines off the user's terminal.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

DeviceKind = Literal["cuda", "cpu"]


class Cluster(Protocol):
    """Live workers, one per device."""

    @property
    def description(self) -> str:
        """One line for the user: which cluster, and of what."""

    @property
    def kind(self) -> DeviceKind:
        """Of its devices."""

    @property
    def capacity(self) -> int:
        """Devices that the cluster could give to a point."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """Of every worker, by node and then by index; a worker is a position in it.

        Workers that come late stand at the end; a worker is never taken away.
        """

    @property
    def lost(self) -> frozenset[int]:
        """Workers that cannot be used any more, because their node or their device is gone."""

    @property
    def pending(self) -> int:
        """How many workers were asked for and may still come."""

    @property
    def others(self) -> tuple[str, ...]:
        """Other sweeps that had the devices at the start, in words."""

    def start(self, count: int, strategy: Strategy) -> None:
        """Start `count` workers. Raises ClusterError when not one of them comes."""

    def refresh(self, timeout_s: float) -> None:
        """Take in workers that came and note those that are gone; wait at most so long for one."""

    def run(self, task: Task, worker_ids: Sequence[int]) -> tuple[Answer, ...]:
        """One answer per rank, always: a rank that died or hangs is a Failure, never an exception.

        Several threads may call it at once for disjoint workers. It returns when the workers are
        fit for their next point, or lost. Raises ClusterError when the cluster itself is gone.
        """

    def restart(self) -> None:
        """Replace the processes of all workers, at once; no point may run meanwhile.

        A worker that can have no new process is lost. Raises ClusterError when the cluster is gone.
        """

    def bystanders(self, worker_ids: Sequence[int]) -> Callable[[], tuple[str, ...]]:
        """Begin to look who else uses the devices of these workers.

        The call, when their point has run, tells who did meanwhile, a few words for each; neither
        raises, nor waits long.
        """

    def telemetry(self) -> tuple[DeviceSample, ...]:
        """Return what was sampled of the devices since the last call; never raise or wait long."""

    def read_device_facts(self) -> tuple[DeviceFacts, ...]:
        """Read state and error counters of each device, in their order; no point may run meanwhile.

        One whose node does not answer is `unread`; never raises.
        """

    def give_back(self, count: int, strategy: Strategy) -> None:
        """Let nodes go that a point of so many devices would not have; no point may run meanwhile.

        None that comes needs more. What a sweep has not asked others for stays as it is.
        """

    def close(self) -> None:
        """Let all workers go."""
