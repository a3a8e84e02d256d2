"""All uses of private parts of Ray, each with the reason.

Because of them `pyproject.toml` holds Ray below the next minor version.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray._private.node
import ray._private.ray_constants
import ray._private.state
import ray._private.worker
from ray._common.utils import get_default_ray_temp_dir
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray._private.services import find_node_ids
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from raybench.conversion import MIB
from raybench.records.environment import set_variables

# Size of Ray's own logs. By default, each process of Ray keeps up to five backups of 512 MB.
_LOG_BYTES = 8 * MIB
_LOG_BACKUPS = 1
# Methods of Ray's node that start a dashboard, an autoscaler and a log reader, which no sweep uses.
# `ray.init` waits for the dashboard even with `include_dashboard=False`, and has no option against
# autoscaler and log reader.
_UNUSED_PROGRAMS = ("start_api_server", "start_monitor", "start_log_monitor")
_PRINT = ray._private.worker.print_to_stdstream
_CONNECT_TO_HEAD = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
# State 0 is alive.
_COUNT_GPUS = f"""{_CONNECT_TO_HEAD}
nodes = GcsClient(address=sys.argv[1]).get_all_node_info().values()
print(int(sum(node.resources_total.get("GPU", 0) for node in nodes if node.state == 0)))
"""


class NoTokenError(Exception):
    """The cluster asks for a token, and this process has none."""


def silence_raylets() -> None:
    """Keep messages of raylets off stdout: Ray prints them even with `log_to_driver=False`."""
    ray._private.worker.print_to_stdstream = _do_nothing


def has_joined() -> bool:
    """Return whether this process has joined a Ray."""
    return bool(ray.is_initialized())


def is_client() -> bool:
    """Return whether this process has joined by Ray Client, from outside of the cluster."""
    return bool(ray.util.client.ray.is_connected())  # type: ignore[no-untyped-call]


def restore_settings() -> None:
    """Undo `silence_raylets` and what a private Ray set, for later calls of `ray.init`."""
    ray._private.worker.print_to_stdstream = _PRINT
    reload_settings()


def reload_settings() -> None:
    """Make Ray read its mode and token from the environment again."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def use_token_of_user() -> None:
    """Let `ray.init` authenticate with the user's token, if there is a token.

    Raises:
        NoTokenError: token authentication is on, and there is no token.
    """
    # Ray itself does this only for its own address "auto".
    try:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except ray.exceptions.AuthenticationError:
        raise NoTokenError from None


def has_node_on_this_host() -> bool:
    """Return whether any Ray has a node on this host."""
    return bool(find_node_ids())  # type: ignore[no-untyped-call]


def default_folder() -> Path:
    """Return the folder in which `ray start` writes."""
    return Path(get_default_ray_temp_dir())  # type: ignore[no-untyped-call]


def is_head(address: str, timeout_s: float) -> bool:
    """Return whether a Ray head answers at HOST:PORT.

    Raises:
        NoTokenError: the head refuses our token.
    """
    return _ask_head(_CONNECT_TO_HEAD, address, timeout_s) is not None


def count_gpus(address: str, timeout_s: float) -> int | None:
    """Return the number of GPUs of the cluster whose head is at HOST:PORT; None without an answer.

    Raises:
        NoTokenError: the head refuses our token.
    """
    text = _ask_head(_COUNT_GPUS, address, timeout_s) or ""
    return int(text) if text.strip().isdecimal() else None


def _ask_head(program: str, address: str, timeout_s: float) -> str | None:
    """Run a program that connects to a head; return its output, or None if the time is up."""
    # With -P, Python imports no module from the working directory.
    command = [sys.executable, "-P", "-c", program, address]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    if "RAY_AUTH_TOKEN" in child.stderr:
        raise NoTokenError
    return child.stdout


@contextmanager
def private_ray() -> Iterator[None]:
    """Make `ray.init` start a Ray that only this process can reach, without unused programs."""
    variables = {
        # Give the token by the environment, so that Ray does not use the user's file.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Shorten Ray's waits for its head, because Ray holds the GIL and no `ray_guard` can run.
        "RAY_gcs_server_port_wait_time_s": "15",
        "RAY_py_gcs_connect_timeout_s": "5",
        "RAY_ROTATION_MAX_BYTES": str(_LOG_BYTES),
        "RAY_ROTATION_BACKUP_COUNT": str(_LOG_BACKUPS),
    }
    node: Any = ray._private.node.Node
    constants: Any = ray._private.ray_constants
    # (owner, attribute, value). Without the first patch, Ray would listen on all networks.
    patches: list[tuple[Any, str, Any]] = [(constants, "ENABLE_RAY_CLUSTER", False)]
    patches += [(node, name, _do_nothing) for name in _UNUSED_PROGRAMS if hasattr(node, name)]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        with set_variables(variables):
            reload_settings()
            yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def start_private_node(folder: Path, **options: Any) -> None:
    """Start a Ray of this process on loopback; call it within `private_ray`.

    Args:
        folder: folder of Ray's session.
        options: options of `ray.init`, such as `_system_config`.
    """
    ray.init(address="local", _node_ip_address="127.0.0.1", _temp_dir=str(folder), **options)


def free_resources_by_node() -> dict[str, dict[str, float]]:
    """Return node id -> resource -> amount that Ray has free."""
    free = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return dict(free)


def jobs() -> list[dict[str, Any]]:
    """Return Ray's dict of each job of the cluster, ended jobs included."""
    return list(ray._private.state.jobs())  # type: ignore[no-untyped-call]


def logs_folder() -> Path:
    """Return the folder of the session's logs on this node; only for processes of Ray."""
    session: Any = ray._private.worker._global_node
    return Path(session.get_logs_dir_path())


def _do_nothing(*_: object, **__: object) -> None:
    return None
