"""A Ray of this sweep alone, on this host, which nobody else can talk to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray._private.ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from raybench.cluster import reaper
from raybench.cluster.ray_cluster.private_folder import PrivateFolder, make_private_folder
from raybench.cluster.ray_cluster.start_watch import watch_programs
from raybench.environment import usable_cores
from raybench.errors import ClusterError

_OBJECT_STORE_BYTES = 256 * 1024**2
# Ray's own logs: its default is 512 MB, five times over, for each process.
_LOG_BYTES = 8 * 1024**2
_LOG_BACKUPS = 1
_NOT_STARTED = "the private Ray of this host did not start: "


def start_private_ray(
    device: str,
    wanted: int,
    *,
    oversubscribe: bool = False,
    **quiet: Any,
) -> PrivateFolder:
    """Start it and join it; the folder that it lives in. quiet: options of `ray.init`.

    Where a part of Ray dies and Ray waits for it, this process ends, and says why.
    oversubscribe: as many CPU workers as are wanted, also where they have to share cores.
    Raises ClusterError.
    """
    cores = usable_cores()
    folder = make_private_folder()
    after = _what_to_type(folder)
    watched = watch_programs(_NOT_STARTED, after, made=str(folder.kept), removed=str(folder.token))
    try:
        with (
            reaper.reap_orphans_of_children(folder.path),
            _environment(folder),
            _on_loopback(),
            watched,
        ):
            ray.init(
                address="local",
                num_cpus=wanted if oversubscribe else min(wanted, cores),
                num_gpus=0 if device == "cpu" else None,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder.rays),
                _system_config=_quick_start(max(wanted, cores)),
                **quiet,
            )
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        folder.keep_logs()
        raise ClusterError(f"{_NOT_STARTED}{said}{after}") from None
    return folder


def _what_to_type(folder: PrivateFolder) -> str:
    return f"; nothing is measured yet, so type the same command again; its logs: {folder.logs}"


def read_settings_anew() -> None:
    """Have Ray take its mode and token from the environment, not from an earlier private Ray."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _environment(folder: PrivateFolder) -> Iterator[None]:
    """Set what Ray's processes are to have, and this process only while it starts them.

    Whatever the user's own token is, this Ray is not asked for it.
    """
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder.token),
        "RAY_ROTATION_MAX_BYTES": str(_LOG_BYTES),
        "RAY_ROTATION_BACKUP_COUNT": str(_LOG_BACKUPS),
    }
    usual = {name: os.environ.get(name) for name in [*ours, "RAY_AUTH_TOKEN"]}
    os.environ.update(ours)
    os.environ.pop("RAY_AUTH_TOKEN", None)
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
