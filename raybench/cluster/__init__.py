"""What a sweep asks of a cluster, and how it gets one; Ray is imported when it is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
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


def connect(
    address: str,
    device: Literal["auto", "cuda", "cpu"],
    wanted: int,
    *,
    end: Callable[[str], None],
    wait_s: float = 0.0,
    oversubscribe: bool = False,
    log: Callable[[str], None] = lambda _: None,
    terms: ReservationTerms | None = None,
    only: DeviceList | None = None,
    models: Collection[str] = (),
) -> Cluster:
    """Join the Ray cluster at `address`, or start a private one, and return it.

    No worker is started yet: call `start`, and `close` at the end, even if `start` raised. A
    process can have one cluster at a time. In the main thread it replaces the handler of SIGTERM.

    address: HOST:PORT, `local` (private) or `auto`: RAY_ADDRESS, else the cluster of `ray start` on
    this host, else private. device: `auto` is cuda if the cluster has a GPU. wanted: devices that
    `wait_s` waits for; a private cluster has no more CPU workers. 0: those there are, one at least;
    privately one CPU worker a core. end: must end this process; it is called with a reason, in a
    thread, while the process waits for a cluster that is gone. wait_s: how long missing devices may
    take to come. oversubscribe: whether CPU workers of a private cluster may share cores. log: gets
    lines for the user. terms: how devices are shared with others; None locks none and sees nobody.
    only: the devices to use; None: any. models: names of the devices to use; others are left out,
    unless `start` finds no other ones; empty: any. Raises ClusterError if no cluster can be had, or
    no GPU for cuda without `wait_s`; UsageError for a malformed address.
    """
    from raybench.cluster.ray_cluster import start
    from raybench.cluster.ray_cluster.cluster import RayCluster

    joined = start.connect_ray(address, device, wanted, wait_s, end, oversubscribe=oversubscribe)
    return RayCluster(joined, log, end=end, terms=terms, only=only, models=models)


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
