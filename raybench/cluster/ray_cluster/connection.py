"""Which Ray cluster a sweep uses: one that is there, or a private one on this host."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ray
import ray._private.worker
from ray._common.utils import get_default_ray_temp_dir
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray._private.services import find_node_ids

from raybench.cluster import DeviceKind
from raybench.cluster.ray_cluster.liveness import HeadMonitor, StartGuard, end_process
from raybench.cluster.ray_cluster.own_clusters import find_own_cluster
from raybench.cluster.ray_cluster.private_ray import (
    read_settings_anew,
    remove_private_folder,
    start_private_ray,
)
from raybench.errors import ClusterError, UsageError

_QUIET: dict[str, Any] = {
    "log_to_driver": False,
    "logging_level": "ERROR",
    "namespace": "raybench",
}
_HEAD = "the head of the Ray cluster"
# Ray's own calls fail in their time where they can.
_PATIENCE_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 15.0
_ASK_HEAD = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A cluster that this process has joined.

    where: which one, for the user. needed: what a sweep cannot go on without -> its HOST:PORT.
    capacity: devices of `kind` on all its nodes, or those wanted where nodes are waited for.
    wait_s: how long these may take. folder: that of a private Ray.
    """

    where: str
    needed: Mapping[str, str]
    kind: DeviceKind
    capacity: int
    wait_s: float = 0.0
    folder: Path | None = None


def starts_private(address: str) -> bool:
    """Whether `connect` starts a private Ray there, unless a cluster is gone that looks alive.

    Raises ClusterError where several clusters could be meant.
    """
    if address != "auto" or os.environ.get("RAY_ADDRESS"):
        return address == "local"
    return not find_own_cluster(Path(get_default_ray_temp_dir())).address  # type: ignore[no-untyped-call]


def connect(
    address: str,
    device: Literal["auto", "cuda", "cpu"],
    wanted: int,
    wait_s: float = 0.0,
    end: Callable[[str], None] = end_process,
    *,
    oversubscribe: bool = False,
) -> Connection:
    """Join the cluster at `address`, or start a private one.

    address: `auto` (RAY_ADDRESS, else the cluster that `ray start` made on this host, else a
    private one), `local` (private) or HOST:PORT. wanted: devices of the biggest point. wait_s: how
    long devices that are not there yet may take to come. end: as StartGuard's. oversubscribe:
    whether CPU workers of a private one may share cores.
    Raises ClusterError or UsageError.
    """
    # Ray prints what its raylets report to the driver's stdout, whatever log_to_driver says, and
    # stdout is ours. A dead worker is told in the row of its point.
    ray._private.worker.print_to_stdstream = _drop
    logging.getLogger("ray").setLevel(logging.ERROR)
    read_settings_anew()
    given, folder = f"--address {address}", None
    private = partial(_private, device, wanted, oversubscribe, end)
    if address == "auto" and (exported := os.environ.get("RAY_ADDRESS")):
        address, given = exported, f"RAY_ADDRESS={exported}"
    if address == "local":
        where, folder = private()
    elif address == "auto":
        where, folder = _join_this_hosts(private, end)
    else:
        where = _join(address, given, end)
    head = ray.get_runtime_context().gcs_address
    try:
        with _guard(head, end):
            kind, capacity = _capacity(device, is_final=not wait_s)
            here = _this_hosts_ray()
    except ClusterError:
        ray.shutdown()
        if folder:
            remove_private_folder(folder)
        raise
    if wait_s:
        capacity = max(capacity, wanted)
    return Connection(
        where=where,
        needed={_HEAD: head, **here},
        kind=kind,
        capacity=capacity,
        wait_s=wait_s,
        folder=folder,
    )


def _join_this_hosts(
    private: Callable[..., tuple[str, Path]], end: Callable[[str], None]
) -> tuple[str, Path | None]:
    """Join the cluster that `ray start` made on this host; a private one if there is none.

    Not Ray's own "auto": that joins any raylet it finds, also the private one of another sweep,
    and believes whoever has written the file that it reads.
    """
    usual = Path(get_default_ray_temp_dir())  # type: ignore[no-untyped-call]
    own = find_own_cluster(usual)
    if not own.address:
        return private(own.unused)
    # A head that starts where a token lies asks for it. Ray uses the token unasked for a cluster
    # of this host only, and by its own "auto" only.
    given = f"--address auto ({own.address}, by `ray start` on this host)"
    try:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except ray.exceptions.AuthenticationError:
        raise _no_token(given) from None
    if reason := _silence(own.address, given):
        return private(f"the cluster at {own.address} is gone: {reason}")
    return _init(own.address, given, end), None


