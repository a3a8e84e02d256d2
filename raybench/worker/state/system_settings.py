"""What the operating system keeps for a process, and a workload can change.

Most of it can only be made worse without privileges: what does not come back costs the process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from raybench.worker.state.setting import Setting

_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_IOPRIO_WHO_PROCESS = 1
# The numbers of ioprio_set and ioprio_get; glibc has no functions for them.
_IOPRIO_CALLS = {"x86_64": (251, 252), "aarch64": (30, 31)}
_LIMITS = sorted(number for name, number in vars(resource).items() if name.startswith("RLIMIT_"))
_libc: Any = ctypes.CDLL(None, use_errno=True)


def system_settings() -> Iterator[Setting]:
    """Those that can be read on this machine."""
    yield Setting("niceness", lambda: os.getpriority(os.PRIO_PROCESS, 0), _set_niceness)
    yield Setting("CPU affinity", lambda: os.sched_getaffinity(0), _set_affinity)
    yield Setting("scheduling policy", _policies, _set_policy)
    yield Setting("timer slack", _timer_slack_ns, _set_timer_slack)
    yield Setting("resource limits", _limits, _set_limits)
    yield Setting("umask", _umask, os.umask)
    if platform.machine() in _IOPRIO_CALLS:
        yield Setting("I/O priority", _io_priority, _set_io_priority)


def _set_niceness(before: int) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, before)


def _set_affinity(before: set[int]) -> None:
    """Also of the threads that were started meanwhile: they have it from this one."""
    narrowed = os.sched_getaffinity(0)

    def widen(thread: int) -> None:
        if os.sched_getaffinity(thread) == narrowed:
            os.sched_setaffinity(thread, before)

    _for_each_thread(widen)


def _policies() -> set[tuple[int, int]]:
    """Of all threads: those that were started meanwhile have it from the one that started them."""
    found: set[tuple[int, int]] = set()
    _for_each_thread(lambda thread: found.add(_policy(thread)))
    return found


def _policy(thread: int) -> tuple[int, int]:
    return os.sched_getscheduler(thread), os.sched_getparam(thread).sched_priority


def _set_policy(before: set[tuple[int, int]]) -> None:
    # Where threads differed before, nobody knows which had which: that stays a change.
    if len(before) != 1:
        return
    ((policy, priority),) = before
    _for_each_thread(lambda thread: os.sched_setscheduler(thread, policy, os.sched_param(priority)))


def _for_each_thread(do: Callable[[int], object]) -> None:
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - called at each point
        with suppress(ProcessLookupError):  # it may have ended
            do(int(thread))


def _timer_slack_ns() -> int:
    return int(_libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0))


def _set_timer_slack(before: int) -> None:
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(before), 0, 0, 0)


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(limit) for limit in _LIMITS]


def _set_limits(before: list[tuple[int, int]]) -> None:
    for limit, bounds in zip(_LIMITS, before, strict=True):
        if resource.getrlimit(limit) != bounds:
            resource.setrlimit(limit, bounds)


def _umask() -> int:
    """Not by setting it, as `os.umask` does: another thread may make a file meanwhile."""
    for line in Path("/proc/self/status").read_bytes().splitlines():
        if line.startswith(b"Umask:"):
            return int(line.split()[1], 8)
    raise AttributeError("this kernel does not tell the umask")


def _io_priority() -> int:
    return int(_libc.syscall(_IOPRIO_CALLS[platform.machine()][1], _IOPRIO_WHO_PROCESS, 0))


def _set_io_priority(before: int) -> None:
    _libc.syscall(_IOPRIO_CALLS[platform.machine()][0], _IOPRIO_WHO_PROCESS, 0, before)
