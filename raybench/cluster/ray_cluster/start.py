"""Find, join or start the Ray cluster of a sweep, and notice when it is gone.

Only this user can reach a private Ray of a sweep. By default, Ray 2.60 writes its token to
~/.ray/auth_token with mode 0644, opens its session folder to everybody (0777), and listens on all
networks. So a private Ray gets its token by the environment, a closed folder (0700), and loopback
alone.

A `ray_guard` ends this process if Ray is gone while a call into Ray hangs. Such a call cannot be
interrupted: Ray waits up to a minute for a dead program, and then ends the process.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import ray

from raybench.cluster import reaper, timeouts
from raybench.cluster.ray_cluster import ray_internals
from raybench.conversion import MIB
from raybench.errors import ClusterError, UsageError
from raybench.hardware import gpu_presence
from raybench.records.device import DeviceKind
from raybench.records.environment import usable_cores

_INIT_OPTIONS: dict[str, Any] = {
    "log_to_driver": False,
    "logging_level": "ERROR",
    "namespace": "raybench",
}
_HEAD = "the head of the Ray cluster"
_NO_TOKEN = (
    "the cluster asks for a token that this process does not have; set RAY_AUTH_MODE=token, and "
    "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on the head"
)

# The file in which `ray start` writes the address of its cluster.
_ADDRESS_FILE = "ray_current_cluster"
_ADDRESS = re.compile(r"[\w.:\[\]-]+:\d{1,5}")

_FOLDER_PREFIX = "raybench-"
# Ray opens its own folder to everybody, so it lies in a folder that only this user can enter.
_RAYS_FOLDER = "r"
# Longest path of a socket on Linux, and lengths of our folder and of Ray's longest socket in it.
_MAX_SOCKET_PATH_BYTES = 107
_FOLDER_BYTES = len("/raybench-12345678/r")
_RAYS_SOCKET_BYTES = len("/session_2026-11-22_03-57-34_123456_1234567/sockets/plasma_store")
_OBJECT_STORE_BYTES = 256 * MIB
# Program of a private Ray -> its name for the user.
_PROGRAMS = {"gcs_server": "its head", "raylet": "its raylet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A cluster that this process has joined."""

    # The cluster in words, for the user.
    where: str
    # Program of Ray that the sweep needs -> HOST:PORT.
    needed: Mapping[str, str]
    kind: DeviceKind
    # Devices of `kind` on all nodes. With `wait_s` at least the number of wanted devices, except of
    # a private Ray.
    capacity: int
    wait_s: float = 0.0
    # Folder of a private Ray; None for another cluster.
    folder: Path | None = None
    # Whether this process had joined before, and stays joined at the end.
    is_borrowed: bool = False


class OwnCluster(NamedTuple):
    """The cluster that `ray start` has started on this host."""

    # HOST:PORT of the head; "" if no cluster can be used.
    address: str
    # Why the cluster in the address file cannot be used; "" if it can, or without such a file.
    why_not: str


class _Head(NamedTuple):
    """The head of the cluster to join."""

    # HOST:PORT; "" to start a private Ray.
    address: str
    # The user's option or variable, for error messages.
    option: str
    # Why the cluster of this host is not joined; "" if this host has no cluster.
    why_private: str = ""


