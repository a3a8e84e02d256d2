"""Nothing that raybench started outlives it: watchers end what a dead process leaves behind.

Ray 2.60 ends the process group of a dead worker, but not what has left it (sessions, daemons), and
it does not notice the death while a forked child holds the worker's sockets. A worker that hangs
outlives its raylet, and two agents of a private Ray outlive the driver by a minute.

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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

# The variable that bears the mark: another value for each watcher.
MARK = "RAYBENCH_MARK"
# Bears the mark of a driver, also in workers, which have marks of their own.
_DRIVERS_MARK = "RAYBENCH_DRIVERS_MARK"
# A file by which a folder says that it is to stay.
KEPT = "kept"
# Ray's processes end by themselves, and a worker writes its last lines to the log.
_GRACE_S = 5.0
# What cannot be killed, as it waits for a device, is left.
_LIMIT_S = 15.0
_LOOK_S = 0.2


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
    _start_watcher(os.environ[MARK], raylet=os.getppid())


@contextmanager
def reap_orphans_of_children(folder: str | os.PathLike[str] = "") -> Iterator[None]:
    """Let what is started in this block end soon after this process.

    folder: theirs. It is removed then, unless there is a file KEPT in it.
    """
    import psutil

    mark = new_mark()
    before = {name: os.environ.get(name) for name in (MARK, _DRIVERS_MARK)}
    told, tell = os.pipe()
    _start_watcher(mark, told=told, folder=os.fspath(folder))
    os.close(told)
    os.environ |= dict.fromkeys(before, mark)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
        started = psutil.Process().children(recursive=True)
        # Where there is no watcher nobody reads, which shows when the file is closed.
        with suppress(BrokenPipeError), os.fdopen(tell, "w", encoding="ascii") as file:
            file.write(" ".join(str(process.pid) for process in started))


def _start_watcher(
    mark: str, *, raylet: int = 0, told: int | None = None, folder: str = ""
) -> None:
    """Not before Linux 5.3, which has no pidfd. told: where it reads of processes."""
    # Not at the top: the watcher has no use for it.
    import subprocess

    import psutil

    if not hasattr(os, "pidfd_open"):
        return
    packages = os.path.dirname(os.path.dirname(psutil.__file__))  # noqa: PTH120
    words = [str(os.getpid()), str(raylet), mark, packages, folder]
    command = [sys.executable, "-I", "-S", __file__, *words]
    # In a session of its own, and without the mark: it must not find itself. Where it cannot
    # start it says why on stderr, and points can be measured all the same.
    null = subprocess.DEVNULL
    stdin = null if told is None else told
    subprocess.run(command, env={}, cwd="/", start_new_session=True, stdin=stdin, stdout=null)


def _watch(process: int, raylet: int, mark: str, packages: str, folder: str) -> None:
    """Return when the process and all that it left behind are gone. raylet: a worker's, else 0."""
    watched = [os.pidfd_open(one) for one in (process, raylet) if one]
    # A child of a worker would be taken for one of the workload's, and Ray kills those.
    if os.fork():
        return
    os.dup2(1, 2)
    sys.path.append(packages)
    # Until the driver has said all, or has ended.
    told = set(map(int, sys.stdin.read().split()))
    known = {one for one in _living() if one.pid in told} if told else set()
    ended, _, _ = select.select(watched, [], [])
    group = process if raylet else None
    kill_s = time.monotonic() + (0.0 if raylet and watched[0] in ended else _GRACE_S)
    # Looks from the start: what Ray is starting may lose its parent before it can be told.
    while (known := _find_orphans(known, mark, group)) or time.monotonic() < kill_s:
        if time.monotonic() >= kill_s:
            for one in known:
                with suppress(OSError):
                    os.kill(one.pid, signal.SIGKILL)
        if time.monotonic() > kill_s + _LIMIT_S:
            break
        time.sleep(_LOOK_S)
    if folder and not os.path.exists(f"{folder}/{KEPT}"):  # noqa: PTH110
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _find_orphans(known: set[psutil.Process], mark: str, group: int | None) -> set[psutil.Process]:
    """Living processes that are known, bear the mark or are of the group, and their descendants."""
    living = _living()
    found = {one for one in living if one in known or _belongs(one, mark, group)}
    while children := {one for one in living if one.info["ppid"] in {f.pid for f in found}} - found:
        found |= children
    return found


def _belongs(process: psutil.Process, mark: str, group: int | None) -> bool:
    marks = process.info["environ"] or {}
    if mark in (marks.get(MARK), marks.get(_DRIVERS_MARK)):
        return True
    with suppress(ProcessLookupError):
        return group is not None and os.getpgid(process.pid) == group
    return False


def _living() -> list[psutil.Process]:
    # Not at the top: it would be half of the memory of a watcher that sleeps.
    import psutil

    gone = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    facts = ["ppid", "status", "environ"]
    return [one for one in psutil.process_iter(facts) if one.info["status"] not in gone]


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
