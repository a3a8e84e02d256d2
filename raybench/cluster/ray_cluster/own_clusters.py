"""Which Ray cluster `ray start` has made on this host, or joined it to.

`ray start` writes the address into a file of a folder that every user can write (Ray makes it so).
Whoever is believed there gets this user's token and may run code as this user. So a file counts
only where a raylet of this user, or of root, runs on this host and has that address; no other user
can make one. `ray.init` writes no such file, so a private Ray is never found.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import psutil

from raybench.errors import ClusterError

_FILE = "ray_current_cluster"
_MOST_BYTES = 300
_ADDRESS = re.compile(r"[\w.:\[\]-]+:\d{1,5}")
_LISTENS = "0A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """address: HOST:PORT of the head; empty where no cluster is to be joined.

    unused: of an address that is not joined, what it is and why, for the user.
    """

    address: str = ""
    unused: str = ""


def find_own_cluster(usual: Path) -> Found:
    """Find the cluster of this user or root.

    usual: the folder in which Ray keeps its files by default. One below another folder
    (`ray start --temp-dir`) is found where there is none in the usual one.
    Raises ClusterError where several could be meant.
    """
    raylets = _raylets()
    heads = {head for head, _ in raylets}
    address, owner = _read_address(usual)
    if address in heads and owner in _trusted():
        return _unless_taken_over(address)
    others = {_read_address(folder) for _, folder in raylets if folder != usual}
    found = {at for at, its_owner in others if at in heads and its_owner in _trusted()}
    if len(found) > 1:
        raise ClusterError(
            f"--address auto: several Ray clusters run on this host ({', '.join(sorted(found))}); "
            "name one with --address HOST:PORT, or use --address local"
        )
    if found:
        return _unless_taken_over(found.pop())
    if not address:
        return Found()
    if owner not in _trusted():
        why = f"is another user's: --address {address} joins it all the same"
    else:
        why = "is gone: no node of it runs on this host"
    return Found(unused=f"the cluster at {address} {why}")


def _trusted() -> tuple[int, int]:
    return (0, os.geteuid())


def _unless_taken_over(address: str) -> Found:
    """On this host the kernel says whose process listens; elsewhere the raylet stands for it."""
    host, _, port = address.rpartition(":")
    owners = _listeners(int(port)) if _is_here(host.strip("[]")) else set()
    if owners <= set(_trusted()):
        return Found(address=address)
    return Found(unused=f"the cluster at {address} is gone: another user listens there")


def _read_address(folder: Path) -> tuple[str, int]:
    """Read the address in the file of this folder, and who owns it; empty where there is none."""
    try:
        # No link is followed, and no pipe waited for.
        descriptor = os.open(folder / _FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return "", -1
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return "", -1
        text = file.read(_MOST_BYTES).decode(errors="replace").strip()
    return (text, status.st_uid) if _ADDRESS.fullmatch(text) else ("", -1)


def _raylets() -> set[tuple[str, Path]]:
    """Those of this user and of root: HOST:PORT of the head, and --temp-dir."""
    found = set()
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, users = process.info["cmdline"] or [""], process.info["uids"]
        if words[0].endswith("/raylet") and users and users.real in _trusted():
            options = dict(word.partition("=")[::2] for word in words)
            found.add((options.get("--gcs-address", ""), Path(options.get("--temp_dir", ""))))
    return found


def _is_here(host: str) -> bool:
    """Whether this is an address of this host: nobody can bind another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        try:
            tried.bind((host, 0))
        except OSError:
            return False
    return True


def _listeners(port: int) -> set[int]:
    """Find the users whose processes listen on this port, at whatever address."""
    owners = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == _LISTENS and int(cells[1].rpartition(":")[2], 16) == port:
                owners.add(int(cells[7]))
    return owners
