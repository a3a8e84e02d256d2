"""The interface of a cluster, and how to connect to one; imports Ray only when needed."""

from __future__ import annotations

import os
import sys
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

    A worker id is a position in `devices`. Unless its docstring says otherwise, every method but
    `close` raises ClusterError when the cluster is gone.
    """

    @property
    def description(self) -> str:
        """One line for the user: the cluster, and the number and kind of its devices."""

    @property
    def kind(self) -> DeviceKind:
        """Kind of the devices."""

    @property
    def capacity(self) -> int:
        """Largest possible number of devices of a point, lost and pending devices included."""

    @property
    def is_private(self) -> bool:
        """Whether this process has started the cluster, and ends it by `close`."""

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
        """Upper bound of the number of workers that may still join."""

    @property
    def other_sweeps(self) -> tuple[str, ...]:
        """Other sweeps that share the devices, each in words."""

    def start(self, count: int, strategy: Strategy) -> None:
        """Start up to `count` workers; `refresh` adds late workers. Call it once.

        Args:
            count: ignored if the request has a device list.
            strategy: which devices to take if there are more than `count`.

        Raises:
            ClusterError: no worker comes, or a device is missing or cannot be used.
            DevicesInUseError: another sweep has the devices.
        """

    def refresh(self, timeout_s: float) -> None:
        """Add workers that have joined, and mark lost workers. Points may run meanwhile.

        Args:
            timeout_s: how long to wait for a pending worker. Starting a worker takes longer.
        """

    def run(
        self,
        task: Task,
        worker_ids: Sequence[int],
        tell_hang: Callable[[HangVerdict], None] = lambda _: None,
    ) -> tuple[RankAnswer, ...]:
        """Run a point and return one answer per rank; a rank that fails or hangs has a Failure.

        The workers can run the next point afterwards, or are lost. Thread-safe for disjoint
        workers.

        Args:
            worker_ids: in rank order. If a worker is lost or cannot start, no rank runs.
            tell_hang: gets the verdict as soon as a rank is found to hang; the point goes on.
        """

    def restart(self) -> None:
        """Replace each process that has run a point, and wait; no point may run.

        A worker is lost if its new process does not start.
        """

    def watch_other_users(self, worker_ids: Sequence[int]) -> Callable[[], OtherUsers]:
        """Look for other users of a point's nodes; return a function to call after the point.

        The function looks again, and returns the users of both looks. Without
        `ClusterRequest.terms` it returns no users. Both calls take at most 4 s and never raise.
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
    # Number of devices to wait for, and number of CPU workers of a private Ray. 0: the devices that
    # are present; a private Ray then has one CPU worker per core.
    devices_wanted: int
    wait_s: float = 0.0
    # Whether CPU workers of a private Ray may share cores.
    oversubscribe: bool = False
    # How to share devices with other sweeps; None: lock no device and ignore other sweeps.
    terms: ReservationTerms | None = None
    # The devices to use; None: all.
    only: DeviceList | None = None
    # Models of devices to prefer; other models are used only if no preferred model is there.
    models: Collection[str] = ()


def connect(
    request: ClusterRequest,
    *,
    end: Callable[[str], None],
    log: Callable[[str], None] = lambda _: None,
) -> Cluster:
    """Join a Ray cluster, or start a private Ray; start no worker yet.

    A process can have one cluster at a time. In the main thread, Ray replaces the handler of
    SIGTERM. If the process has joined a Ray already, this Ray is used, and it stays joined.

    Args:
        end: must end this process. A thread calls it with a reason if the cluster is gone and the
            main thread hangs in Ray.
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


def pickle_for_workers(value: object) -> bytes:
    """Pickle an object; functions and classes of `__main__`, and closures, by value.

    Raises:
        Exception: a part of the object cannot be pickled.
    """
    from raybench.cluster.ray_cluster.actor import pickle_by_value

    return pickle_by_value(value)


def find_kind(address: str, device: Literal["auto", "cuda", "cpu"]) -> DeviceKind:
    """Return the kind of the devices that `connect` would use; joins and starts nothing.

    Args:
        address, device: as in `ClusterRequest`.

    Raises:
        ClusterError: this machine has a GPU that cannot be used, or the cluster of the address is
            not found.
        UsageError: the address is malformed.
    """
    if device == "cpu":
        return "cpu"
    gpus: int | None = None
    if not starts_private(address):
        if device == "cuda":
            return "cuda"
        from raybench.cluster.ray_cluster import start

        gpus = start.count_gpus(address)  # None if no cluster answers
    if gpus is None:
        # `connect` would start a private Ray, on this machine.
        from raybench.hardware.gpu_presence import count_gpus

        gpus = count_gpus()
    return "cuda" if gpus or device == "cuda" else "cpu"


def starts_private(address: str) -> bool:
    """Return whether `connect` will start a private Ray on this host.

    Loads Ray only if a program of Ray runs on this host. After False, `connect` may still start a
    private Ray, if the cluster of this host is gone meanwhile.

    Raises:
        ClusterError: `auto` could mean several clusters of this host.
    """
    if "ray" in sys.modules:
        from raybench.cluster.ray_cluster import ray_internals

        if ray_internals.has_joined():
            return False
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        return address == "local"
    if not _runs_raylet():
        return True
    from raybench.cluster.ray_cluster import start

    return not start.find_own_cluster().address


def _runs_raylet() -> bool:
    """Return whether a node of any Ray runs on this host."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0].endswith("/raylet"):
            return True
    return False
