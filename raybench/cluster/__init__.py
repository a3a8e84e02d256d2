"""What a sweep asks of a cluster, and how it gets one; Ray is imported when it is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from raybench.job.point import Strategy
from raybench.records.device import Device, DeviceKind
from raybench.records.devices import DeviceFacts, DeviceList, DeviceSample
from raybench.records.measurement import RankAnswer
from raybench.records.record import OtherUsers
from raybench.records.task import Task

if TYPE_CHECKING:  # `raybench plan` shall not wait for psutil
    from raybench.cluster.device_reservation import ReservationTerms


class Cluster(Protocol):
    """Live workers, one per device."""

    @property
    def description(self) -> str:
        """One line for the user: which cluster, and at most how many devices of which kind."""

    @property
    def kind(self) -> DeviceKind:
        """Kind of the devices."""

    @property
    def capacity(self) -> int:
        """Upper limit of a point's devices, fixed by `connect`; lost and awaited ones count too."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """Device of every worker; the worker id is the position.

        Empty before `start`. Then sorted by rack, node and index; workers that come late are
        appended. That of a lost worker stays, that of a new process is read anew.
        """

    @property
    def lost(self) -> frozenset[int]:
        """Ids of workers of no more use: node or device is gone, or no new process starts."""

    @property
    def pending(self) -> int:
        """Upper limit of workers waited for, also for lost ones; at 0 `refresh` may add some."""

    @property
    def other_sweeps(self) -> tuple[str, ...]:
        """Other sweeps with which `start` shared devices, in words; () where none is known of."""

    def start(self, count: int, strategy: Strategy) -> None:
        """Start up to `count` workers, and wait for those that come soon: see `pending`. Call once.

        count: 1 at least. With a device list it is unused: each of these gets one. strategy: which
        devices are taken where there are more. Raises ClusterError when none comes, one cannot be
        used, the cluster is gone or, without `wait_s`, a listed one is missing; DevicesInUseError
        when other sweeps have one that `terms` do not share, or have all.
        """

    def refresh(self, timeout_s: float) -> None:
        """Add workers that came and note lost ones; wait at most `timeout_s` for a pending one.

        Points may run. It takes longer where it starts workers on devices that are free now.
        Changes `devices`, `lost` and `pending`. Raises ClusterError when the cluster is gone.
        """

    def run(self, task: Task, worker_ids: Sequence[int]) -> tuple[RankAnswer, ...]:
        """Run a point; return one answer per rank, in order: a Failure where it fails or hangs.

        worker_ids: one of each rank, in rank order; if one is `lost` or cannot start, no rank runs.
        Several threads may call it for disjoint workers. It returns when these can run again or are
        lost. Raises ClusterError when the cluster or its rendezvous store is gone, or closed.
        """

    def restart(self) -> None:
        """Replace each process that has been given a point, and wait; none may run one now.

        A worker that gets none is lost. Raises ClusterError when the cluster is gone or closed.
        """

    def watch_other_users(self, worker_ids: Sequence[int]) -> Callable[[], OtherUsers]:
        """Look who else uses the nodes of these workers, before their point runs.

        Call the result after the point: it names who is seen at either call or kept CPU workers'
        CPUs busy, and silent hosts; nobody without `terms`. Neither raises or waits over 4 s.
        """

    def telemetry(self) -> tuple[DeviceSample, ...]:
        """Return new GPU samples, slow nodes' later; never raises or waits long. For one thread."""

    def read_device_facts(self) -> tuple[DeviceFacts, ...]:
        """Return state and error counters of each device, in the order of `devices`.

        No point may run. Never raises: `unread` says so where a node does not answer in 20 s.
        """

    def close(self) -> None:
        """End all workers, also in a point, and give devices back, mostly in seconds. Call once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """Which cluster and which of its devices a sweep wants."""

    # HOST:PORT, `local` (a private cluster) or `auto`: RAY_ADDRESS, else the cluster of `ray start`
    # on this host, else a private cluster.
    address: str
    # `auto` is cuda if the cluster has a GPU.
    device: Literal["auto", "cuda", "cpu"]
    # Devices that `wait_s` waits for, and CPU workers of a private cluster. 0: what the cluster
    # has; a private cluster then has one CPU worker a core.
    wanted: int
    # How long missing devices may take to come.
    wait_s: float = 0.0
    # Let the CPU workers of a private cluster share cores.
    oversubscribe: bool = False
    # How devices are shared with other sweeps; None locks no device and sees no other sweep.
    terms: ReservationTerms | None = None
    # Devices that may be used; None for all.
    only: DeviceList | None = None
    # Names of device models that may be used; empty for all. Other models are used only if `start`
    # finds nothing else.
    models: Collection[str] = ()


def connect(
    request: ClusterRequest,
    *,
    end: Callable[[str], None],
    log: Callable[[str], None] = lambda _: None,
) -> Cluster:
    """Join a Ray cluster or start a private one; no worker is started yet.

    Call `close` at the end, even if `start` raises. A process can have one cluster at a time. In
    the main thread this replaces the handler of SIGTERM.

    Args:
        request: the cluster and its devices.
        end: ends this process; called with a reason, in a thread, if Ray is gone and a call into
            Ray hangs.
        log: gets lines for the user.

    Raises:
        ClusterError: there is no cluster, or no GPU for cuda without `wait_s`.
        UsageError: the address is malformed.
    """
    from raybench.cluster.ray_cluster import start
    from raybench.cluster.ray_cluster.cluster import RayCluster

    connection = start.connect_ray(
        request.address,
        request.device,
        request.wanted,
        request.wait_s,
        end,
        oversubscribe=request.oversubscribe,
    )
    return RayCluster(
        connection, log, end=end, terms=request.terms, only=request.only, models=request.models
    )


def starts_private(address: str) -> bool:
    """Return whether `connect` will start a private Ray on this host.

    If False, it may still do so: a cluster of this host that looks alive may be gone. Raises
    ClusterError where `auto` could mean several clusters of this host.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        return address == "local"
    from raybench.cluster.ray_cluster import start

    return not start.find_own_cluster()[0]
