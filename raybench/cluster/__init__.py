"""The interface of a cluster, and how to connect to one; imports Ray only when needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from raybench.job.point import Strategy
from raybench.records.device import Device, DeviceKind
from raybench.records.devices import DeviceFacts, DeviceList, DeviceSample
from raybench.records.hang import HangVerdict
from raybench.records.measurement import RankAnswer
from raybench.records.record import OtherUsers
from raybench.records.task import Task

if TYPE_CHECKING:  # `raybench plan` must not load psutil
    from raybench.cluster.device_reservation import ReservationTerms


class Cluster(Protocol):
    """Live workers, one per device.

    A worker id is a position in `devices`. Every method but `close` may raise ClusterError when the
    cluster is gone, unless it says otherwise.
    """

    @property
    def description(self) -> str:
        """One line for the user: the cluster, and the number and kind of its devices."""

    @property
    def kind(self) -> DeviceKind:
        """Kind of the devices."""

    @property
    def capacity(self) -> int:
        """Upper limit of the devices of a point, lost and pending devices included; constant."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """Device of every worker; empty before `start`.

        Sorted by rack, node and index; late workers are appended. Lost workers keep their entries.
        """

    @property
    def lost(self) -> frozenset[int]:
        """Ids of unusable workers: their node, device or process is gone for good."""

    @property
    def pending(self) -> int:
        """Upper limit of the workers that may still join; `refresh` may raise it."""

    @property
    def other_sweeps(self) -> tuple[str, ...]:
        """Other sweeps that share the devices, each in words."""

    def start(self, count: int, strategy: Strategy) -> None:
        """Start up to `count` workers; late workers join in `refresh`. Call it once.

        Args:
            count: ignored if the request has a device list.
            strategy: which devices to take if there are more than `count`.

        Raises:
            ClusterError: no worker comes, or a device is missing or cannot be used.
            DevicesInUseError: another sweep has the devices.
        """

    def refresh(self, timeout_s: float) -> None:
        """Add workers that have come and note lost workers; points may run meanwhile.

        Args:
            timeout_s: how long to wait for a pending worker. It is exceeded while workers start.
        """

    def run(
        self,
        task: Task,
        worker_ids: Sequence[int],
        tell_hang: Callable[[HangVerdict], None] = lambda _: None,
    ) -> tuple[RankAnswer, ...]:
        """Run a point and return one answer per rank; a rank that fails or hangs has a Failure.

        It returns when its workers can run again or are lost. Several threads may call it for
        disjoint workers.

        Args:
            worker_ids: in rank order. If one is lost or cannot start, no rank runs.
            tell_hang: gets the verdict as soon as a rank is found to hang; the point goes on.
        """

    def restart(self) -> None:
        """Replace each process that has run a point, and wait; no point may run.

        A worker is lost if its new process does not start.
        """

    def watch_other_users(self, worker_ids: Sequence[int]) -> Callable[[], OtherUsers]:
        """Look before a point who else uses its nodes; return a function to call after the point.

        The function looks again, and names the users in either look. Both calls take 4 s at most
        and never raise. Without `ClusterRequest.terms` the function names nobody.
        """

    def telemetry(self) -> tuple[DeviceSample, ...]:
        """Return the GPU samples since the last call. Never raises. Not thread-safe."""

    def read_device_facts(self) -> tuple[DeviceFacts, ...]:
        """Return state and error counters of each device; no point may run. Never raises.

        If a node does not answer in 20 s, `DeviceFacts.unread` gives the reason.
        """

    def close(self) -> None:
        """End all workers, also during a point, and give the devices back. Call it once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """Which cluster to join or start, and which of its devices to use."""

    # HOST:PORT; `local` for a private Ray; or `auto`: RAY_ADDRESS, else the cluster of `ray start`
    # on this host, else a private Ray.
    address: str
    # `auto` is cuda if the cluster has a GPU.
    device: Literal["auto", "cuda", "cpu"]
    # Number of devices to wait for, and number of CPU workers of a private Ray. If 0, take the
    # devices that are there; a private Ray then has one CPU worker per core.
    devices_wanted: int
    # How long missing devices may take to come.
    wait_s: float = 0.0
    # Whether CPU workers of a private Ray may share cores.
    oversubscribe: bool = False
    # How to share devices with other sweeps; None locks no device and ignores other sweeps.
    terms: ReservationTerms | None = None
    # The devices to use; None: all.
    only: DeviceList | None = None
    # Models of devices to prefer. Other models are used only if the preferred models are missing.
    models: Collection[str] = ()


def connect(
    request: ClusterRequest,
    *,
    end: Callable[[str], None],
    log: Callable[[str], None] = lambda _: None,
) -> Cluster:
    """Join a Ray cluster, or start a private one, and return it; no worker is started yet.

    A process can have one cluster at a time. In the main thread this replaces the handler of
    SIGTERM.

    Args:
        end: must end this process. It is called with a reason, in a thread, while the main thread
            waits for a cluster that is gone.
        log: gets lines for the user.

    Raises:
        ClusterError: there is no cluster, or no GPU for `cuda` without `wait_s`.
        UsageError: the address is malformed.
    """
    from raybench.cluster.ray_cluster import start
    from raybench.cluster.ray_cluster.cluster import RayCluster

    joined = start.connect_ray(
        request.address,
        request.device,
        request.devices_wanted,
        request.wait_s,
        end,
        oversubscribe=request.oversubscribe,
    )
    return RayCluster(
        joined, log, end=end, terms=request.terms, only=request.only, models=request.models
    )


def starts_private(address: str) -> bool:
    """Return whether `connect` will start a private Ray on this host.

    After False, `connect` may still start one, if the cluster of this host turns out to be gone.

    Raises:
        ClusterError: `auto` could mean several clusters of this host.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        return address == "local"
    from raybench.cluster.ray_cluster import start

    return not start.find_own_cluster().address
