"""Ends this process where Ray dies and keeps it from noticing.

While workers start, this process waits inside of Ray, where nothing interrupts it: half a minute
for a raylet that has died, a minute for a head, after which Ray ends it in its own words.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from raybench.errors import ClusterError

_LOOK_S = 0.2


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
