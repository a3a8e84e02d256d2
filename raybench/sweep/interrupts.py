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
# Time limit for the main thread to raise KeyboardInterrupt. Ray looks for signals once a second.
_RAISE_LIMIT_S = 1.5
# Time limit for the main thread to leave the `with` block after KeyboardInterrupt, and after one
# more signal.
_CLEANUP_LIMIT_S = 15.0
_CLEANUP_AGAIN_LIMIT_S = 1.0
_INTERRUPTED = 130


class Interrupts:
    """Context manager of the main thread that handles SIGINT and SIGTERM.

    While points run, the first Ctrl-C only sets `stopping`. Any other signal raises
    KeyboardInterrupt in the main thread, once. If the main thread then hangs, or another signal
    comes, a watcher thread ends the process with exit code 130.

    Args:
        is_guest: the process belongs to the caller, so no signal ends the process: each signal
            raises KeyboardInterrupt, and SIGTERM is raised again after the `with` block. Outside of
            the main thread nothing is handled.
    """

    def __init__(self, listener: Listener, *, is_guest: bool = False) -> None:
        # Number of points that run, for the message.
        self.in_flight = 0
        # Gets how the run ended, such as "stopped", and tells the user how to resume it. May be
        # called in any thread. None before a run has begun.
        self.farewell: Callable[[str], None] | None = None
        self._listener = listener
        self._points_run = False
        self._signals = 0
        # Number of signals that raise: all but a first Ctrl-C while points run.
        self._stop_signals = 0
        # Value of `_stop_signals` when KeyboardInterrupt was last raised; 0 before.
        self._signals_at_raise = 0
        self._is_guest = is_guest
        self._handles_signals = True
        self._got_sigterm = False
        # The `most_s` of each active `held_back`.
        self._holds_s: list[float] = []
        # Monotonic time at which the watcher ends the process.
        self._deadline_s = math.inf
        # Reentrant, because one signal handler may interrupt another in the same thread.
        self._lock = threading.RLock()
        self._is_over = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether a signal came; no further point may then start."""
        return self._signals > 0

    def __enter__(self) -> Self:
        """Take over the signals, and start the watcher."""
        if self._is_guest and threading.current_thread() is not threading.main_thread():
            # Python handles signals only in the main thread, which belongs to the caller.
            self._handles_signals = False
            return self
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._old_handlers = [(number, signal.getsignal(number)) for number in numbers]
        # Python writes the number of each signal into this socket, even if no handler can run yet.
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.take_signals()
        self._watcher = threading.Thread(target=self._watch, name="interrupts", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the watcher, and give the signals back."""
        if not self._handles_signals:
            return
        self._is_over.set()
        self._watcher.join()
        signal.set_wakeup_fd(self._old_wakeup_fd)
        for number, old_handler in self._old_handlers:
            signal.signal(number, old_handler)
        self._reader.close()
        self._writer.close()
        if self._is_guest and self._got_sigterm:
            # The run is written, so pass the signal on to the handler of the caller.
            signal.raise_signal(signal.SIGTERM)
        elif self._signals_at_raise and not self._is_guest:
            # The run is written, so a further Ctrl-C may end the process without a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def take_signals(self) -> None:
        """Install the signal handlers; needed again after `ray.init`, which replaces them."""
        if not self._handles_signals:
            return
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    @contextmanager
    def points_run(self) -> Iterator[None]:
        """Mark that points run, so that the first Ctrl-C waits for the points in flight."""
        self._points_run = True
        try:
            yield
        finally:
            self._points_run = False

    @contextmanager
    def held_back(self, most_s: float = _RAISE_LIMIT_S) -> Iterator[None]:
        """Delay KeyboardInterrupt to the end of the block, or to a second signal.

        Args:
            most_s: time limit of the block after the first signal; the process is then ended. With
                inf there is no limit, and a second signal ends the process.
        """
        self._holds_s.append(most_s)
        try:
            yield
        finally:
            self._holds_s.pop()
            self._raise_if_due()

    def say_farewell(self) -> None:
        """Tell the user how to resume the run, by `farewell`; without a run say "interrupted"."""
        if self.farewell:
            self.farewell("ended at once")
        else:
            self._listener.tell("interrupted")

    def end(self, reason: str) -> None:
        """Tell the user why, and end the process with exit code 3, without `finally` blocks.

        For threads: the main thread may wait for a cluster that is gone.
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
        """Raise KeyboardInterrupt for a new signal, unless a `held_back` block delays it."""
        # A second signal ends a hold, unless the hold has no time limit.
        is_held = bool(self._holds_s) and (self._stop_signals < 2 or math.inf in self._holds_s)
        has_new_signal = self._stop_signals > self._signals_at_raise
        # A second KeyboardInterrupt is only for guests; otherwise the watcher ends the process.
        may_raise = self._is_guest or not self._signals_at_raise
        if has_new_signal and may_raise and not is_held:
            self._signals_at_raise = self._stop_signals
            self._deadline_s = time.monotonic() + _CLEANUP_LIMIT_S
            raise KeyboardInterrupt

    def _count_signals(self) -> None:
        """Count new signals; the watcher does so too, because Python may call handlers late."""
        with self._lock:
            try:
                # Python has written a byte with the number of each signal.
                numbers = self._reader.recv(64)
            except BlockingIOError:
                return
            for number in numbers:
                if number not in (signal.SIGINT, signal.SIGTERM):
                    continue
                is_first = self._signals == 0
                self._signals += 1
                if number == signal.SIGTERM:
                    self._got_sigterm = True
                if is_first and self._points_run and number == signal.SIGINT:
                    continue  # the points in flight may finish
                self._stop_signals += 1
                limit_s = _CLEANUP_AGAIN_LIMIT_S if self._signals_at_raise else _RAISE_LIMIT_S
                if self._stop_signals == 1:
                    # `held_back` blocks may take their time after the first signal.
                    limit_s = max([limit_s, *self._holds_s])
                self._deadline_s = min(self._deadline_s, time.monotonic() + limit_s)

    def _watch(self) -> None:
        """Tell the user that the sweep is stopping, and end a process that hangs."""
        has_told = False
        while not self._is_over.is_set():
            select.select([self._reader], [], [], _TICK_S)
            self._count_signals()
            is_finishing = self.stopping and not self._stop_signals
            if is_finishing and not has_told:
                has_told = True
                again = "an interrupt" if self._is_guest else "Ctrl-C"
                points = "the point" if self.in_flight < 2 else f"the {self.in_flight} points"
                text = f"finishing {points} in flight, then stopping; {again} again stops now"
                self._listener.tell(text)
            if time.monotonic() > self._deadline_s and not self._is_guest:
                self._listener.show_cursor()
                self.say_farewell()
                os._exit(_INTERRUPTED)
