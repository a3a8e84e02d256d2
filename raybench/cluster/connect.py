"""Where the cluster of a sweep or of the doctor comes from. Ray is imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from raybench.cluster import Cluster
from raybench.cluster.device_locks import Terms
from raybench.records.device_list import DeviceList


def connect(
    address: str,
    device: Literal["auto", "cuda", "cpu"],
    wanted: int,
    *,
    end: Callable[[str], None],
    wait_s: float = 0.0,
    oversubscribe: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    terms: Terms | None = None,
    only: DeviceList | None = None,
) -> Cluster:
    """Join the Ray cluster at `address`, or start a private one; its workers are not started yet.

    address: `auto`, `local` or HOST:PORT. wanted: devices of the biggest point. end: ends this
    process where it waits for a cluster that is gone; it gets what is gone. wait_s: how long
    devices that are not there yet may take to come. oversubscribe: whether CPU workers of a private
    cluster may share cores. tell: gets a line for the user when workers are waited for, come late
    or are lost. terms: on which devices are taken from other sweeps. only: the devices to use.
    Raises ClusterError or UsageError.
    """
    from raybench.cluster.ray_cluster import connection
    from raybench.cluster.ray_cluster.cluster import RayCluster

    joined = connection.connect(address, device, wanted, wait_s, end, oversubscribe=oversubscribe)
    return RayCluster(joined, tell, end=end, terms=terms, only=only)


def starts_private(address: str) -> bool:
    """Tell whether `connect` starts a cluster of its own on this host.

    It may do so all the same, where the one that looks alive is gone.
    Raises ClusterError where several clusters could be meant.
    """
    from raybench.cluster.ray_cluster import connection

    return connection.starts_private(address)
