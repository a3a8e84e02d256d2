"""Where a private Ray lives: a folder of this sweep that no other user can enter.

Ray opens its own folder, and all below it, to everybody (mode 0777), and keeps a token in the home
of the user, for everybody to read. So both go below a folder that is closed (0700).
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raybench.cluster import reaper
from raybench.errors import ClusterError

_PREFIX = "raybench-"
# Linux takes no longer path for a socket. Ray's longest one below the folder, with a process id of
# seven digits, is added to the folder's own name.
_MOST_BYTES = 107
_OWN_BYTES = len("/raybench-12345678/r")
_RAYS_BYTES = len("/session_2026-11-22_03-57-34_123456_1234567/sockets/plasma_store")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateFolder:
    """The folder of one private Ray. Its token is in it, and nowhere else."""

    path: Path

    @property
    def token(self) -> Path:
        """The file with the token."""
        return self.path / "token"

    @property
    def rays(self) -> Path:
        """What Ray may open to everybody: nobody gets to it."""
        return self.path / "r"

    @property
    def logs(self) -> Path:
        """Ray's own."""
        return self.rays / "session_latest" / "logs"

    @property
    def kept(self) -> Path:
        """The file by which the folder stays where all of its processes have ended."""
        return self.path / reaper.KEPT

    def remove(self) -> None:
        """Remove all of it. What a process of Ray still writes meanwhile is left to the watcher."""
        shutil.rmtree(self.path, ignore_errors=True)

    def keep_logs(self) -> None:
        """Remove the token alone."""
        self.kept.touch()
        self.token.unlink(missing_ok=True)


def make_private_folder() -> PrivateFolder:
    """Make a folder with a new token. Raises ClusterError where there is no place for one."""
    reasons = []
    for base in dict.fromkeys(_bases()):
        if reason := _why_not(base):
            reasons.append(f"{base} {reason}")
            continue
        try:
            return _make(base)
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
    raise ClusterError(
        f"no folder for a private Ray: {'; '.join(reasons)}; set TMPDIR to a short path that only "
        "you can write, or that is as /tmp is (mode 1777)"
    )


def _make(base: Path) -> PrivateFolder:
    folder = PrivateFolder(path=Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base)))
    try:
        descriptor = os.open(folder.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
    except OSError:
        folder.remove()
        raise
    return folder


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
