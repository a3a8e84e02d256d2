"""Watchers that kill the processes which a dead driver or worker leaves behind (orphans).

Ray 2.60 does not end processes that have left the process group of a dead worker, such as daemons.
A worker that hangs outlives its raylet, and two agents of a private Ray outlive the driver by a
minute.

A watcher is a small Python process that sleeps until the process that it watches, or the raylet of
a worker, has ended. It then kills all processes that were started with its mark in their
environment, for a worker also its process group, and all descendants. Ray's agents overwrite their
environment with their titles, so a driver sends the ids of the agents that it has started.
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

# The variable with the mark; each watcher has its own value.
MARK = "RAYBENCH_MARK"
# The variable with the mark of the driver. Workers have it in addition to their own mark.
_DRIVERS_MARK = "RAYBENCH_DRIVERS_MARK"
# The watcher does not remove a folder that has a file of this name.
KEPT = "kept"
# Ray's processes need time to end by themselves, and a worker to write its last lines to the log.
_GRACE_S = 5.0
# How long the watcher tries to kill: a process that waits for a device cannot be killed.
_LIMIT_S = 15.0
_POLL_S = 0.2


def new_mark() -> str:
    """Return a value for MARK that no other process has."""
    return os.urandom(16).hex()


def reap_orphans_of_worker() -> None:
    """Start a watcher that kills the orphans of this worker.

    The watcher also kills the worker 5 s after its raylet has ended. Call it once, in a child of
    the raylet whose variable MARK is a `new_mark`. The worker becomes a group leader. Before Linux
    5.3 there is no watcher.
    """
    # The watcher kills the processes of the worker's group, so the worker needs its own group.
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    _start_watcher(os.environ[MARK], raylet=os.getppid())


@contextmanager
def reap_orphans_of_children(folder: str | os.PathLike[str] = "") -> Iterator[None]:
    """Let a watcher kill the processes started in the `with` block 5 s after this process ends.

    A child that was forked in the block without exec must end in the block. Before Linux 5.3 there
    is no watcher.

    Args:
        folder: absolute path of a folder that the watcher removes at last, unless the folder has a
            file KEPT; "" for none.
    """
    # Import here, because the watcher runs this file and must stay small.
    import psutil

    from raybench.records.environment import set_variables

    mark = new_mark()
    read_end, write_end = os.pipe()
    _start_watcher(mark, ids=read_end, folder=os.fspath(folder))
    os.close(read_end)
    try:
        # Children inherit both variables. Workers get a MARK of their own, and keep the other.
        with set_variables({MARK: mark, _DRIVERS_MARK: mark}):
            yield
    finally:
        # Tell the watcher the ids: Ray's agents overwrite their environment, and so the mark.
        started = psutil.Process().children(recursive=True)
        # Without a watcher nobody reads the pipe, so closing the file raises BrokenPipeError.
        with suppress(BrokenPipeError), os.fdopen(write_end, "w", encoding="ascii") as file:
            file.write(" ".join(str(process.pid) for process in started))


def _start_watcher(mark: str, *, raylet: int = 0, ids: int | None = None, folder: str = "") -> None:
    """Start a watcher of this process; do nothing before Linux 5.3, which has no pidfd.

    Args:
        mark: value of MARK in the environment of the processes to kill.
        raylet: process id of the raylet of a worker; 0 for a driver.
        ids: descriptor of a pipe with the ids of more processes to kill.
        folder: folder that the watcher removes at last; "" for none.
    """
    # Import here, because the watcher runs this file and must stay small.
    import subprocess

    import psutil

    if not hasattr(os, "pidfd_open"):
        return
    # With -I and -S, Python starts fast, but does not find psutil by itself.
    packages = os.path.dirname(os.path.dirname(psutil.__file__))  # noqa: PTH120
    arguments = [str(os.getpid()), str(raylet), mark, packages, folder]
    command = [sys.executable, "-I", "-S", __file__, *arguments]
    # Give an empty environment: with the mark, the watcher would kill itself. A watcher that cannot
    # start writes the reason to stderr, and points can be measured without a watcher.
    null = subprocess.DEVNULL
    stdin = null if ids is None else ids
    subprocess.run(command, env={}, cwd="/", start_new_session=True, stdin=stdin, stdout=null)


def _watch(process: int, raylet: int, mark: str, packages: str, folder: str) -> None:
    """Wait for the end of the process or of its raylet, then kill the orphans.

    Args:
        process, raylet: process ids; a raylet of 0 says that the process is a driver.
        mark: an environment variable that orphans have.
        packages: folder that has psutil.
        folder: is deleted at the end, unless it has the file KEPT; "" for none.
    """
    watched = [os.pidfd_open(number) for number in (process, raylet) if number]
    # Fork, so that the watcher is no child of the worker: Ray kills the children of a worker.
    if os.fork():
        return
    # Release the worker's stderr, because a reader may wait until every process has closed it.
    os.dup2(1, 2)
    sys.path.append(packages)
    # Reading ends when the driver has sent all ids, or has ended.
    sent_ids = set(map(int, sys.stdin.read().split()))
    orphans = set()
    if sent_ids:
        orphans = {process for process in _living_processes() if process.pid in sent_ids}

    # Sleep until the process or the raylet ends.
    ended, _, _ = select.select(watched, [], [])
    group = process if raylet else None
    # Ray's processes need time to end by themselves, but not after the death of a worker alone.
    has_worker_ended = bool(raylet) and watched[0] in ended
    kill_s = time.monotonic() + (0.0 if has_worker_ended else _GRACE_S)
    # Search already during the grace time: a process whose parent has ended is not found later.
    while (orphans := _find_orphans(orphans, mark, group)) or time.monotonic() < kill_s:
        if time.monotonic() >= kill_s:
            for orphan in orphans:
                with suppress(OSError):
                    os.kill(orphan.pid, signal.SIGKILL)
        if time.monotonic() > kill_s + _LIMIT_S:
            break
        time.sleep(_POLL_S)
    if folder and not os.path.exists(f"{folder}/{KEPT}"):  # noqa: PTH110
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _find_orphans(known: set[psutil.Process], mark: str, group: int | None) -> set[psutil.Process]:
    """Return the living processes to kill: known, marked or group members, and descendants.

    Args:
        known: orphans that were found before.
        group: process group of a worker; None for a driver.
    """
    living = _living_processes()
    orphans = set()
    for process in living:
        variables = process.info["environ"] or {}
        is_orphan = process in known or mark in (variables.get(MARK), variables.get(_DRIVERS_MARK))
        if group is not None:
            with suppress(ProcessLookupError):
                is_orphan |= os.getpgid(process.pid) == group
        if is_orphan:
            orphans.add(process)
    # Add the descendants, one generation at a time.
    while True:
        parents = {orphan.pid for orphan in orphans}
        children = {process for process in living if process.info["ppid"] in parents} - orphans
        if not children:
            return orphans
        orphans |= children


def _living_processes() -> list[psutil.Process]:
    """Return the living processes; their `info` has parent id, status and environment."""
    # Import late: psutil would be half of the memory of a watcher that sleeps.
    import psutil

    ended_states = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    processes = psutil.process_iter(["ppid", "status", "environ"])
    return [process for process in processes if process.info["status"] not in ended_states]


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
