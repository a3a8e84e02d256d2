"""Find, join or start the Ray cluster of a sweep, and notice when it is gone.

A private Ray of this sweep alone is one that nobody else can talk to. Left to itself, Ray 2.60
writes its token to ~/.ray/auth_token for everybody to read (mode 0644), opens its session to
everybody (0777) and listens on the outside address. So it gets a token by its environment, which
only this user can read, and a folder that is closed (0700).

While Ray starts, or starts workers, this process waits inside of Ray, where nothing interrupts it:
half a minute for a raylet that has died, a minute for a head, after which Ray ends it in its own
words. So a `start_guard` ends it before, where one is gone.
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
from typing import Any, Literal

import psutil
import ray

from raybench.cluster import reaper, timeouts
from raybench.cluster.ray_cluster import ray_internals
from raybench.conversion import MIB
from raybench.errors import ClusterError, UsageError
from raybench.records.device import DeviceKind
from raybench.records.environment import usable_cores

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "raybench"}
_HEAD = "the head of the Ray cluster"
_NO_TOKEN = (
    "the cluster asks for a token that this process does not have; set RAY_AUTH_MODE=token, and "
    "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on the head"
)

# The file in which `ray start` writes the address of its cluster.
_ADDRESS_FILE = "ray_current_cluster"
_ADDRESS = re.compile(r"[\w.:\[\]-]+:\d{1,5}")

_PREFIX = "raybench-"
# Ray opens its own folder to everybody, so it is one below the closed one.
_RAYS_FOLDER = "r"
# Linux takes no longer path for a socket. Ray's longest one below the folder, with a process id of
# seven digits, is added to the folder's own name.
_SOCKET_PATH_BYTES = 107
_FOLDER_BYTES = len("/raybench-12345678/r")
_RAYS_SOCKET_BYTES = len("/session_2026-11-22_03-57-34_123456_1234567/sockets/plasma_store")
_OBJECT_STORE_BYTES = 256 * MIB
_PROGRAMS = {"gcs_server": "its head", "raylet": "its raylet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A cluster that this process has joined.

    where: which one, for the user. needed: name -> HOST:PORT of each program of Ray without which
    the sweep cannot go on. capacity: devices of `kind` on all its nodes, at least those wanted,
    or one, where nodes are waited for. wait_s: how long these may take. folder: of a private Ray.
    """

    where: str
    needed: Mapping[str, str]
    kind: DeviceKind
    capacity: int
    wait_s: float = 0.0
    folder: Path | None = None


def connect_ray(
    address: str,
    device: Literal["auto", "cuda", "cpu"],
    wanted: int,
    wait_s: float = 0.0,
    end: Callable[[str], None] | None = None,
    *,
    oversubscribe: bool = False,
) -> Connection:
    """Join the Ray cluster at `address`, or start a private one, and return the connection.

    Parameters and errors are those of `raybench.cluster.connect`; end: None for `end_process`. At
    the end the caller calls `ray.shutdown`, and removes the connection's `folder`, if any.
    """
    ray_internals.silence_raylets()
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray_internals.reload_settings()
    end = end or end_process
    head, option, why_private = _find_head(address)
    if not head:
        where, folder = _start_private(device, wanted, oversubscribe, end, why_private)
    else:
        where, folder = f"Ray cluster at {head}", None
        # Ray itself would look for a node on this host for a minute, and then say nothing of it.
        if not ray_internals.has_node_on_this_host():
            raise ClusterError(
                f"{option}: no node of that cluster runs on this host; run raybench on one of its "
                "nodes, or use ray job submit"
            )
        try:
            with start_guard(HeadMonitor({_HEAD: head}).gone, end):
                ray.init(address=head, **_QUIET)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(f"{option}: {' '.join(str(error).split())}") from None
    context = ray.get_runtime_context()
    head, here = context.gcs_address, context.get_node_id()
    with start_guard(HeadMonitor({_HEAD: head}).gone, end):
        nodes = ray_nodes()
    totals = [node["Resources"] for node in nodes if node["Alive"]]
    devices = {one: int(sum(t.get(one, 0) for t in totals)) for one in ("GPU", "CPU")}
    if device == "cuda" and not devices["GPU"] and not wait_s:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        raise ClusterError(
            "--device cuda: the cluster has no GPU; use --device cpu to measure CPUs"
        )
    is_cuda = device == "cuda" or (device == "auto" and devices["GPU"] > 0)
    capacity = devices["GPU" if is_cuda else "CPU"]
    (node,) = (one for one in nodes if one["NodeID"] == here)
    # The raylet of this host, and its agent, without which it starts no worker.
    ports = {
        "this host's Ray": node["NodeManagerPort"],
        "the agent of this host's Ray that starts workers": node.get("RuntimeEnvAgentPort", 0),
    }
    host = node["NodeManagerAddress"]
    return Connection(
        where=where,
        needed={_HEAD: head} | {name: f"{host}:{port}" for name, port in ports.items() if port > 0},
        kind="cuda" if is_cuda else "cpu",
        capacity=max(capacity, wanted, 1) if wait_s else capacity,
        wait_s=wait_s,
        folder=folder,
    )


