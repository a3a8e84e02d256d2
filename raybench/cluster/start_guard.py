"""Ends this process where Ray dies and keeps it from noticing.

While Ray starts, this process waits inside of Ray, where nothing interrupts it: half a minute for a
raylet that has died, a minute for a head, after which Ray ends this process in its own words.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from raybench.cluster import proc
from raybench.errors import ClusterError

_LOOK_S = 0.2
# Programs of Ray that this process starts, and cannot do without.
_PROGRAMS = {"gcs_server": "its head", "raylet": "its raylet"}
# Where /proc/PID/stat, behind the name, has the state, and how a process ended.
_STATE, _ENDED = 0, 49


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


@dataclass(slots=True)
class StartedPrograms:
    """The programs of a private Ray that this process has started so far."""

    _processes: dict[int, str] = field(default_factory=dict)

    def gone(self) -> str:
        """Which of them has ended, and how; empty while all live."""
        for process in _children() - self._processes.keys():
            # Also of one that has ended already, whose command line is gone.
            if (program := proc.name(process)) in _PROGRAMS:
                self._processes[process] = _PROGRAMS[program]
        endings = ((name, _ending(process)) for process, name in self._processes.items())
        return next((f"{name} {ending}" for name, ending in endings if ending), "")


def _children() -> set[int]:
    """Those of the main thread; none where the kernel does not tell them."""
    here = os.getpid()
    try:
        return set(map(int, Path(f"/proc/{here}/task/{here}/children").read_text().split()))
    except OSError:
        return set()


def _ending(process: int) -> str:
    """How a child of this process has ended; empty for one that lives."""
    text = proc.read(process, "stat").decode(errors="replace")
    stat = text.rpartition(")")[2].split()
    if not stat:
        return "has ended"
    if stat[_STATE] not in "ZX":
        return ""
    status = int(stat[_ENDED])
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"has ended with exit code {os.waitstatus_to_exitcode(status)}"
