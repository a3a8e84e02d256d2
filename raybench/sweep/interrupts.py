"""Ctrl-C and SIGTERM during a sweep: what they mean, and that they work whatever hangs."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from raybench.errors import ClusterError
from raybench.sweep.messages import Listener

_TICK_S = 0.25
_NOTICE_S = 1.5  # Ray looks for signals once a second while it waits
_CLOSE_S = 15.0
_LAST_S = 1.0
_INTERRUPTED = 130


class Interrupts:
    """Takes SIGINT and SIGTERM while it is entered, which must be in the main thread.

    One Ctrl-C while points run turns `stopping` true and interrupts nothing. A second one, the
    first at any other time, and SIGTERM raise KeyboardInterrupt in the main thread, once. A
    thread ends the process when the main thread is stuck in native code and does not take that
    notice, when it does not come to its end afterwards, and soon after one more Ctrl-C.

    in_flight: points on their workers, for the message. farewell: called before the process is
    ended so, with what has happened; it says how to go on. None while there is nothing to go on
    with.
    """

    def __init__(self, listener: Listener) -> None:
        self.in_flight = 0
        self.farewell: Callable[[str], None] | None = None
        self._listener = listener
        self._points_run = False
        self._asked = 0  # signals so far
        self._due = 0  # of them, those that ask to stop now
        self._raised = False
        self._holds_s: list[float] = []  # how long each block that holds back may take
        self._deadline_s = math.inf
        # A handler of the main thread may be interrupted by another one.
        self._lock = threading.RLock()
        self._ended = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether Ctrl-C or SIGTERM came, after which no further point may start."""
        return self._asked > 0

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._usual = [(n, signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)]
        self._usual_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.take_signals()
        self._watcher = threading.Thread(target=self._watch, name="interrupts", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        signal.set_wakeup_fd(self._usual_fd)
        for number, usual in self._usual:
            signal.signal(number, usual)
        if self._raised:
            # All is kept: one more ends what is still to be printed, without a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._reader.close()
        self._writer.close()

    def take_signals(self) -> None:
        """Install the handlers; once more after `ray.init`, which sets one of its own."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    @contextmanager
    def points_run(self) -> Iterator[None]:
        """Return a context in which one Ctrl-C lets the points in flight finish."""
        self._points_run = True
        try:
            yield
        finally:
            self._points_run = False

    @contextmanager
    def held_back(self, most_s: float = _NOTICE_S) -> Iterator[None]:
        """Return a context that finishes before an interrupt raises; a second one raises at once.

        most_s: the process may be ended where the block takes longer after an interrupt. With inf
        nothing is raised in the block, and the process is ended soon after a second interrupt.
        """
        self._holds_s.append(most_s)
        try:
            yield
        finally:
            self._holds_s.pop()
            self._raise_if_due()

    def say_farewell(self) -> None:
        """Tell the user how to go on, before an interrupt ends the process at once."""
        if self.farewell:
            self.farewell("ended at once")
        else:
            self._listener.tell("interrupted")

    def end(self, reason: str) -> None:
        """End the process with the exit code of a ClusterError; tell the user how to go on.

        For another thread, while the main one waits for a cluster that is gone. reason: the line
        that an error would be.
        """
        self._listener.show_cursor()
        if self.farewell:
            self.farewell("stopped")
        self._listener.tell(reason)
        os._exit(ClusterError.exit_code)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._take()
        self._raise_if_due()

    def _raise_if_due(self) -> None:
        """Raise KeyboardInterrupt where one is asked for, no block holds it back, and none came."""
        is_held = math.inf in self._holds_s or (bool(self._holds_s) and self._due < 2)
        if self._due and not self._raised and not is_held:
            self._raised = True
            self._deadline_s = time.monotonic() + _CLOSE_S
            raise KeyboardInterrupt

    def _take(self) -> None:
        """Count the signals that came since the last call; the handler alone may be called late."""
        with self._lock:
            try:
                numbers = self._reader.recv(64)
            except BlockingIOError:
                return
            for number in numbers:
                if number not in (signal.SIGINT, signal.SIGTERM):
                    continue
                is_first, self._asked = self._asked == 0, self._asked + 1
                if is_first and self._points_run and number == signal.SIGINT:
                    continue
                self._due += 1
                patience_s = _LAST_S if self._raised else _NOTICE_S
                if self._due == 1:
                    patience_s = max([patience_s, *self._holds_s])
                self._deadline_s = min(self._deadline_s, time.monotonic() + patience_s)

    def _watch(self) -> None:
        """Take signals in a thread, and end the process where the main thread is too late."""
        told = False
        while not self._ended.is_set():
            select.select([self._reader], [], [], _TICK_S)
            self._take()
            if self.stopping and not self._due and not told:
                told = True
                what = "the point" if self.in_flight < 2 else f"the {self.in_flight} points"
                text = f"finishing {what} in flight, then stopping; Ctrl-C again stops now"
                self._listener.tell(text)
            if time.monotonic() > self._deadline_s:
                # A spinner or a progress bar has hidden it.
                self._listener.show_cursor()
                self.say_farewell()
                os._exit(_INTERRUPTED)
