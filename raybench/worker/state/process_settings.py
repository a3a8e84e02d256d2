"""The settings of Python, its standard library, numpy and the system that a workload can change.

What the operating system keeps can mostly only be made worse without privileges: what does not come
back costs the process.
"""

from __future__ import annotations

import ctypes
import gc
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

# Not SIGCHLD: torch's DataLoader sets that handler once in a process, and the next loader
# relies on it (torch.utils.data._utils.signal_handling).
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGCHLD})
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_MONITORING_TOOLS = 6  # identifiers that sys.monitoring has
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_LIMITS = sorted(number for name, number in vars(resource).items() if name.startswith("RLIMIT_"))
_libc: Any = ctypes.CDLL(None, use_errno=True)


class Setting(NamedTuple):
    """name: a noun phrase. read: a value that compares equal while nothing has changed.

    write: takes what `read` gave; None where a process cannot change it back.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None


def attribute(name: str, owner: object, attribute_name: str) -> Setting:
    """Make the setting of an attribute of a module or an object."""
    return Setting(
        name,
        lambda: getattr(owner, attribute_name),
        lambda value: setattr(owner, attribute_name, value),
    )


def mapping(name: str, owner: MutableMapping[Any, Any]) -> Setting:
    """Make one of the entries of a mapping that others hold on to. Only what differs is touched."""

    def write(before: dict[Any, Any]) -> None:
        for key in owner.keys() - before.keys():
            del owner[key]
        for key, value in before.items():
            if key not in owner or owner[key] != value:
                owner[key] = value

    return Setting(name, lambda: dict(owner), write)


def sequence(name: str, owner: MutableSequence[Any]) -> Setting:
    """Make one of the entries of a list that others hold on to."""

    def write(before: list[Any]) -> None:
        owner[:] = before

    return Setting(name, lambda: list(owner), write)


def python_settings() -> tuple[Setting, ...]:
    """All of them, the garbage collector's first: what follows may depend on a collection."""
    return (
        Setting("garbage collector switch", gc.isenabled, _switch_collector),
        Setting("garbage collector threshold", gc.get_threshold, lambda v: gc.set_threshold(*v)),
        Setting("garbage collector debugging", gc.get_debug, gc.set_debug),
        sequence("garbage collector callbacks", gc.callbacks),
        mapping("environment", os.environ),
        Setting("working directory", _working_directory, os.chdir),
        sequence("sys.path", sys.path),
        Setting("warning filters", lambda: list(warnings.filters), _set_warning_filters),
        Setting("logging", _logging, _set_logging),
        Setting("signal handlers", _signal_handlers, _set_signal_handlers),
        Setting("interval timers", _timers_run, _stop_timers),
        Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
        Setting("thread switch interval", sys.getswitchinterval, sys.setswitchinterval),
        Setting("trace function", sys.gettrace, sys.settrace),
        Setting("trace function of new threads", threading.gettrace, threading.settrace),
        Setting("profile function", sys.getprofile, sys.setprofile),
        Setting("profile function of new threads", threading.getprofile, threading.setprofile),
        Setting("monitoring tools", _monitoring_tools, _free_monitoring_tools),
        Setting(
            "multiprocessing start method",
            lambda: multiprocessing.get_start_method(allow_none=True),
            lambda before: multiprocessing.set_start_method(before, force=True),
        ),
        Setting("numpy error handling", np.geterr, lambda before: np.seterr(**before)),
        Setting(
            "numpy print options", np.get_printoptions, lambda before: np.set_printoptions(**before)
        ),
        Setting("socket timeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
        Setting("import hooks", *_import_hooks()),
        # torch sets one of its own with the first process group.
        attribute("exception hook", sys, "excepthook"),
        Setting(
            "limit of digits in integers", sys.get_int_max_str_digits, sys.set_int_max_str_digits
        ),
        Setting("stack size of new threads", threading.stack_size, threading.stack_size),
        Setting(
            "locale",
            lambda: locale.setlocale(locale.LC_ALL),
            lambda before: locale.setlocale(locale.LC_ALL, before),
        ),
    )


def _switch_collector(on: bool) -> None:
    gc.enable() if on else gc.disable()


def _working_directory() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None  # it has been deleted


def _set_warning_filters(before: list[Any]) -> None:
    warnings.filters[:] = before  # type: ignore[index]
    # Python remembers which warnings the filters let through.
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _logging() -> tuple[int, list[logging.Handler], int]:
    return logging.root.level, list(logging.root.handlers), logging.root.manager.disable


def _set_logging(before: tuple[int, list[logging.Handler], int]) -> None:
    level, handlers, disabled = before
    logging.root.setLevel(level)
    logging.root.handlers[:] = handlers
    logging.disable(disabled)


def _signal_handlers() -> list[Any]:
    return [signal.getsignal(number) for number in _SIGNALS]


def _set_signal_handlers(before: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, before, strict=True):
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _timers_run() -> list[bool]:
    return [signal.getitimer(timer)[0] > 0 for timer in _TIMERS]


def _stop_timers(before: list[bool]) -> None:
    for timer, ran in zip(_TIMERS, before, strict=True):
        if not ran:
            signal.setitimer(timer, 0)


def _monitoring_tools() -> list[str | None]:
    """From Python 3.12 on: what cProfile uses there in place of a profile function."""
    monitoring: Any = getattr(sys, "monitoring", None)
    return [monitoring.get_tool(tool) for tool in range(_MONITORING_TOOLS)] if monitoring else []


def _free_monitoring_tools(before: list[str | None]) -> None:
    monitoring: Any = getattr(sys, "monitoring", None)
    for tool, name in enumerate(before):
        if name is None and monitoring.get_tool(tool) is not None:
            monitoring.set_events(tool, monitoring.events.NO_EVENTS)
            monitoring.free_tool_id(tool)


def _import_hooks() -> tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]:
    """Those of modules that are loaded now: a library's own come with it, and belong to it."""
    known = set(sys.modules)

    def is_known(finder: Any) -> bool:
        home = finder if isinstance(finder, type) else type(finder)
        return home.__module__ in known

    def write(before: list[Any]) -> None:
        sys.meta_path[:] = [*before, *(each for each in sys.meta_path if not is_known(each))]

    return lambda: [each for each in sys.meta_path if is_known(each)], write


def system_settings() -> Iterator[Setting]:
    """Those that can be read on this machine."""
    yield Setting(
        "niceness",
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda before: os.setpriority(os.PRIO_PROCESS, 0, before),
    )
    yield Setting("CPU affinity", lambda: os.sched_getaffinity(0), _set_affinity)
    yield Setting("scheduling policy", _policies, _set_policy)
    yield Setting(
        "timer slack",
        lambda: int(_libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)),
        lambda before: _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(before), 0, 0, 0),
    )
    yield Setting("resource limits", _limits, _set_limits)
    yield Setting("umask", _umask, os.umask)
    process = psutil.Process()
    yield Setting("I/O priority", process.ionice, lambda before: process.ionice(*before))


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
