"""What a sweep cannot go on without: the head of the Ray cluster, and Ray on the driver's host."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping

from raybench.errors import ClusterError

# Longer than the second after which TCP sends again what was lost on the way.
_TIMEOUT_S = 2.0
_ASK_EVERY_S = 1.0
_ASK_AGAIN_S = 1.0


class HeadMonitor:
    """Whether each of them still listens.

    Ray would find out in a minute, and then end this process, or let it wait for ever.
    addresses: what it is -> its HOST:PORT.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)
        self._lock = threading.Lock()
        self._asked_s = -_ASK_EVERY_S
        self._gone: str | None = None

    @property
    def is_down(self) -> bool:
        """One did not answer twice in a row. Asks at most once a second."""
        return self._ask(_ASK_EVERY_S) is not None

    def check(self, *, afresh: bool = False) -> None:
        """Raise ClusterError when one is gone.

        afresh: ask now. Ray ends this process when it asks a dead head to start or kill an actor.
        """
        if gone := self.gone(afresh=afresh):
            raise ClusterError(gone)

    def gone(self, *, afresh: bool = False) -> str:
        """Which one is gone, in words; empty while all are there."""
        name = self._ask(0.0 if afresh else _ASK_EVERY_S)
        return f"{name} at {self._addresses[name]} is gone" if name else ""

    def _ask(self, every_s: float) -> str | None:
        with self._lock:
            if not self._gone and time.monotonic() >= self._asked_s + every_s:
                self._gone = self._silent()
                if self._gone:
                    time.sleep(_ASK_AGAIN_S)
                    self._gone = self._silent()
                self._asked_s = time.monotonic()
            return self._gone

    def _silent(self) -> str | None:
        return next((name for name, at in self._addresses.items() if not _listens(at)), None)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S).close()
    except OSError:
        return False
    return True
