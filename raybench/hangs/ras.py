"""Client of NCCL's RAS service: which ranks answer, and how many collectives each has launched.

All processes with a communicator listen at the same address (`NCCL_RAS_ADDR`), and the process that
accepts a connection answers for all. The protocol is lines of text, defined in
src/ras/client_support.cc of NCCL. JSON came with NCCL 2.28.7; a request to an older version may
crash a job that is about to fail (nccl#1718, #1762).
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

# A server answers a setting at once unless its process is stopped. A new connection may then reach
# another process.
_REPLY_S = 0.4
_MIN_VERSION = (2, 28, 7)
_MAX_ANSWER_BYTES = 64 << 20
# NCCL 2.28.7 and 2.28.9 omit a comma in `missing_ranks`; 2.29.2 writes it.
_MISSING_COMMA = re.compile(r'("nvml_dev": -?\d+)(\s*"status": \{)')


class NoRas(StrEnum):
    """Why there is no report."""

    # No process listens at the address.
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
    # NCCL's name of a collective, such as AllReduce -> number of launches, finished or not. NCCL
    # counts five collectives and neither send nor recv.
    launched: Mapping[str, int]
    # The process has not answered NCCL's other processes.
    is_missing: bool = False
    # NCCL's other processes no longer ask this process.
    is_dead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """An NCCL communicator and its ranks."""

    name: str
    size: int
    ranks: tuple[RasRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RasReport:
    """The answer of NCCL's RAS service."""

    nccl_version: str
    communicators: tuple[Communicator, ...]


def ask(address: tuple[str, int], timeout_s: float) -> str | NoRas:
    """Return the JSON text of the service, or why there is none; takes at most `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=min(left_s, _REPLY_S)) as connection:
                return _request_status(_LineConnection(connection, deadline_s))
        except ConnectionRefusedError:
            return NoRas.REFUSED
        except _OldServerError:
            return NoRas.TOO_OLD
        except OSError:
            # A timeout or a closed connection: a new connection may reach another process.
            continue
    return NoRas.SILENT


class _OldServerError(Exception):
    """The service cannot answer in JSON."""


class _LineConnection:
    """Sends and receives lines over a socket until a deadline."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection, self._deadline_s = connection, deadline_s
        self._buffer = b""

    def send_line(self, line: str) -> None:
        self._connection.sendall(f"{line}\n".encode())

    def read_line(self, timeout_s: float) -> str:
        """Return the next line; raises TimeoutError, or ConnectionError if the server closes."""
        until_s = min(time.monotonic() + timeout_s, self._deadline_s)
        while b"\n" not in self._buffer:
            if not self._receive(until_s):
                raise ConnectionError
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace").strip()

    def read_rest(self) -> str:
        """Return all text until the server closes the connection."""
        while len(self._buffer) < _MAX_ANSWER_BYTES and self._receive(self._deadline_s):
            pass
        return self._buffer.decode(errors="replace")

    def left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def _receive(self, until_s: float) -> bool:
        """Add received bytes to the buffer; return False if the server has closed."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        data = self._connection.recv(1 << 16)
        self._buffer += data
        return bool(data)


def _request_status(connection: _LineConnection) -> str:
    """Return the status of all ranks as JSON text."""
    connection.send_line("CLIENT PROTOCOL 2")
    connection.read_line(_REPLY_S)
    # How long the server waits for other processes, in whole seconds. One second is left for the
    # answer.
    server_timeout_s = max(1, int(connection.left_s() - 1))
    connection.send_line(f"TIMEOUT {server_timeout_s}")
    connection.read_line(_REPLY_S)
    connection.send_line("SET FORMAT json")
    if not connection.read_line(_REPLY_S).startswith("OK"):
        raise _OldServerError
    connection.send_line("VERBOSE STATUS")
    return connection.read_rest()


def read(text: str, pids: Collection[int]) -> RasReport | NoRas:
    """Parse the JSON text, and drop communicators of other jobs.

    Args:
        pids: processes of all ranks of the point. Other jobs may share the address.
    """
    try:
        try:
            content = json.loads(text)
        except ValueError:
            # NCCL 2.28 omits a comma.
            content = json.loads(_MISSING_COMMA.sub(r"\1,\2", text))
        version = str(content["nccl_version"])
        communicators = tuple(map(_read_communicator, content["communicators"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return NoRas.UNREADABLE
    if _version_numbers(version) < _MIN_VERSION:
        return NoRas.TOO_OLD
    ours = []
    for communicator in communicators:
        # A negative id means that NCCL does not know the process.
        if all(rank.pid in pids or rank.pid < 0 for rank in communicator.ranks):
            ours.append(communicator)
    if communicators and not ours:
        return NoRas.OTHER_PROCESSES
    return RasReport(nccl_version=version, communicators=tuple(ours))


def _read_communicator(content: Mapping[str, Any]) -> Communicator:
    """Return the communicator that the service has described in JSON."""
    ranks = []
    for rank_content in content["ranks"]:
        counts = rank_content["collective_counts"]  # name of a collective -> number of launches
        launched = {str(name): int(count) for name, count in counts.items()}
        ranks.append(_read_rank(rank_content, launched=launched))
    for rank_content in content.get("missing_ranks", ()):
        is_dead = bool(rank_content["status"]["considered_dead"])
        ranks.append(_read_rank(rank_content, launched={}, is_missing=True, is_dead=is_dead))
    return Communicator(
        name=f"{content['hash']}:{content['secondary_hash']}",
        size=int(content["size"]),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
    )


def _read_rank(content: Mapping[str, Any], **fields: Any) -> RasRank:
    return RasRank(
        rank=int(content["rank"]), host=str(content["host"]), pid=int(content["pid"]), **fields
    )


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
