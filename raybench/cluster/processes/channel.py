"""Messages between the driver, its agents and its workers: pickles, after each knew the secret.

The driver listens: on one host at a socket file in a folder that only its user can enter, else on
a port. Pickles run code, so on a port nothing is read of a peer that does not know the secret.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, Final

from raybench.errors import ClusterError

Address = str | tuple[str, int]
# Of a channel whose peer is gone, in place of a message.
GONE: Final = object()
# What goes wrong with a connection whose other end does.
BROKEN = (OSError, EOFError)
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where the driver listens, and what who enters must know."""

    address: Address
    secret: bytes

    def enter(self, hello: object, timeout_s: float = 10.0) -> Connection:
        """Connect, and say who this is. Raises ClusterError when the driver is not there."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                connection = Client(self.address, authkey=self.secret)
                connection.send(hello)
            except AuthenticationError:
                raise ClusterError(f"{self}: RAYBENCH_SECRET is another one there") from None
            except BROKEN as error:
                if time.monotonic() > deadline_s:
                    raise ClusterError(f"{self}: no raybench answers there: {error}") from None
                time.sleep(_RETRY_S)
            else:
                # Client gives the base class of the two platforms.
                assert isinstance(connection, Connection)
                return connection

    def __str__(self) -> str:
        return self.address if isinstance(self.address, str) else "{}:{}".format(*self.address)


class Reception:
    """The driver's side of a door: takes who knows the secret, and waits for nobody.

    come: gets the connection and the hello of each, on a thread of its own.
    """

    def __init__(self, door: Door, come: Callable[[Connection, Any], None]) -> None:
        self._secret, self._come = door.secret, come
        try:
            self._listener = Listener(door.address, backlog=2048)
        except OSError as error:
            raise ClusterError(
                f"{door}: cannot be listened at: {error.strerror}; set MASTER_PORT to another port"
            ) from None
        threading.Thread(target=self._accept, name="reception", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # it is closed
            # Who says nothing keeps no other waiting.
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            hello = connection.recv()
        except (AuthenticationError, *BROKEN):
            connection.close()
        else:
            self._come(connection, hello)


class Channel:
    """A connection of which a thread reads: nobody waits for a message that comes by halves."""

    def __init__(self, connection: Connection, deliver: Callable[[Any], None]) -> None:
        self._connection, self._deliver = connection, deliver
        self._is_gone = False
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="channel", daemon=True).start()

    def listen(self, deliver: Callable[[Any], None]) -> None:
        """Give it each message from now on, on the thread that reads, and GONE as the last one."""
        with self._lock:
            self._deliver = deliver
            if self._is_gone:
                deliver(GONE)

    def send(self, message: object) -> None:
        """Send it; where the peer is gone, the thread that reads tells."""
        with suppress(*BROKEN):
            self._connection.send(message)

    def close(self) -> None:
        """End both directions; the thread that reads ends by that."""
        with (
            self._lock,
            suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as ours,
        ):
            ours.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        message: object = None
        while message is not GONE:
            try:
                message = self._connection.recv()
            except BROKEN:
                message = GONE
            with self._lock:
                if message is GONE:
                    self._is_gone = True
                    self._connection.close()
                self._deliver(message)


def new_secret() -> bytes:
    """Return a secret that nobody has."""
    return secrets.token_bytes(32)


def addresses(connection: Connection) -> tuple[str, str]:
    """Tell by which address of this host a peer came, and the peer's own; empty for a file."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        if end.family == socket.AF_UNIX:
            return "", ""
        return end.getsockname()[0], end.getpeername()[0]
