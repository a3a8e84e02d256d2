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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raylet:
    """A node of a cluster on this host. head: HOST:PORT. folder: its --temp-dir."""

    head: str
    folder: Path


def find_own_cluster(usual: Path, processes: Path = Path("/proc")) -> Found:
    """Find the cluster of this user or root.

    usual: the folder in which Ray keeps its files by default. processes: those of this host.
    One below another folder (`ray start --temp-dir`) is found where there is none in the usual one.
    Raises ClusterError where several could be meant.
    """
    raylets = _raylets(processes)
    heads = {raylet.head for raylet in raylets}
    address, owner = _read_address(usual)
    if address in heads and owner in _check_trust():
        return _unless_taken_over(address)
    others = {raylet.folder for raylet in raylets} - {usual}
    found = {
        address for address, owner in map(_read_address, others) if owner in _check_trust()
    } & heads
    if len(found) > 1:
        raise ClusterError(
            f"--address auto: several Ray clusters run on this host ({', '.join(sorted(found))}); "
            "name one with --address HOST:PORT, or use --address local"
        )
    if found:
        return _unless_taken_over(found.pop())
    return Found(unused=_why_unused(address, owner))


def _check_trust() -> tuple[int, int]:
    return (0, os.geteuid())


def _why_unused(address: str, owner: int) -> str:
    if not address:
        return ""
    if owner not in _check_trust():
        return (
            f"the cluster at {address} is another user's: --address {address} joins it all the same"
        )
    return f"the cluster at {address} is gone: no node of it runs on this host"


def _unless_taken_over(address: str) -> Found:
    """On this host the kernel says whose process listens; elsewhere the raylet stands for it."""
    host, _, port = address.rpartition(":")
    owners = _listeners(int(port)) if _is_here(host.strip("[]")) else set()
    if owners <= set(_check_trust()):
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


def _raylets(processes: Path) -> list[_Raylet]:
    """Those of this user and of root."""
    found = []
    for process in processes.glob("[0-9]*"):
        try:
            owner = process.stat().st_uid
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is hidden from us
        if owner in _check_trust() and words[0].endswith(b"/raylet"):
            options = dict(os.fsdecode(word).partition("=")[::2] for word in words)
            if "--gcs-address" in options and "--temp_dir" in options:
                folder = Path(options["--temp_dir"])
                found.append(_Raylet(head=options["--gcs-address"], folder=folder))
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