def connect_ray(
    address: str,
    device: Literal["auto", "cuda", "cpu"],
    wanted: int,
    wait_s: float = 0.0,
    end: Callable[[str], None] | None = None,
    *,
    oversubscribe: bool = False,
) -> Connection:
    """Join the Ray cluster at `address`, or start a private Ray; call `leave` at the end.

    Args:
        address, device, wait_s, oversubscribe: as in `ClusterRequest`.
        wanted: `ClusterRequest.devices_wanted`.
        end: as in `raybench.cluster.connect`; None: `end_process`.

    Raises:
        ClusterError, UsageError: as `raybench.cluster.connect`.
    """
    end = end or end_process
    folder: Path | None = None
    is_borrowed = ray_internals.has_joined()
    if is_borrowed:
        where = _describe_joined(address)
    else:
        ray_internals.silence_raylets()
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray_internals.reload_settings()
        head = _find_head(address)
        if not head.address:
            where, folder = _start_private(device, wanted, oversubscribe, end, head.why_private)
        else:
            where = f"Ray cluster at {head.address}"
            _join(head, end)

    # Count the devices.
    context = ray.get_runtime_context()
    head_address, own_node_id = context.gcs_address, context.get_node_id()
    with ray_guard(HeadMonitor({_HEAD: head_address}).gone, end):
        nodes = ray_nodes()
    # Ray's dict of each node: name of a resource -> amount.
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = int(sum(amounts.get("GPU", 0) for amounts in resources))
    cpus = int(sum(amounts.get("CPU", 0) for amounts in resources))
    # With --wait, missing devices may still join a cluster, but not a private Ray.
    may_grow = bool(wait_s) and folder is None
    if device == "cuda" and not gpus and not may_grow:
        leave(folder, is_borrowed=is_borrowed)
        raise ClusterError(
            "--device cuda: the cluster has no GPU; use --device cpu to measure CPUs"
        )
    is_cuda = device == "cuda" or (device == "auto" and gpus > 0)
    capacity = gpus if is_cuda else cpus

    # Find the ports that a `HeadMonitor` watches.
    [own_node] = [node for node in nodes if node["NodeID"] == own_node_id]
    # Program in words -> port; 0 if the program does not listen.
    ports = {
        "this host's Ray": own_node["NodeManagerPort"],
        "the agent of this host's Ray that starts workers": own_node.get("RuntimeEnvAgentPort", 0),
    }
    host = own_node["NodeManagerAddress"]
    return Connection(
        where=where,
        needed={
            _HEAD: head_address,
            **{name: f"{host}:{port}" for name, port in ports.items() if port > 0},
        },
        kind="cuda" if is_cuda else "cpu",
        capacity=max(capacity, wanted, 1) if may_grow else capacity,
        wait_s=wait_s,
        folder=folder,
        is_borrowed=is_borrowed,
    )


def leave(folder: Path | None, *, is_borrowed: bool) -> None:
    """Leave Ray. A private Ray ends, and its folder is removed; a borrowed Ray stays joined."""
    if is_borrowed:
        return
    ray.shutdown()
    ray_internals.restore_settings()
    if folder:
        # If processes of Ray still write there, the watcher (`reaper`) removes the folder.
        shutil.rmtree(folder, ignore_errors=True)


def _describe_joined(address: str) -> str:
    """Return the Ray that this process has joined, in words.

    Raises:
        ClusterError: `address` names another Ray, or this process runs outside of the cluster.
    """
    if ray_internals.is_client():
        raise ClusterError(
            "this process has joined by Ray Client, and is on no node of the cluster; use "
            "ray job submit, or call ray.init(address='auto') on a node"
        )
    head = ray.get_runtime_context().gcs_address
    if address not in ("auto", head):
        raise ClusterError(
            f"address {address}: this process has joined the Ray at {head}; leave out the address, "
            "or call ray.shutdown() first"
        )
    return f"Ray cluster at {head}, joined before"


def _join(head: _Head, end: Callable[[str], None]) -> None:
    """Join the cluster of a head that has answered; raise ClusterError if this fails."""
    # Without this check, Ray would search for a minute, and then give no reason.
    if not ray_internals.has_node_on_this_host():
        raise ClusterError(
            f"{head.option}: no node of that cluster runs on this host; run raybench on one of its "
            "nodes, or use ray job submit"
        )
    try:
        with ray_guard(HeadMonitor({_HEAD: head.address}).gone, end):
            ray.init(address=head.address, **_INIT_OPTIONS)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"{head.option}: {' '.join(str(error).split())}") from None


