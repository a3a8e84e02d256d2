"""A Ray of this sweep alone, on this host, which nobody else can talk to.

Left to itself, Ray 2.60 writes its token to ~/.ray/auth_token for everybody to read (mode 0644),
opens its session to everybody (0777) and listens on the outside address. So it gets a token by its
environment, which only this user can read, and a folder that is closed (0700).
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.node
import ray._private.ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from raybench.cluster import reaper
from raybench.cluster.ray_cluster.liveness import StartGuard
from raybench.errors import ClusterError
from raybench.records.environment import usable_cores

_PREFIX = "raybench-"
# Ray opens its own folder to everybody, so it is one below the closed one.
_OPENED = "r"
# Linux takes no longer path for a socket. Ray's longest one below the folder, with a process id of
# seven digits, is added to the folder's own name.
_MOST_BYTES = 107
_OWN_BYTES = len("/raybench-12345678/r")
_RAYS_BYTES = len("/session_2026-11-22_03-57-34_123456_1234567/sockets/plasma_store")
_OBJECT_STORE_BYTES = 256 * 1024**2
# Ray's own logs: its default is 512 MB, five times over, for each process.
_LOG_BYTES = 8 * 1024**2
_LOG_BACKUPS = 1
# Methods of Ray's node, each of which starts a program.
_UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")
_PROGRAMS = {"gcs_server": "its head", "raylet": "its raylet"}
# Ray may say by itself what is wrong.
_PATIENCE_S = 2.0


def make_private_folder() -> Path:
    """Make a folder that only this user can enter. Raises ClusterError where there is no place."""
    reasons = []
    for base in dict.fromkeys(_bases()):
        if reason := _why_not(base):
            reasons.append(f"{base} {reason}")
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
    raise ClusterError(
        f"no folder for a private Ray: {'; '.join(reasons)}; set TMPDIR to a short path that only "
        "you can write, or that is as /tmp is (mode 1777)"
    )


def _bases() -> Iterator[Path]:
    """Where Ray would put its files, and where any program may."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if given := os.environ.get(name):
            yield Path(given).resolve()
    yield from (Path("/tmp").resolve(), Path("/var/tmp").resolve())


def _why_not(base: Path) -> str:
    """Say what is wrong with a folder; empty where nothing is."""
    if len(os.fsencode(base)) + _OWN_BYTES + _RAYS_BYTES > _MOST_BYTES:
        return "is too long for Ray's sockets"
    try:
        held = all(_is_held(folder.stat()) for folder in (base, *base.parents))
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    return "" if held else "can be replaced by other users"


def _is_held(folder: os.stat_result) -> bool:
    """Whether no other user can rename what this user has in it."""
    is_ours = folder.st_uid in (0, os.geteuid())
    is_shared = folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_ours and (not is_shared or bool(folder.st_mode & stat.S_ISVTX))


def start_private_ray(
    device: str,
    wanted: int,
    end: Callable[[str], None],
    *,
    oversubscribe: bool = False,
    **quiet: Any,
) -> Path:
    """Start it and join it; the folder that it lives in. quiet: options of `ray.init`.

    oversubscribe: as many CPU workers as are wanted, also where they have to share cores. end: as
    StartGuard's, where a program of Ray dies for which Ray waits. Raises ClusterError.
    """
    cores = usable_cores()
    folder = make_private_folder()

    def failed(reason: str) -> str:
        """Keep the folder with the logs, and say why there is no Ray."""
        (folder / reaper.KEPT).touch()
        return (
            f"the private Ray of this host did not start: {reason}; nothing is measured yet, so "
            f"type the same command again; its logs: {folder / _OPENED / 'session_latest' / 'logs'}"
        )

    try:
        with (
            reaper.reap_orphans_of_children(folder),
            _environment(),
            _on_loopback(),
            _no_unused_programs(),
            StartGuard(_ended_program, lambda reason: end(failed(reason)), patience_s=_PATIENCE_S),
        ):
            ray.init(
                address="local",
                num_cpus=wanted if oversubscribe else min(wanted, cores),
                num_gpus=0 if device == "cpu" else None,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder / _OPENED),
                _system_config=_quick_start(max(wanted, cores)),
                **quiet,
            )
    except Exception as error:
        raise ClusterError(failed(" ".join(str(error).split()) or type(error).__name__)) from None
    return folder


def remove_private_folder(folder: Path) -> None:
    """Remove all of it. What a process of Ray still writes meanwhile is left to the watcher."""
    shutil.rmtree(folder, ignore_errors=True)


def read_settings_anew() -> None:
    """Have Ray take its mode and token from the environment, not from an earlier private Ray."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _ended_program() -> str:
    """Say which program of the Ray that is being started has ended; empty while all live."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.status() == psutil.STATUS_ZOMBIE and child.name() in _PROGRAMS:
                return f"{_PROGRAMS[child.name()]} has ended"
    return ""


@contextmanager
def _environment() -> Iterator[None]:
    """Set what Ray's processes are to have, and this process only while it starts them.

    Whatever the user's own token is, this Ray is not asked for it.
    """
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # While it waits for its head Ray holds Python's lock, so that no guard can run.
        "RAY_gcs_server_port_wait_time_s": "15",
        "RAY_py_gcs_connect_timeout_s": "5",
        "RAY_ROTATION_MAX_BYTES": str(_LOG_BYTES),
        "RAY_ROTATION_BACKUP_COUNT": str(_LOG_BACKUPS),
    }
    usual = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    read_settings_anew()
    try:
        yield
    finally:
        for name, value in usual.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Whoever reaches Ray's ports could try them.

    Ray listens on loopback alone when that is its node's address, but takes 127.0.0.1 for this
    host's outside address while it believes that other nodes may come, which it does on Linux.
    """
    constants = ray._private.ray_constants
    others_may_come, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = others_may_come


@contextmanager
def _no_unused_programs() -> Iterator[None]:
    """Have Ray start no dashboard, no autoscaler and no reader of logs.

    A sweep uses none of them on a Ray of its own. `ray.init` waits for the first, whatever
    `include_dashboard` says, and has no option for the others.
    """
    node: Any = ray._private.node.Node
    usual = {name: getattr(node, name) for name in _UNUSED if hasattr(node, name)}
    for name in usual:
        setattr(node, name, _start_nothing)
    try:
        yield
    finally:
        for name, start in usual.items():
            setattr(node, name, start)


def _start_nothing(*_: object, **__: object) -> None:
    return None


def _quick_start(at_once: int) -> dict[str, Any]:
    """Let Ray start so many processes at once, and none that we have no use for.

    It would start no more at a time than it was told of CPUs, which are the workers wanted: their
    agent, store and standbys would wait in line. And first it would start one for each CPU, which
    cannot become a worker, as it has not the environment of one.
    """
    return {
        "worker_maximum_startup_concurrency": at_once,
        "prestart_worker_first_driver": False,
    }
