"""What a sweep cannot go on without: the head of the Ray cluster, and Ray on the driver's host.

While workers start, this process waits inside of Ray, where nothing interrupts it: half a minute
for a raylet that has died, a minute for a head, after which Ray ends it in its own words. So a
guard ends it before, where one is gone.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self

from raybench.errors import ClusterError

# Longer than the second after which TCP sends again what was lost on the way.
_TIMEOUT_S = 2.0
_ASK_EVERY_S = 1.0
_ASK_AGAIN_S = 1.0
_LOOK_S = 0.2


class HeadMonitor:
    """Whether each of them still listens.

    Ray would find out in a minute, and then end this process, or let it wait for ever.
    addresses: what it is -> its HOST:PORT.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)
        self._lock = threading.Lock()
        self._asked_s = -_ASK_EVERY_S
        self._gone = ""

    def gone(self, *, afresh: bool = False) -> str:
        """Which one did not answer twice in a row, in words; empty while all are there.

        Asks at most once a second, unless afresh.
        """
        with self._lock:
            if not self._gone and (afresh or time.monotonic() >= self._asked_s + _ASK_EVERY_S):
                self._gone = self._silent()
                if self._gone:
                    time.sleep(_ASK_AGAIN_S)
                    self._gone = self._silent()
                self._asked_s = time.monotonic()
            return self._gone

    def check(self, *, afresh: bool = False) -> None:
        """Raise ClusterError when one is gone.

        afresh: ask now. Ray ends this process when it asks a dead head to start or kill an actor.
        """
        if gone := self.gone(afresh=afresh):
            raise ClusterError(gone)

    def _silent(self) -> str:
        there = self._addresses.items()
        return next((f"{name} at {at} is gone" for name, at in there if not _listens(at)), "")


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S).close()
    except OSError:
        return False
    return True


def end_process(reason: str) -> None:
    """Say why, and end this process at once: what an error would do, could it be raised."""
    with suppress(OSError):  # stderr may be full, or closed
        os.write(2, f"{reason}\n".encode())
    os._exit(ClusterError.exit_code)


class StartGuard:
    """While this is entered, a thread asks what is gone, and ends this process if it stays.

    gone: says what is gone, and nothing while all is there. patience_s: how long this process may
    take after that to leave the block. end: ends this process; it gets what is gone.
    """

    def __init__(
        self, gone: Callable[[], str], end: Callable[[str], None], *, patience_s: float
    ) -> None:
        self._gone, self._end, self._patience_s = gone, end, patience_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="start-guard", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        reason = ""
        while not reason:
            if self._is_over.wait(_LOOK_S):
                return
            reason = self._gone()
        if not self._is_over.wait(self._patience_s):
            self._end(reason)
