"""The state of this host: load, limits and network, by psutil and /sys. Loads no torch."""

from __future__ import annotations

import math
import os
import re
import resource
from pathlib import Path

import psutil

from raybench.records.devices import HostFacts

_MBIT_PER_GBIT = 1000
_LOOPBACK = "lo"
# Interfaces that other hosts do not reach, or by a detour.
_INNER = re.compile(r"lo$|docker|br-|virbr|veth|cni|flannel|podman")


def is_inner(interface: str) -> bool:
    """Return whether a network interface leads to no other host, or by a detour."""
    return _INNER.match(interface) is not None


def read_host(load: float | None = None, adapters: Path | None = None) -> HostFacts:
    """Return the state of this host.

    Args:
        load: load average from before the check; None reads it now.
        adapters: folder with an entry for each RDMA adapter, for tests.
    """
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    interfaces = {}
    for name, state in psutil.net_if_stats().items():
        if state.isup and name != _LOOPBACK:
            # Virtual interfaces report 0, or 65535 for unknown.
            is_known = state.speed not in (0, 2**16 - 1)
            interfaces[name] = state.speed / _MBIT_PER_GBIT if is_known else 0.0
    folder = adapters or Path("/sys/class/infiniband")
    return HostFacts(
        load=psutil.getloadavg()[0] if load is None else load,
        # The load counts the whole host, even if this process may use only some of the cores.
        cores=os.cpu_count() or 1,
        memlock_bytes=math.inf if memlock == resource.RLIM_INFINITY else float(memlock),
        interfaces=interfaces,
        rdma_adapters=tuple(sorted(path.name for path in folder.glob("*"))),
    )
