"""Connect to the cluster of a sweep or of the doctor. Ray is imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from raybench.cluster import Cluster
from raybench.cluster.device_reservation import ReservationTerms
from raybench.records.devices import DeviceList


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
) -> Cluster:
    """Join the Ray cluster at `address`, or start a private one; its workers are not started yet.

    address: `auto`, `local` or HOST:PORT. wanted: devices of the biggest point. end: ends this
    process where it waits for a cluster that is gone; it gets what is gone. wait_s: how long
    devices that are not there yet may take to come. oversubscribe: whether CPU workers of a private
    cluster may share cores. log: gets a line for the user when workers are waited for, come late
    or are lost. terms: on which devices are taken from other sweeps. only: the devices to use.
    Raises ClusterError where no cluster can be joined or started, UsageError for a bad address.
    """
    from raybench.cluster.ray_cluster import start
    from raybench.cluster.ray_cluster.cluster import RayCluster

    joined = start.connect(address, device, wanted, wait_s, end, oversubscribe=oversubscribe)
    return RayCluster(joined, log, end=end, terms=terms, only=only)


def starts_private(address: str) -> bool:
    """Return whether `connect` will start a private Ray on this host.

    Where False, it may still do so: a cluster of this host that looks alive may be gone.
    Raises ClusterError where several clusters of this host could be meant.
    """
    from raybench.cluster.ray_cluster import start

    return start.starts_private(address)
