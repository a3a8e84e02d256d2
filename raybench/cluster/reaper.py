"""Watchers that end the processes which a dead driver or worker leaves behind.

Ray 2.60 ends the process group of a dead worker, but not what has left it (sessions, daemons), and
it does not notice the death while a forked child holds the worker's sockets. A worker that hangs
outlives its raylet, and two agents of a private Ray outlive the driver by a minute.

A watcher is a small Python process that sleeps until the process that it watches, or a worker's
raylet, has ended. It then kills all processes whose first environment has the mark, for a worker
also its process group, and their descendants. Ray's agents write their titles over their
environment: a driver sends the ids of those that it has started. Not found is a process that was
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

# The variable with the mark, which has another value for each watcher.
MARK = "RAYBENCH_MARK"
# The mark of the driver, also in workers, which have marks of their own.
_DRIVERS_MARK = "RAYBENCH_DRIVERS_MARK"
# A folder in which there is such a file is not removed.
KEPT = "kept"
# Ray's processes end by themselves, and a worker writes its last lines to the log.
_GRACE_S = 5.0
# A process that cannot be killed, because it waits for a device, is left.
_LIMIT_S = 15.0
_LOOK_S = 0.2


def new_mark() -> str:
    """Return a value for MARK that no other process has."""
    return os.urandom(16).hex()


def reap_orphans_of_worker() -> None:
    """Start a watcher that kills what this worker leaves behind when it ends.

    It also kills the worker 5 s after its raylet has ended. Before Linux 5.3 there is no watcher.
    Call it once, in a child of the raylet that was started with MARK, else KeyError. It must be a
    `new_mark`: all processes that have it are killed. The worker becomes a group leader.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    _start_watcher(os.environ[MARK], raylet=os.getppid())


@contextmanager
def reap_orphans_of_children(folder: str | os.PathLike[str] = "") -> Iterator[None]:
    """Return a context; a watcher kills the processes started in it 5 s after this process ends.

    Also all children that this process has when the context ends. The watcher waits for the end of
    a child that was forked in the context without exec. folder: absolute, "" for none; it is then
    removed, unless it has a file KEPT. Before Linux 5.3 there is no watcher.
    """
    # Not at the top: the watcher runs this file alone.
    import psutil

    from raybench.records.environment import set_variables

    mark = new_mark()
    ids, send_ids = os.pipe()
    _start_watcher(mark, ids=ids, folder=os.fspath(folder))
    os.close(ids)
    try:
        with set_variables(dict.fromkeys((MARK, _DRIVERS_MARK), mark)):
            yield
    finally:
        started = psutil.Process().children(recursive=True)
        # Where there is no watcher nobody reads, which shows when the file is closed.
        with suppress(BrokenPipeError), os.fdopen(send_ids, "w", encoding="ascii") as file:
            file.write(" ".join(str(process.pid) for process in started))


def _start_watcher(mark: str, *, raylet: int = 0, ids: int | None = None, folder: str = "") -> None:
    """Start a process that kills what this process leaves behind when it ends.

    Does nothing before Linux 5.3, which has no pidfd. mark: value of MARK in the environment of the
    processes to kill. raylet: process id of a worker's raylet, 0 for a driver. ids: descriptor of a
    pipe with the ids of more processes to kill. folder: theirs; removed unless it has a file KEPT.
    """
    # Not at the top: the watcher has no use for it.
    import subprocess

    import psutil

    if not hasattr(os, "pidfd_open"):
        return
    packages = os.path.dirname(os.path.dirname(psutil.__file__))  # noqa: PTH120
    words = [str(os.getpid()), str(raylet), mark, packages, folder]
    command = [sys.executable, "-I", "-S", __file__, *words]
    # In a session of its own, and without the mark: it must not find itself. Where it cannot
    # start it writes why to stderr, and points can be measured all the same.
    null = subprocess.DEVNULL
    stdin = null if ids is None else ids
    subprocess.run(command, env={}, cwd="/", start_new_session=True, stdin=stdin, stdout=null)


def _watch(process: int, raylet: int, mark: str, packages: str, folder: str) -> None:
    """Wait until the process has ended, and kill what it left behind. raylet: 0 for a driver."""
    watched = [os.pidfd_open(one) for one in (process, raylet) if one]
    # A child of a worker would be taken for one of the workload's, and Ray kills those.
    if os.fork():
        return
    os.dup2(1, 2)
    sys.path.append(packages)
    # Until the driver has sent all, or has ended.
    ids = set(map(int, sys.stdin.read().split()))
    known = {one for one in _living() if one.pid in ids} if ids else set()
    ended, _, _ = select.select(watched, [], [])
    group = process if raylet else None
    kill_s = time.monotonic() + (0.0 if raylet and watched[0] in ended else _GRACE_S)
    # Looks from the start: a process of Ray may lose its parent before its id was sent.
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
    """Return the living processes that are known, marked or of the group, with descendants."""
    living, found = _living(), set()
    for one in living:
        marks = one.info["environ"] or {}
        is_ours = one in known or mark in (marks.get(MARK), marks.get(_DRIVERS_MARK))
        with suppress(ProcessLookupError):
            if is_ours or (group is not None and os.getpgid(one.pid) == group):
                found.add(one)
    while children := {one for one in living if one.info["ppid"] in {f.pid for f in found}} - found:
        found |= children
    return found


def _living() -> list[psutil.Process]:
    """Return all living processes of this host; `info` has their ppid, status and environ."""
    # Not at the top: it would be half of the memory of a watcher that sleeps.
    import psutil

    gone = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    facts = ["ppid", "status", "environ"]
    return [one for one in psutil.process_iter(facts) if one.info["status"] not in gone]


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