def _find_head(address: str) -> tuple[str, str, str]:
    """Return HOST:PORT of the head to join, and how the user gave it; "" for a private Ray.

    The last item says why no cluster of this host is joined, "" where there is none. Raises
    UsageError where the address is no HOST:PORT, ClusterError where no cluster answers there.
    """
    option = f"--address {address}"
    if address == "auto" and (exported := os.environ.get("RAY_ADDRESS")):
        address, option = exported, f"RAY_ADDRESS={exported}"
    if address == "local":
        return "", option, ""
    if address == "auto":
        # Not Ray's own "auto": that joins any raylet it finds, also the private one of another
        # sweep, and believes whoever has written the file that it reads.
        address, why_not = find_own_cluster()
        if not address:
            return "", option, why_not
        option = f"--address auto ({address}, by `ray start` on this host)"
        # A head that starts where a token lies asks for it. Ray uses the token unasked for a
        # cluster of this host only, and by its own "auto" only.
        try:
            ray_internals.use_token_of_user()
        except ray_internals.NoTokenError:
            raise ClusterError(f"{option}: {_NO_TOKEN}") from None
        if reason := _why_no_head(address, option):
            return "", option, f"the cluster at {address} is gone: {reason}"
        return address, option, ""
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
    return address, option, ""


def _why_no_head(address: str, option: str) -> str | None:
    """Return why no Ray head answers at HOST:PORT; None when one does.

    Ray itself would retry for up to a minute and print about it, and it aborts the process where
    a token is asked for and there is none: so a process of its own asks first.
    Raises ClusterError when the head refuses our token.
    """
    if error := why_not_listening(address, timeouts.FIND_HEAD_S):
        return str(error)
    try:
        is_head = ray_internals.is_head(address, timeouts.HEAD_IS_RAY_S)
    except ray_internals.NoTokenError:
        raise ClusterError(f"{option}: {_NO_TOKEN}") from None
    return None if is_head else "what listens there is no Ray head"


def ray_nodes() -> list[dict[str, Any]]:
    """Return Ray's dict of each node, dead ones too; after `connect_ray`."""
    return list(ray.nodes())  # type: ignore[no-untyped-call]


# The cluster that `ray start` has made on this host, or joined it to.
#
# `ray start` writes the address into a file of a folder that every user can write (Ray makes it
# so). Whoever is believed there gets this user's token and may run code as this user. So a file
# counts only where a raylet of this user, or of root, runs on this host and has that address; no
# other user can make one. `ray.init` writes no such file, so a private Ray is never found.


def find_own_cluster() -> tuple[str, str]:
    """Return (HOST:PORT, "") of the head of the Ray cluster that this host belongs to.

    Its raylet here must be this user's or root's; the head may be gone. A cluster in Ray's usual
    folder comes before others (`ray start --temp-dir`). Raises ClusterError for several others. If
    there is none, or only private ones: ("", reason) if that folder has an address, else ("", "").
    """
    usual = ray_internals.default_folder()
    raylets = set()
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = process.info["cmdline"] or [""], process.info["uids"]
        if words[0].endswith("/raylet") and uids and uids.real in (0, os.geteuid()):
            options = dict(word.partition("=")[::2] for word in words)
            raylets.add((options.get("--gcs-address", ""), Path(options.get("--temp_dir", ""))))
    address = _read_address(usual)
    if any(head == address for head, _ in raylets):
        return address, ""
    others = {head for head, folder in raylets if _read_address(folder) == head}
    if len(others) > 1:
        raise ClusterError(
            f"--address auto: several Ray clusters run on this host ({', '.join(sorted(others))}); "
            "name one with --address HOST:PORT, or use --address local"
        )
    if others:
        return others.pop(), ""
    why = f"the cluster at {address} is gone or another user's: no node of it here is yours"
    return "", why if address else ""


def _read_address(folder: Path) -> str:
    """Return HOST:PORT in the address file of this folder; "" where there is none."""
    file = folder / _ADDRESS_FILE
    try:
        text = file.read_text(errors="replace").strip() if file.is_file() else ""
    except OSError:
        return ""
    return text if _ADDRESS.fullmatch(text) else ""


# A private Ray.


