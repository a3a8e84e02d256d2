"""A client of NCCL's RAS service: which ranks answer, and how many collectives each has launched.

Each process with a communicator serves the same address (`NCCL_RAS_ADDR`); one of them answers for
all. The protocol is lines of text: src/ras/client_support.cc of NCCL. JSON came with NCCL 2.28.7;
older versions may crash a job that is asked while it fails (nccl#1718, #1762).
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# Until the server says its version. It does so at once, unless its process is stopped; the next
# connection may then reach another process, as all of them listen at the same address.
_GREETING_S = 0.4
_LEAST_VERSION = (2, 28, 7)
_MOST_BYTES = 64 << 20
# NCCL 2.28.7 and 2.28.9 lack the comma in `missing_ranks`; 2.29.2 has it.
_MISSING_COMMA = re.compile(r'("nvml_dev": -?\d+)(\s*"status": \{)')


class NoRas(StrEnum):
    """Why there is no report."""

    REFUSED = "refused"
    SILENT = "silent"
    TOO_OLD = "too_old"
    UNREADABLE = "unreadable"
    OTHER_PROCESSES = "other_processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RasRank:
    """A rank of a communicator."""

    rank: int
    host: str
    pid: int
    # Collectives launched by the host, not finished ones. Of five kinds only.
    launched: Mapping[str, int]
    # Its process has not answered the others, or they have given it up.
    is_missing: bool = False
    is_dead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A communicator of NCCL."""

    name: str
    size: int
    ranks: tuple[RasRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RasReport:
    """What RAS told."""

    nccl_version: str
    communicators: tuple[Communicator, ...]


def ask(address: tuple[str, int], timeout_s: float) -> str | NoRas:
    """Return the JSON text of the service, or why there is none. Takes at most `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=min(left_s, _GREETING_S)) as connection:
                return _converse(_Lines(connection, deadline_s))
        except ConnectionRefusedError:
            return NoRas.REFUSED
        except _OldServerError:
            return NoRas.TOO_OLD
        except OSError:  # a time-out too
            continue
    return NoRas.SILENT


class _OldServerError(Exception):
    """The service knows no JSON."""


class _Lines:
    """Lines of a connection, until a deadline."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection, self._deadline_s = connection, deadline_s
        self._read = b""

    def send(self, line: str) -> None:
        self._connection.sendall(f"{line}\n".encode())

    def line(self, timeout_s: float) -> str:
        """Return the next line; raises TimeoutError, or ConnectionError at the end."""
        until_s = min(time.monotonic() + timeout_s, self._deadline_s)
        while b"\n" not in self._read:
            if not self._receive(until_s):
                raise ConnectionError
        line, _, self._read = self._read.partition(b"\n")
        return line.decode(errors="replace").strip()

    def rest(self) -> str:
        """Return all until the other side closes the connection."""
        while len(self._read) < _MOST_BYTES and self._receive(self._deadline_s):
            pass
        return self._read.decode(errors="replace")

    def left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def _receive(self, until_s: float) -> bool:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        data = self._connection.recv(1 << 16)
        self._read += data
        return bool(data)


def _converse(lines: _Lines) -> str:
    lines.send("CLIENT PROTOCOL 2")
    lines.line(_GREETING_S)
    # How long it waits for other processes, in whole seconds; the answer itself takes none.
    lines.send(f"TIMEOUT {max(1, int(lines.left_s() - 1))}")
    lines.line(_GREETING_S)
    lines.send("SET FORMAT json")
    if not lines.line(_GREETING_S).startswith("OK"):
        raise _OldServerError
    lines.send("VERBOSE STATUS")
    return lines.rest()


def read(text: str, pids: Collection[int]) -> RasReport | NoRas:
    """Return the report; NoRas where it is no JSON, or too old, or not of these processes.

    Args:
        pids: processes of this point on the hosts that were asked; others may share the address.
    """
    try:
        try:
            content = json.loads(text)
        except ValueError:
            content = json.loads(_MISSING_COMMA.sub(r"\1,\2", text))
        version = str(content["nccl_version"])
        communicators = tuple(_communicator(one) for one in content["communicators"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return NoRas.UNREADABLE
    if _numbers(version) < _LEAST_VERSION:
        return NoRas.TOO_OLD
    ours = []
    for communicator in communicators:
        if all(rank.pid in pids or rank.pid < 0 for rank in communicator.ranks):
            ours.append(communicator)
    if communicators and not ours:
        return NoRas.OTHER_PROCESSES
    return RasReport(nccl_version=version, communicators=tuple(ours))


def _communicator(given: Mapping[str, Any]) -> Communicator:
    ranks = []
    for one in given["ranks"]:
        counts = {str(name): int(count) for name, count in one["collective_counts"].items()}
        ranks.append(_rank(one, launched=counts))
    for one in given.get("missing_ranks", ()):
        is_dead = bool(one["status"]["considered_dead"])
        ranks.append(_rank(one, launched={}, is_missing=True, is_dead=is_dead))
    return Communicator(
        name=f"{given['hash']}:{given['secondary_hash']}",
        size=int(given["size"]),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
    )


def _rank(given: Mapping[str, Any], **fields: Any) -> RasRank:
    return RasRank(
        rank=int(given["rank"]), host=str(given["host"]), pid=int(given["pid"]), **fields
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
