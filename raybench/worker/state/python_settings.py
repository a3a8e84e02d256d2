"""The settings of Python, its standard library and numpy that a workload can change."""

from __future__ import annotations

import gc
import locale
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from raybench.worker.state.setting import Setting, attribute, mapping, sequence

# Not SIGCHLD: torch's DataLoader sets that handler once in a process, and the next loader
# relies on it (torch.utils.data._utils.signal_handling).
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGCHLD})
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_MONITORING_TOOLS = 6  # identifiers that sys.monitoring has


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
        Setting("multiprocessing start method", _start_method, _set_start_method),
        Setting("numpy error handling", np.geterr, lambda before: np.seterr(**before)),
        Setting("numpy print options", np.get_printoptions, _set_numpy_print_options),
        Setting("socket timeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
        Setting("import hooks", *_import_hooks()),
        # torch sets one of its own with the first process group.
        attribute("exception hook", sys, "excepthook"),
        Setting(
            "limit of digits in integers", sys.get_int_max_str_digits, sys.set_int_max_str_digits
        ),
        Setting("stack size of new threads", threading.stack_size, threading.stack_size),
        Setting("locale", _locale, _set_locale),
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


def _set_numpy_print_options(before: dict[str, Any]) -> None:
    np.set_printoptions(**before)


def _locale() -> str:
    return locale.setlocale(locale.LC_ALL)


def _set_locale(before: str) -> None:
    locale.setlocale(locale.LC_ALL, before)


def _start_method() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def _set_start_method(before: str | None) -> None:
    multiprocessing.set_start_method(before, force=True)