def _find_head(address: str) -> _Head:
    """Return the head to join, which has answered; its address is "" to start a private Ray."""
    option = f"--address {address}"
    if address == "auto" and (exported := os.environ.get("RAY_ADDRESS")):
        address, option = exported, f"RAY_ADDRESS={exported}"
    if address == "local":
        return _Head("", option)
    if address == "auto":
        # Neither --address nor RAY_ADDRESS names a cluster. Ray's own "auto" would join any raylet,
        # even the private Ray of another sweep, and would trust an address file that any user may
        # have written.
        address, why_not = find_own_cluster()
        if not address:
            return _Head("", option, why_not)
        option = f"--address auto ({address}, by `ray start` on this host)"
        # A head asks for the token if its user had one when it started.
        try:
            ray_internals.use_token_of_user()
        except ray_internals.NoTokenError:
            raise ClusterError(f"{option}: {_NO_TOKEN}") from None
        if reason := _why_no_head(address, option):
            return _Head("", option, f"the cluster at {address} is gone: {reason}")
        return _Head(address, option)
    host, separator, port = address.rpartition(":")
    if "://" in address or not (host and separator and port.isdecimal()):
        raise UsageError(
            f"{option}: expected auto, local or HOST:PORT on a node of the cluster; from elsewhere:"
            " ray job submit --address http://HOST:8265 --working-dir . -- raybench sweep JOB"
        )
    if reason := _why_no_head(address, option):
        raise ClusterError(
            f"{option}: no Ray cluster answers there ({reason}); start one with "
            "`ray start --head`, or use --address local"
        )
    return _Head(address, option)


def _why_no_head(address: str, option: str) -> str | None:
    """Return why no Ray head answers at HOST:PORT; None if a head answers."""
    # `ray.init` would retry for up to a minute and print warnings.
    if error := why_not_listening(address, timeouts.FIND_HEAD_S):
        return str(error)
    try:
        is_head = ray_internals.is_head(address, timeouts.HEAD_IS_RAY_S)
    except ray_internals.NoTokenError:
        raise ClusterError(f"{option}: {_NO_TOKEN}") from None
    return None if is_head else "what listens there is no Ray head"


def count_gpus(address: str) -> int | None:
    """Return the number of GPUs of the cluster that `connect_ray` would join; joins nothing.

    None: no cluster answers, so that a private Ray is started.

    Raises:
        ClusterError, UsageError: as `connect_ray`.
    """
    if ray_internals.has_joined():
        return int(sum(node["Resources"].get("GPU", 0) for node in ray_nodes() if node["Alive"]))
    ray_internals.reload_settings()
    head = _find_head(address)
    if not head.address:
        return None
    gpus = ray_internals.count_gpus(head.address, timeouts.HEAD_IS_RAY_S)
    if gpus is None:
        raise ClusterError(f"{head.option}: the head of the cluster does not say which GPUs it has")
    return gpus


def ray_nodes() -> list[dict[str, Any]]:
    """Return Ray's dict of each node, dead nodes included; call it after `connect_ray`."""
    return list(ray.nodes())  # type: ignore[no-untyped-call]


def find_own_cluster() -> OwnCluster:
    """Return this user's cluster of `ray start` on this host; its head may be gone.

    The cluster in Ray's default folder is preferred to clusters of `ray start --temp-dir`.

    Raises:
        ClusterError: there are several clusters, none of them in the default folder.
    """
    # `ray start` writes the address to a file in a folder that every user can write. A forged
    # address would get this user's token, and could run code as this user. So the address counts
    # only if a trusted raylet uses it. A private Ray has no such file.
    raylets = _trusted_raylets()  # (address of the head, Ray's folder)
    address = _read_address(ray_internals.default_folder())
    trusted_heads = {head for head, _ in raylets}
    if address in trusted_heads:
        return OwnCluster(address, "")
    other_heads = {head for head, folder in raylets if _read_address(folder) == head}
    if len(other_heads) > 1:
        names = ", ".join(sorted(other_heads))
        raise ClusterError(
            f"--address auto: several Ray clusters run on this host ({names}); "
            "name one with --address HOST:PORT, or use --address local"
        )
    if other_heads:
        return OwnCluster(other_heads.pop(), "")
    reason = f"the cluster at {address} is gone or another user's: no node of it here is yours"
    return OwnCluster("", reason if address else "")


