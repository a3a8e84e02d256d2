"""Which Ray cluster a sweep uses: one that is there, or a private one on this host."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any, Literal

import ray
import ray._private.worker
from ray._private.services import find_bootstrap_address

from raybench.errors import ClusterError, UsageError

DeviceKind = Literal["cuda", "cpu"]

# A private CPU cluster can show a scaling from 1 to 4 workers even on a small machine.
_LOCAL_CPU_WORKERS = 4
_PRIVATE_OBJECT_STORE_BYTES = 256 * 1024**2
_QUIET: dict[str, Any] = {
    "log_to_driver": False,
    "logging_level": "ERROR",
    "namespace": "raybench",
}
_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A cluster that this process has joined.

    where: which one, for the user. capacity: devices of `kind` on all its nodes.
    """

    where: str
    kind: DeviceKind
    capacity: int


def connect(address: str, device: Literal["auto", "cuda", "cpu"], wanted: int) -> Connection:
    """Join the cluster at `address`, or start a private one.

    address: `auto` (RAY_ADDRESS, else the cluster that `ray start` made on this host, else a
    private one), `local` (private) or HOST:PORT. wanted: devices of the biggest point.
    Raises ClusterError or UsageError.
    """
    # Ray prints what its raylets report to the driver's stdout, whatever log_to_driver says, and
    # stdout is ours. A dead worker is told in the row of its point.
    ray._private.worker.print_to_stdstream = _drop
    chosen = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    started = _started_here() if chosen == "auto" else None
    if chosen == "local" or (chosen == "auto" and started is None):
        where = _start_private(device, wanted)
    else:
        where = _join(started or chosen)
    try:
        kind, capacity = _capacity(device)
    except ClusterError:
        ray.shutdown()
        raise
    return Connection(where=where, kind=kind, capacity=capacity)


def _started_here() -> str | None:
    """The address that `ray start` left on this host, if its cluster is still there.

    Not Ray's own "auto": that joins any raylet it finds, also the private one of another sweep.
    """
    address: str | None = find_bootstrap_address(None)
    return address if address and _unreachable(address) is None else None


def _join(address: str) -> str:
    if address.startswith(("http://", "https://")):
        raise UsageError(
            f"--address {address}: this is the address of Ray's job server; submit the sweep to "
            f"it: ray job submit --address {address} --working-dir . -- raybench sweep JOB"
        )
    if address.startswith("ray://"):
        raise UsageError(
            f"--address {address}: Ray Client is not supported; run raybench on a node of the "
            "cluster with --address auto, or use ray job submit"
        )
    if reason := _unreachable(address):
        raise ClusterError(
            f"--address {address}: no Ray cluster answers there ({reason}); start one with "
            "`ray start --head`, or use --address local"
        )
    try:
        ray.init(address=address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"--address {address}: {first_line(error)}") from None
    return f"Ray cluster at {address}"


def _unreachable(address: str) -> str | None:
    """Why nothing listens at HOST:PORT. Ray itself would retry for a minute and print about it."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise UsageError(f"--address {address}: expected auto, local or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return None


def _start_private(device: str, wanted: int) -> str:
    slots = min(wanted, max(_LOCAL_CPU_WORKERS, os.cpu_count() or 1))
    ray.init(
        address="local",
        num_cpus=slots,
        num_gpus=0 if device == "cpu" else None,
        include_dashboard=False,
        object_store_memory=_PRIVATE_OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        **_QUIET,
    )
    return "private Ray on this host"


def _nodes() -> list[dict[str, Any]]:
    return list(ray.nodes())  # type: ignore[no-untyped-call]


def _drop(*_: object, **__: object) -> None:
    return None


def _capacity(device: str) -> tuple[DeviceKind, int]:
    totals = [node["Resources"] for node in _nodes() if node["Alive"]]
    gpus = int(sum(total.get("GPU", 0) for total in totals))
    if device == "cuda" and gpus == 0:
        raise ClusterError(
            "--device cuda: the cluster has no GPU; use --device cpu to measure CPUs"
        )
    if gpus and device != "cpu":
        return "cuda", gpus
    return "cpu", int(sum(total.get("CPU", 0) for total in totals))


def first_line(error: BaseException) -> str:
    """What an error of Ray says, without the pages that follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