def _start_private(
    device: str, wanted: int, oversubscribe: bool, end: Callable[[str], None], because: str
) -> tuple[str, Path]:
    """Start a private Ray and join it; return what it is, for the user, and its folder.

    because: why no other cluster was joined. Raises ClusterError where it cannot start; its logs
    are kept then.
    """
    cores = usable_cores()
    folder = make_private_folder()

    def failed(reason: str) -> str:
        """Keep the folder with the logs, and return the error for the user."""
        (folder / reaper.KEPT).touch()
        logs = folder / _RAYS_FOLDER / "session_latest" / "logs"
        return (
            f"the private Ray of this host did not start: {reason}; nothing is measured yet, so "
            f"type the same command again; its logs: {logs}"
        )

    def ended_program() -> str:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE and child.name() in _PROGRAMS:
                    return f"{_PROGRAMS[child.name()]} has ended"
        return ""

    guard = start_guard(
        ended_program, lambda reason: end(failed(reason)), timeouts.RAYS_OWN_ERROR_AT_START_S
    )
    # Ray would start no more processes at a time than it was told of CPUs, which are the workers
    # wanted: their agent and store would wait in line. And first it would start one for
    # each CPU, which cannot become a worker, as it has not the environment of one.
    settings = {
        "worker_maximum_startup_concurrency": max(wanted, cores),
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
                **_QUIET,
            )
    except Exception as error:
        raise ClusterError(failed(" ".join(str(error).split()) or type(error).__name__)) from None
    return f"private Ray on this host{because and f' ({because})'}", folder


def make_private_folder() -> Path:
    """Make a folder that only this user can enter, for a private Ray, and return it.

    It is made in RAY_TMPDIR, TMPDIR or /tmp, the first whose path is short enough for Ray's
    sockets. The caller removes it. Raises ClusterError where it cannot be made there.
    """
    places = (os.environ.get("RAY_TMPDIR"), os.environ.get("TMPDIR"))
    bases = [*(Path(place).resolve() for place in places if place), Path("/tmp")]
    longest = _SOCKET_PATH_BYTES - _FOLDER_BYTES - _RAYS_SOCKET_BYTES
    base = next(base for base in bases if len(os.fsencode(base)) <= longest)
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError as error:
        raise ClusterError(
            f"no folder for a private Ray in {base}: {error.strerror}; set TMPDIR to a short path "
            "that you can write"
        ) from None


# What a sweep cannot go on without: the head of the cluster, and Ray on the driver's host.


class HeadMonitor:
    """Tells whether the programs of Ray that a sweep needs still listen on their ports.

    Ray would find out in a minute, and then end this process, or let it wait for ever.
    addresses: name of each program -> HOST:PORT. found: what `gone` returned last.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)
        self._lock = threading.Lock()
        self._asked_s = -timeouts.ASK_HEAD_EVERY_S
        self.found = ""

    def gone(self, *, afresh: bool = False) -> str:
        """Return in words the first program that is gone; "" while all answer.

        Looks now if `afresh`, else once a second at most, and never again once one was gone. After
        a silence it looks again a second later. A look takes up to 2 s for each slow program.
        """
        with self._lock:
            is_due = time.monotonic() >= self._asked_s + timeouts.ASK_HEAD_EVERY_S
            if not self.found and (afresh or is_due):
                if self._silent():
                    time.sleep(timeouts.ASK_HEAD_AGAIN_S)
                    self.found = self._silent()
                self._asked_s = time.monotonic()
            return self.found

    def check(self, *, afresh: bool = False) -> None:
        """Raise ClusterError when a program is gone.

        afresh: as of `gone`; for a call before an actor is started or killed, at which Ray ends
        this process if the head is dead.
        """
        if gone := self.gone(afresh=afresh):
            raise ClusterError(gone)

    def _silent(self) -> str:
        """Return in words the first program that does not answer now; "" where all do."""
        limit_s = timeouts.HEAD_CONNECT_S
        silent = (at for at in self._addresses.items() if why_not_listening(at[1], limit_s))
        name, address = next(silent, ("", ""))
        return f"{name} at {address} is gone" if name else ""


def why_not_listening(address: str, timeout_s: float) -> Exception | None:
    """Return the error of connecting to HOST:PORT; None if any program listens there.

    ConnectionRefusedError where the port is closed. timeout_s: per IP address; DNS is not limited.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, OverflowError, ValueError) as error:  # ValueError: no host has such a name
        return error
    return None


def end_process(reason: str) -> None:
    """Write the reason to stderr; end this process, without clean-up, with ClusterError's code."""
    with suppress(OSError):  # stderr may be full, or closed
        os.write(2, f"{reason}\n".encode(errors="replace"))
    os._exit(ClusterError.exit_code)


@contextmanager
def start_guard(
    gone: Callable[[], str],
    end: Callable[[str], None],
    patience_s: float = timeouts.RAYS_OWN_ERROR_S,
) -> Iterator[None]:
    """Return a context that calls `end` if Ray is gone and the block does not end by itself.

    gone: returns in words what is gone, "" while all is there; it must not raise; the end of the
    block waits for its call. patience_s: how long the block may still take once something is gone.
    end: gets what is gone, and must end this process. Both are called in a thread.
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

    thread = threading.Thread(target=watch, name="start-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