def _trusted_raylets() -> set[tuple[str, Path]]:
    """Return (address of the head, Ray's folder) of each raylet of this user or of root."""
    raylets = set()
    for process in psutil.process_iter(["cmdline", "uids"]):
        arguments, uids = process.info["cmdline"] or [""], process.info["uids"]
        is_trusted = uids is not None and uids.real in (0, os.geteuid())
        if arguments[0].endswith("/raylet") and is_trusted:
            options = {}
            for argument in arguments:
                name, _, value = argument.partition("=")
                options[name] = value
            raylets.add((options.get("--gcs-address", ""), Path(options.get("--temp_dir", ""))))
    return raylets


def _read_address(folder: Path) -> str:
    """Return the address in Ray's address file; "" without a valid address."""
    file = folder / _ADDRESS_FILE
    try:
        text = file.read_text(errors="replace").strip() if file.is_file() else ""
    except OSError:
        return ""
    return text if _ADDRESS.fullmatch(text) else ""


def _start_private(
    device: str,
    wanted: int,  # number of CPU workers; 0: one for each core
    oversubscribe: bool,
    end: Callable[[str], None],  # ends this process, for the given reason
    why_private: str,  # why the cluster of this host is not joined; "" without a cluster
) -> tuple[str, Path]:
    """Start a private Ray and join it; return its description and its folder.

    If the start fails, the folder with the logs is kept.
    """
    if device != "cpu":
        # Ray would count no GPUs where the driver fails, and the job would run on CPU workers.
        gpu_presence.count_gpus()
    cores = usable_cores()
    folder = make_private_folder()

    def keep_logs(reason: str) -> str:
        """Keep the folder with the logs, and return the error for the user."""
        (folder / reaper.KEPT).touch()
        logs = folder / _RAYS_FOLDER / "session_latest" / "logs"
        return (
            f"the private Ray of this host did not start: {reason}; nothing is measured yet, so "
            f"type the same command again; its logs: {logs}"
        )

    def find_ended_program() -> str:
        """Return which program of Ray has ended, in words; "" if none has."""
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE and child.name() in _PROGRAMS:
                    return f"{_PROGRAMS[child.name()]} has ended"
        return ""

    guard = ray_guard(
        find_ended_program,
        lambda reason: end(keep_logs(reason)),
        timeouts.RAYS_OWN_ERROR_AT_START_S,
    )
    settings = {
        # By default, Ray starts only as many processes at a time as it has CPUs, so agents and the
        # rendezvous store would wait in a queue.
        "worker_maximum_startup_concurrency": max(wanted, cores),
        # Prestarted processes have another environment, so they cannot become workers.
        "prestart_worker_first_driver": False,
    }
    try:
        with reaper.reap_orphans_of_children(folder), ray_internals.private_ray(), guard:
            ray_internals.start_private_node(
                folder / _RAYS_FOLDER,
                num_cpus=wanted if oversubscribe else min(wanted or cores, cores),
                num_gpus=0 if device == "cpu" else None,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _system_config=settings,
                **_INIT_OPTIONS,
            )
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ClusterError(keep_logs(reason)) from None
    return f"private Ray on this host{why_private and f' ({why_private})'}", folder


