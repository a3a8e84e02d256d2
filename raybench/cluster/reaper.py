"""Nothing that raybench started outlives it: watchers end what a dead process leaves behind.

Ray ends its workers when the driver or their raylet is gone, but not all that they started: what
is no direct child stays, and when a worker is killed as well as its raylet, everything does. A
worker that hangs outlives its raylet, and two agents of a private Ray outlive the driver by a
minute.

A watcher is a small Python that sleeps until the process that it watches has ended. It then kills
all whose first environment bears the mark, for a worker also its process group, and the
descendants of these. Ray's agents write their titles over their environment: those that a driver
has started it is told by their numbers. What it does not find is another process that was
started with another environment, has left the group and has lost its parent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# The variable that bears the mark: another value for each watcher.
MARK = "RAYBENCH_MARK"
# Bears the mark of a driver, also in workers, which have marks of their own.
_DRIVERS_MARK = "RAYBENCH_DRIVERS_MARK"
# A file by which a folder says that it is to stay.
KEPT = "kept"
# Ray's processes end by themselves, and a worker writes its last lines to the log.
_GRACE_S = 5.0
_LOOK_S = 0.25
# A process that is being started while the others are killed is found in the next round.
_ROUNDS = 100
_PAUSE_S = 0.05


def new_mark() -> str:
    """Return a value for MARK that no other process has."""
    return os.urandom(16).hex()


def reap_orphans_of_worker() -> None:
    """End what this worker leaves behind at once, and the worker soon after its raylet.

    It must have been started with MARK in its environment: what it forks then has it too, where
    the system shows it.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    _start_watcher("worker", os.environ[MARK])


@contextmanager
def reap_orphans_of_children(folder: str | os.PathLike[str] = "") -> Iterator[None]:
    """Let what is started in this block end soon after this process.

    folder: theirs. It is removed then, unless there is a file KEPT in it.
    """
    mark = new_mark()
    before = {name: os.environ.get(name) for name in (MARK, _DRIVERS_MARK)}
    told, tell = os.pipe()
    _start_watcher("children", mark, told, os.fspath(folder))
    os.close(told)
    os.environ |= dict.fromkeys(before, mark)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
        _tell_children(tell)


def _tell_children(tell: int) -> None:
    """Write which processes this one has started, and what these have, to its watcher."""
    numbers = _with_descendants({os.getpid()}, _parents()) - {os.getpid()}
    # Where there is no watcher nobody reads, which shows when the file is closed.
    with suppress(BrokenPipeError), open(tell, "w", encoding="ascii") as file:
        file.write(" ".join(map(str, numbers)))


def _start_watcher(kind: str, mark: str, told: int | None = None, folder: str = "") -> None:
    """Not before Linux 5.3, which has no pidfd. told: where it reads of processes."""
    # Not at the top: the watcher has no use for it.
    import subprocess

    if not hasattr(os, "pidfd_open"):
        return
    command = [sys.executable, "-I", "-S", __file__, kind, str(os.getpid()), mark, folder]
    # In a session of its own, and without the mark: it must not find itself. Where it cannot
    # start it says why on stderr, and points can be measured all the same.
    null = subprocess.DEVNULL
    stdin = null if told is None else told
    subprocess.run(command, env={}, cwd="/", start_new_session=True, stdin=stdin, stdout=null)


def _watch(kind: str, process: int, mark: str, folder: str) -> None:
    """Return when the process and all that it left behind are gone."""
    is_worker = kind == "worker"
    watched = [process, _parents()[process]] if is_worker else [process]
    handles = [os.pidfd_open(number) for number in watched]
    # A child of a worker would be taken for one of the workload's, and Ray kills those.
    if os.fork():
        return
    os.dup2(1, 2)
    # Until the driver has said all, or has ended.
    children = {(number, _began(number)) for number in map(int, sys.stdin.read().split())}
    ended, _, _ = select.select(handles, [], [])
    if is_worker and handles[0] not in ended:
        _end(handles[0])
    elif not is_worker:
        children |= _seen_to_end(mark, children)
    for _ in range(_ROUNDS):
        left = _find_orphans(mark, process if is_worker else None) | _living(children)
        if not left:
            break
        for number in left:
            _kill(number)
        time.sleep(_PAUSE_S)
    if folder and not os.path.exists(f"{folder}/{KEPT}"):  # noqa: PTH110
        _remove(folder)


def _seen_to_end(mark: str, children: set[tuple[int, str | None]]) -> set[tuple[int, str | None]]:
    """Find what these and those with the mark start until the grace is over; how each began.

    A worker that Ray is starting has no watcher yet, and writes a title over its environment.
    """
    found = set(children)
    for _ in range(round(_GRACE_S / _LOOK_S)):
        living = _find_orphans(mark, None) | _living(found)
        found |= {(number, _began(number)) for number in _with_descendants(living, _parents())}
        time.sleep(_LOOK_S)
    return found


def _living(known: set[tuple[int, str | None]]) -> set[int]:
    return {number for number, began in known if began and _began(number) == began}


def _remove(folder: str) -> None:
    # Not at the top: it would be half of a watcher's memory.
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _end(handle: int) -> None:
    """Kill a worker that does not end by itself."""
    if not select.select([handle], [], [], _GRACE_S)[0]:
        signal.pidfd_send_signal(handle, signal.SIGKILL)


def _find_orphans(mark: str, group: int | None) -> set[int]:
    """Living processes that bear the mark or are of the group, and their descendants."""
    parents = _parents()
    found = {p for p in parents if _is_marked(p, mark) or (group and _group(p) == group)}
    return _with_descendants(found, parents)


def _with_descendants(found: set[int], parents: dict[int, int]) -> set[int]:
    while children := {p for p, parent in parents.items() if parent in found} - found:
        found = found | children
    return found


def _parents() -> dict[int, int]:
    """Process -> its parent, of all that live."""
    with os.scandir("/proc") as entries:
        numbers = [int(entry.name) for entry in entries if entry.name.isdecimal()]
    facts = ((number, _stat(number)) for number in numbers)
    return {number: int(stat[1]) for number, stat in facts if stat and stat[0] not in "ZX"}


def _group(process: int) -> int | None:
    stat = _stat(process)
    return int(stat[2]) if stat else None


def _began(process: int) -> str | None:
    """When a living process began, which tells it from a later one of the same number."""
    stat = _stat(process)
    return stat[19] if stat and stat[0] not in "ZX" else None


def _stat(process: int) -> list[str]:
    """State, parent, process group, ...; empty for a process that is gone."""
    # Behind the name of the program, which may hold spaces and parentheses.
    return _read(process, "stat").decode(errors="replace").rpartition(")")[2].split()


def _is_marked(process: int, mark: str) -> bool:
    marks = {f"{name}={mark}".encode() for name in (MARK, _DRIVERS_MARK)}
    return not marks.isdisjoint(_read(process, "environ").split(b"\0"))


def _read(process: int, name: str) -> bytes:
    """Nothing of a process that is gone, or another user's."""
    try:
        # pathlib would be half of a watcher's memory.
        with open(f"/proc/{process}/{name}", "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return  # it is gone


if __name__ == "__main__":
    _watch(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
