"""Ctrl-C and SIGTERM during a sweep: let points finish, interrupt, or end a process that hangs."""

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
from raybench.sweep.listener import Listener

_TICK_S = 0.25
# How long the main thread may take to raise KeyboardInterrupt. Ray looks for signals once a second
# while it waits.
_NOTICE_S = 1.5
# How long the main thread may take to end after KeyboardInterrupt, and after one more signal.
_CLOSE_S = 15.0
_CLOSE_AGAIN_S = 1.0
_INTERRUPTED = 130


class Interrupts:
    """Context manager of the main thread that handles SIGINT and SIGTERM.

    While points run, the first Ctrl-C only sets `stopping`. The second Ctrl-C, a Ctrl-C while no
    point runs, and SIGTERM raise KeyboardInterrupt in the main thread, but only once.

    A thread ends the process with exit code 130 if the main thread does not raise within 1.5 s,
    does not end within 15 s after KeyboardInterrupt, or gets one more signal. After the `with`
    block a Ctrl-C ends the process at once if KeyboardInterrupt was raised before.

    Args:
        is_guest: the process belongs to the caller. No signal ends it in the `with` block: each
            further signal raises KeyboardInterrupt again. A SIGTERM is sent again after the block.
            Any thread may enter; only the main thread then handles signals.
    """

    def __init__(self, listener: Listener, *, is_guest: bool = False) -> None:
        # Number of points on their workers, for the message.
        self.in_flight = 0
        # Tells the user how to resume the run. It gets how the run ended, and is called in any
        # thread before the process is ended. None: no run has begun.
        self.farewell: Callable[[str], None] | None = None
        self._listener = listener
        self._points_run = False
        # Number of all signals.
        self._signals = 0
        # Number of signals that ask to stop now; a first Ctrl-C while points run does not.
        self._stop_signals = 0
        # How many of these signals had come when KeyboardInterrupt was raised last.
        self._raised = 0
        self._is_guest = is_guest
        self._handles = True
        # Whether SIGTERM came.
        self._is_terminated = False
        # The `most_s` of each active `held_back`.
        self._holds_s: list[float] = []
        # When the watcher ends the process.
        self._deadline_s = math.inf
        # Reentrant: a signal handler of the main thread may interrupt another one.
        self._lock = threading.RLock()
        self._is_over = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether Ctrl-C or SIGTERM came; no further point may then start."""
        return self._signals > 0

    def __enter__(self) -> Self:
        if self._is_guest and threading.current_thread() is not threading.main_thread():
            # Python handles signals in the main thread only, which belongs to somebody else.
            self._handles = False
            return self
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_handlers = [(n, signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)]
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.take_signals()
        self._watcher = threading.Thread(target=self._watch, name="interrupts", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._handles:
            return
        self._is_over.set()
        self._watcher.join()
        signal.set_wakeup_fd(self._old_wakeup_fd)
        for number, usual in self._old_handlers:
            signal.signal(number, usual)
        self._reader.close()
        self._writer.close()
        if self._is_guest and self._is_terminated:
            # The run is written: what the caller has chosen for SIGTERM happens now.
            signal.raise_signal(signal.SIGTERM)
        elif self._raised and not self._is_guest:
            # The run is written, so a Ctrl-C may end the process without a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def take_signals(self) -> None:
        """Install the signal handlers; call it again after `ray.init`, which sets its own."""
        if not self._handles:
            return
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    @contextmanager
    def points_run(self) -> Iterator[None]:
        """Let the first Ctrl-C in the context wait for the points in flight."""
        self._points_run = True
        try:
            yield
        finally:
            self._points_run = False

    @contextmanager
    def held_back(self, most_s: float = _NOTICE_S) -> Iterator[None]:
        """Delay KeyboardInterrupt to the end of the context, or until one more signal.

        Args:
            most_s: how long the block may take after the signal before the process is ended; at
                least 1.5 s. With inf nothing is raised in the block, and one more signal ends the
                process.
        """
        self._holds_s.append(most_s)
        try:
            yield
        finally:
            self._holds_s.pop()
            self._raise_if_due()

    def say_farewell(self) -> None:
        """Call `farewell`, or tell the user "interrupted" if it is None."""
        if self.farewell:
            self.farewell("ended at once")
        else:
            self._listener.tell("interrupted")

    def end(self, reason: str) -> None:
        """Tell the user why, and end the process with exit code 3; no `finally` block runs.

        A thread calls it while the main thread waits for a cluster that is gone.
        """
        self._listener.show_cursor()
        if self.farewell:
            self.farewell("stopped")
        self._listener.tell(reason)
        os._exit(ClusterError.exit_code)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._count_signals()
        self._raise_if_due()

    def _raise_if_due(self) -> None:
        """Raise KeyboardInterrupt if a signal asks for it, unless held back or raised before."""
        is_held = math.inf in self._holds_s or (bool(self._holds_s) and self._stop_signals < 2)
        most = self._stop_signals if self._is_guest else 1
        if self._raised < min(most, self._stop_signals) and not is_held:
            self._raised = self._stop_signals
            self._deadline_s = time.monotonic() + _CLOSE_S
            raise KeyboardInterrupt

    def _count_signals(self) -> None:
        """Count new signals. The watcher calls it too, because Python may call a handler late."""
        with self._lock:
            try:
                numbers = self._reader.recv(64)
            except BlockingIOError:
                return
            for number in (n for n in numbers if n in (signal.SIGINT, signal.SIGTERM)):
                is_first = self._signals == 0
                self._signals += 1
                self._is_terminated = self._is_terminated or number == signal.SIGTERM
                if is_first and self._points_run and number == signal.SIGINT:
                    continue  # let the points in flight finish
                self._stop_signals += 1
                patience_s = _CLOSE_AGAIN_S if self._raised else _NOTICE_S
                if self._stop_signals == 1:
                    patience_s = max([patience_s, *self._holds_s])
                self._deadline_s = min(self._deadline_s, time.monotonic() + patience_s)

    def _watch(self) -> None:
        """Count signals, and end the process if the main thread is too late."""
        has_told = False
        while not self._is_over.is_set():
            select.select([self._reader], [], [], _TICK_S)
            self._count_signals()
            if self.stopping and not self._stop_signals and not has_told:
                has_told = True
                again = "an interrupt" if self._is_guest else "Ctrl-C"
                points = "the point" if self.in_flight < 2 else f"the {self.in_flight} points"
                text = f"finishing {points} in flight, then stopping; {again} again stops now"
                self._listener.tell(text)
            if time.monotonic() > self._deadline_s and not self._is_guest:
                # A spinner or a progress bar has hidden the cursor.
                self._listener.show_cursor()
                self.say_farewell()
                os._exit(_INTERRUPTED)