def _join(address: str, given: str, end: Callable[[str], None]) -> str:
    if address.startswith(("http://", "https://")):
        raise UsageError(
            f"{given}: this is the address of Ray's job server; submit the sweep to "
            f"it: ray job submit --address {address} --working-dir . -- raybench sweep JOB"
        )
    if address.startswith("ray://"):
        raise UsageError(
            f"{given}: Ray Client is not supported; run raybench on a node of the "
            "cluster with --address auto, or use ray job submit"
        )
    host, separator, port = address.rpartition(":")
    if not (host and separator and port.isdigit()):
        raise UsageError(f"{given}: expected auto, local or HOST:PORT")
    if reason := _silence(address, given):
        raise ClusterError(
            f"{given}: no Ray cluster answers there ({reason}); start one with "
            "`ray start --head`, or use --address local"
        )
    return _init(address, given, end)


def _init(address: str, given: str, end: Callable[[str], None]) -> str:
    # Ray itself would look for a node on this host for a minute, and then say nothing of it.
    if not find_node_ids():  # type: ignore[no-untyped-call]
        raise ClusterError(
            f"{given}: no node of that cluster runs on this host; run raybench on one of its "
            "nodes, or use ray job submit"
        )
    try:
        with _guard(address, end):
            ray.init(address=address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"{given}: {' '.join(str(error).split())}") from None
    return f"Ray cluster at {address}"


def _silence(address: str, given: str) -> str | None:
    """Why no Ray head answers at HOST:PORT; None when one does.

    Ray itself would retry for up to a minute and print about it, and it aborts the process where
    a token is asked for and there is none: so a process of its own asks first.
    Raises ClusterError when the head refuses our token.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return str(error)
    command = [sys.executable, "-P", "-c", _ASK_HEAD, address]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "what listens there is no Ray head"
    if "RAY_AUTH_TOKEN" in asked.stderr:
        raise _no_token(given)
    return None


def _no_token(given: str) -> ClusterError:
    return ClusterError(
        f"{given}: the cluster asks for a token that this process does not have; set "
        "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on the head"
    )


def _guard(head: str, end: Callable[[str], None]) -> StartGuard:
    """For calls that Ray's head answers. It may have died since it was asked last."""
    return StartGuard(HeadMonitor({_HEAD: head}).gone, end, patience_s=_PATIENCE_S)


def _private(
    device: str, wanted: int, oversubscribe: bool, end: Callable[[str], None], because: str = ""
) -> tuple[str, Path]:
    folder = start_private_ray(device, wanted, end, oversubscribe=oversubscribe, **_QUIET)
    return f"private Ray on this host{because and f' ({because})'}", folder


def nodes() -> list[dict[str, Any]]:
    """List what Ray knows of each node, the dead ones included."""
    return list(ray.nodes())  # type: ignore[no-untyped-call]


def _this_hosts_ray() -> dict[str, str]:
    """Find what is needed of Ray on this host. Without the agent its raylet starts no worker."""
    here = ray.get_runtime_context().get_node_id()
    (node,) = (one for one in nodes() if one["NodeID"] == here)
    ports = {
        "this host's Ray": node["NodeManagerPort"],
        "the agent of this host's Ray that starts workers": node.get("RuntimeEnvAgentPort", 0),
    }
    host = node["NodeManagerAddress"]
    return {name: f"{host}:{port}" for name, port in ports.items() if port > 0}


def _drop(*_: object, **__: object) -> None:
    return None


def _capacity(device: str, *, is_final: bool) -> tuple[DeviceKind, int]:
    totals = [node["Resources"] for node in nodes() if node["Alive"]]
    gpus = int(sum(total.get("GPU", 0) for total in totals))
    if device == "cuda" and gpus == 0 and is_final:
        raise ClusterError(
            "--device cuda: the cluster has no GPU; use --device cpu to measure CPUs"
        )
    if device == "cuda" or (gpus and device == "auto"):
        return "cuda", gpus
    return "cpu", int(sum(total.get("CPU", 0) for total in totals))