def make_private_folder() -> Path:
    """Make a folder for a private Ray that only this user can enter; the caller removes it.

    The folder is in the first of RAY_TMPDIR, TMPDIR and /tmp that is short enough for Ray's
    sockets.

    Raises:
        ClusterError: the folder cannot be made.
    """
    folders = (os.environ.get("RAY_TMPDIR"), os.environ.get("TMPDIR"))
    bases = [*(Path(folder).resolve() for folder in folders if folder), Path("/tmp")]
    max_bytes = _MAX_SOCKET_PATH_BYTES - _FOLDER_BYTES - _RAYS_SOCKET_BYTES
    # /tmp is always short enough.
    short_bases = [base for base in bases if len(os.fsencode(base)) <= max_bytes]
    base = short_bases[0]
    try:
        return Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=base))
    except OSError as error:
        raise ClusterError(
            f"no folder for a private Ray in {base}: {error.strerror}; set TMPDIR to a short path "
            "that you can write"
        ) from None


class HeadMonitor:
    """Tells whether the programs of Ray that a sweep needs still listen on their ports.

    Args:
        addresses: name of a program -> HOST:PORT.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)
        self._lock = threading.Lock()
        # Time of the last look, by the monotonic clock; at first so early that a look is due.
        self._last_look_s = -timeouts.ASK_HEAD_EVERY_S
        # Result of the last look: the program that is gone, in words, or "".
        self.last_gone = ""

    def gone(self, *, afresh: bool = False) -> str:
        """Return which program is gone, in words; "" while all programs answer.

        A program that is gone stays gone.

        Args:
            afresh: look even if the last look was less than a second ago. A look takes up to 2 s
                for each program.
        """
        with self._lock:
            is_due = time.monotonic() >= self._last_look_s + timeouts.ASK_HEAD_EVERY_S
            if not self.last_gone and (afresh or is_due):
                # Only a program that is silent twice is gone.
                if self._find_silent_program():
                    time.sleep(timeouts.ASK_HEAD_AGAIN_S)
                    self.last_gone = self._find_silent_program()
                self._last_look_s = time.monotonic()
            return self.last_gone

    def check(self, *, afresh: bool = False) -> None:
        """Raise ClusterError if a program is gone.

        Args:
            afresh: look now. Needed before an actor is started or killed, because Ray then ends
                this process if the head is dead.
        """
        if gone := self.gone(afresh=afresh):
            raise ClusterError(gone)

    def _find_silent_program(self) -> str:
        """Return in words the first program that does not listen, or ""."""
        for name, address in self._addresses.items():
            if why_not_listening(address, timeouts.HEAD_CONNECT_S):
                return f"{name} at {address} is gone"
        return ""


def why_not_listening(address: str, timeout_s: float) -> Exception | None:
    """Return the error of connecting to HOST:PORT; None if a program listens there.

    Args:
        address: HOST:PORT.
        timeout_s: time limit for each IP address of the host.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, OverflowError, ValueError) as error:  # ValueError: invalid host name
        return error
    return None


def end_process(reason: str) -> None:
    """Write the reason to stderr, and exit at once with the exit code of ClusterError."""
    with suppress(OSError):  # stderr may be closed
        os.write(2, f"{reason}\n".encode(errors="replace"))
    os._exit(ClusterError.exit_code)


@contextmanager
def ray_guard(
    gone: Callable[[], str],
    end: Callable[[str], None],
    patience_s: float = timeouts.RAYS_OWN_ERROR_S,
) -> Iterator[None]:
    """Call `end` if Ray is gone and the `with` block does not end by itself.

    Args:
        gone: returns which program is gone, or ""; called in a thread, and must not raise.
        end: gets the result of `gone`, and must end this process; called in a thread.
        patience_s: how long the block may still take once a program is gone.
    """
    is_over = threading.Event()

    def watch() -> None:
        reason = ""
        while not reason:
            if is_over.wait(timeouts.WATCH_START_EVERY_S):
                return
            reason = gone()
        if not is_over.wait(patience_s):
            end(reason)

    thread = threading.Thread(target=watch, name="ray-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
