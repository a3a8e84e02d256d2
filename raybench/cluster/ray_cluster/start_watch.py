"""Ends this process where a program of Ray dies that this process waits for inside of Ray.

Ray holds Python's lock while it waits for the port of its head and while it connects to it, so
that no thread of this process runs: half a minute, or a minute, after which Ray ends this process
with an exit code of its own. So another process looks: a small Python, which is told to stop by
the end of its stdin. It says what has died, and sends a signal whose handler is the C library's
`_exit`, which needs no lock of Python's. A handler gets the number of its signal, and so that is
the exit code.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LOOK_S = 0.2
# Its number is the exit code of a cluster that is lost.
_END = signal.SIGQUIT
# Programs of Ray that a driver starts, and cannot do without.
_RAYLET = "its raylet"
_PROGRAMS = {"gcs_server": "its head", "raylet": _RAYLET}
# Those of a raylet, which ends 10 to 20 s after one of them, and ends them when it ends.
_AGENT = "its raylet, or an agent of that,"
_AGENTS = ("/agent.py", "/agent/main.py", "Agent")
_WORDS = 4
# Where /proc/PID/stat, behind the name, has the state, and how a process ended.
_STATE, _ENDED = 0, 49
# A terminal may show a spinner, and no cursor.
_CLEAN = b"\r\x1b[2K\x1b[?25h"


class StartedPrograms:
    """The programs of a private Ray that a driver has started so far."""

    def __init__(self, driver: int) -> None:
        self._driver = driver
        self._processes: dict[int, str] = {}

    def gone(self) -> str:
        """Which of them has ended, and how; empty while all live."""
        for process in _children(self._driver) - self._processes.keys():
            # Also of one that has ended already, whose command line is gone.
            name = _read(f"/proc/{process}/comm").strip()
            if name in _PROGRAMS:
                self._processes[process] = _PROGRAMS[name]
        for raylet in [number for number, name in self._processes.items() if name == _RAYLET]:
            new = _children(raylet) - self._processes.keys()
            self._processes |= dict.fromkeys(filter(_is_agent, new), _AGENT)
        endings = ((name, _ending(process)) for process, name in self._processes.items())
        return next((f"{name} {ending}" for name, ending in endings if ending), "")


@contextmanager
def watch_programs(before: str, after: str, *, made: str, removed: str) -> Iterator[None]:
    """While this is entered, the death of a program of Ray ends this process with exit code 3.

    before, after: what is said on stderr around what has died. made, removed: a file that is there
    then, and one that is gone.
    """
    # Not at the top, as ctypes: the watching process has no use for them.
    import subprocess

    words = [str(os.getpid()), before, after, made, removed]
    command = [sys.executable, "-I", "-S", __file__, *words]
    # In a session of its own: an interrupt of the terminal is not meant for it.
    with (
        _end_by_signal(),
        subprocess.Popen(command, env={}, start_new_session=True, stdin=subprocess.PIPE),
    ):
        yield


@contextmanager
def _end_by_signal() -> Iterator[None]:
    """Let _END end this process with its number as exit code, whatever it does."""
    import ctypes

    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    usual = library.signal(_END, ctypes.cast(library._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        library.signal(_END, usual)


def _watch(driver: int, before: str, after: str, made: str, removed: str) -> None:
    programs = StartedPrograms(driver)
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        if gone := programs.gone():
            with suppress(OSError):
                os.close(os.open(made, os.O_WRONLY | os.O_CREAT, 0o600))
                os.unlink(removed)  # noqa: PTH108
            with suppress(OSError):  # stderr may be full, or closed
                os.write(2, _CLEAN * os.isatty(2) + f"{before}{gone}{after}\n".encode())
            if os.getppid() == driver:
                os.kill(driver, _END)
            return


def _children(process: int) -> set[int]:
    """None where the kernel does not tell them."""
    try:
        threads = os.listdir(f"/proc/{process}/task")  # noqa: PTH208
    except OSError:
        return set()
    lists = (_read(f"/proc/{process}/task/{thread}/children") for thread in threads)
    return {int(child) for children in lists for child in children.split()}


def _is_agent(process: int) -> bool:
    """By its command line, and by the title that it gives itself."""
    words = _read(f"/proc/{process}/cmdline").replace("\0", " ").split()[:_WORDS]
    return any(word.endswith(_AGENTS) for word in words)


def _ending(process: int) -> str:
    """How a process has ended; empty for one that lives."""
    stat = _read(f"/proc/{process}/stat").rpartition(")")[2].split()
    if not stat:
        return "has ended"
    if stat[_STATE] not in "ZX":
        return ""
    status = int(stat[_ENDED])
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"has ended with exit code {os.waitstatus_to_exitcode(status)}"


def _read(path: str) -> str:
    """Nothing of a process that is gone."""
    try:
        # pathlib would be half of this process's memory.
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    _watch(int(sys.argv[1]), *sys.argv[2:])
