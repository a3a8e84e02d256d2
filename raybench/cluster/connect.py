"""Where the cluster of a sweep or of the doctor comes from; the only module that knows launchers.

A launcher starts workers and reaches them: Ray, plain processes for those who may start no Ray,
this process for debugging and tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from raybench.cluster import Cluster, Launcher
from raybench.cluster.device_locks import Terms
from raybench.records.device_list import DeviceList


def connect(
    launcher: Launcher,
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
    """Join the cluster at `address`, or start a private one; its workers are still to be started.

    address: of Ray: `auto`, `local` or HOST:PORT. wanted: devices of the biggest point. end: ends
    this process where it waits for a cluster that is gone; it gets what is gone. wait_s: how long
    devices that are not there yet may take to come. oversubscribe: whether CPU workers of a private
    cluster may share cores. tell: gets a line for the user when workers are waited for, come late
    or are lost. terms: on which devices are taken from other sweeps. only: the devices to use.
    The cluster in this process has one CPU worker, whatever is wanted.
    Raises ClusterError or UsageError.
    """
    if launcher == "in-process":
        from raybench.cluster.local import this_process

        return this_process()
    if launcher == "processes":
        from raybench.cluster.processes import connection as processes
        from raybench.cluster.processes.cluster import ProcessCluster

        return ProcessCluster(
            processes.connect(device, wanted, oversubscribe=oversubscribe),
            tell,
            terms=terms,
            only=only,
        )
    from raybench.cluster.ray_cluster import connection
    from raybench.cluster.ray_cluster.cluster import RayCluster

    joined = connection.connect(address, device, wanted, wait_s, end, oversubscribe=oversubscribe)
    return RayCluster(joined, tell, end=end, terms=terms, only=only)


def starts_private(launcher: Launcher, address: str) -> bool:
    """Tell whether `connect` starts a cluster of its own on this host.

    It may do so all the same, where the one that looks alive is gone.
    Raises ClusterError where several clusters could be meant.
    """
    if launcher != "ray":
        return True
    from raybench.cluster.ray_cluster import connection

    return connection.starts_private(address)


def serves_another(launcher: Launcher) -> bool:
    """Serve the first process of an srun or a torchrun until it ends, where this is another one.

    False where this process is to run the sweep itself. Raises ClusterError or UsageError.
    """
    if launcher != "processes":
        return False
    from raybench.cluster.processes import connection

    return connection.serves_another()
