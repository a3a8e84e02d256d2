"""The state of a worker's process that a workload can change: put back, or named where it stays.

What is not seen: values that a workload changed in modules of others, but for their functions and
classes; functions in modules that were loaded during the point, unless it is the workload's own
that stands there; memory that was taken from the device beside torch's allocator; sockets; files.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from raybench.worker.state.loaded_functions import LoadedFunctions
from raybench.worker.state.process_settings import Setting, python_settings, system_settings
from raybench.worker.state.torch_settings import (
    DeviceMemory,
    device_settings,
    forget_compiled_code,
    inherit_onednn_precision,
    torch_settings,
)

_GRACE_S = 0.5
_POLL_S = 0.01
_SHOWN = 3
_OPEN_FILES = 64
_OF_LIBRARIES = ("socket:", "anon_inode:", "/memfd:", "/dev/shm/", "/dev/nvidia", "/dev/infiniband")


class ProcessState:
    """Python, torch and the device as they were when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._settings: tuple[Setting, ...] = (
            *python_settings(),
            *system_settings(),
            *torch_settings(),
            *device_settings(device),
        )
        self._before = [setting.read() for setting in self._settings]
        self._memory = DeviceMemory(device)
        self._processes = ProcessSnapshot()
        self._descriptors = Descriptors()
        self._functions = LoadedFunctions()

    def begin(self) -> None:
        """Note which threads, child processes and functions there are before a workload starts."""
        self._processes = ProcessSnapshot()
        self._functions.learn()

    def restore(self) -> tuple[str, ...]:
        """Put everything back; what could not be is named, a noun phrase each.

        A few milliseconds where nothing was changed.
        """
        self._write_back()
        inherit_onednn_precision()
        forget_compiled_code()
        gc.collect()
        self._memory.release()
        # Once more: what the collector ended may have put settings back that were not ours.
        changed = self._write_back()
        left = (*self._processes.leaked(), *self._descriptors.count_open())
        return (*changed, *left, *self._memory.still_held())

    def functions_replaced(self, package: str) -> tuple[str, ...]:
        """Functions of others that a workload of this package has replaced, as a noun phrase.

        About 10 ms: there are many of them.
        """
        names = self._functions.replaced(package)
        return (count_names(names, "replaced function", "replaced functions"),) if names else ()

    def holds_device_memory(self) -> bool:
        """Whether memory of the device is still in use after what is free was given back."""
        self._memory.release()
        return bool(self._memory.still_held())

    def _write_back(self) -> list[str]:
        """Put back the settings that have changed; those that stay changed, a noun phrase each.

        Only those: writing some of them costs time, or warns.
        """
        return [
            f"a changed {setting.name}"
            for setting, before in zip(self._settings, self._before, strict=True)
            if setting.read() != before and not _restore(setting, before)
        ]


def _restore(setting: Setting, before: object) -> bool:
    if setting.write is None:
        return False
    try:
        setting.write(before)
    except (OSError, RuntimeError, TypeError, ValueError):
        return False  # whatever forbids it: the caller has it told
    return bool(setting.read() == before)


def seed_all(seed: int) -> None:
    """Start the global random generators of Python, numpy and torch, on all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class ProcessSnapshot:
    """The threads and child processes that ran beside this thread at one moment."""

    def __init__(self) -> None:
        self._threads = set(_threads())
        self._children = _children()

    def leaked(self) -> tuple[str, ...]:
        """Those that have been started since and do not end by themselves now, as noun phrases."""
        _end_progress_monitor()
        threads = _those_that_stay(lambda: set(_threads()) - self._threads)
        children = _those_that_stay(lambda: _children() - self._children)
        phrases = []
        if threads:
            names = sorted(thread.name for thread in threads)
            phrases.append(count_names(names, "running thread", "running threads"))
        if children:
            commands = sorted(map(_command, children))
            phrases.append(count_names(commands, "child process", "child processes"))
        return tuple(phrases)


class Descriptors:
    """How many descriptors of files and pipes the process had open when this was made."""

    def __init__(self) -> None:
        self._before = _open_files()

    def count_open(self) -> tuple[str, ...]:
        """Many more than before, as a noun phrase: a few are a library's log or cache."""
        more = _open_files() - self._before
        return (f"{more} open files",) if more > _OPEN_FILES else ()


def _open_files() -> int:
    """Without sockets, memory and devices, which NCCL opens by the dozen and keeps."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - called at each point
        with suppress(FileNotFoundError):  # that of this listing
            target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
            count += not target.startswith(_OF_LIBRARIES)
    return count


def _end_progress_monitor() -> None:
    """End the thread that the first bar of tqdm starts, also one of torch.compile's."""
    bars: Any = sys.modules.get("tqdm.std")
    if bars is not None and (monitor := bars.tqdm.monitor) is not None:
        monitor.exit()
        bars.tqdm.monitor = None  # the next bar starts another


def count_names(names: Sequence[str], one: str, many: str) -> str:
    """`2 running threads (a, b)`, with the first few names."""
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"{len(names)} {one if len(names) == 1 else many} ({shown})"


def _those_that_stay(remaining: Callable[[], set[Any]]) -> set[Any]:
    """Those that are left; what has been told to end may take a moment."""
    deadline_s = time.monotonic() + _GRACE_S
    while (left := remaining()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return left


def _threads() -> list[threading.Thread]:
    """Python's own, without those that are nobody's fault."""
    return [thread for thread in threading.enumerate() if not _is_harmless(thread)]


def _is_harmless(thread: threading.Thread) -> bool:
    """Tell whether a thread is nobody's fault.

    A dummy stands for a thread of C++, such as autograd's, that has once run Python.

    A timer of torch's compiler notices only half a minute later that its processes have gone, and
    sleeps till then. raybench's own waits for the driver's word on the process group.
    """
    target = getattr(thread, "_target", None) or type(thread)
    of_others = str(getattr(target, "__module__", "")).startswith(("torch._inductor.", "raybench."))
    return of_others or isinstance(thread, threading._DummyThread)


def _children() -> set[int]:
    """Process ids; without the helpers that multiprocessing keeps for the life of a process."""
    helpers: set[object] = {
        forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
    }
    # Those that a fork server started are not this process's children.
    remote = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    return (_direct_children() | remote) - helpers


def _direct_children() -> set[int]:
    """List the living children of every thread of this process; none where Linux lists none.

    psutil looks at all processes of the host instead: 6 ms with 90 of them, not 0.3, at each point.
    """
    found: set[int] = set()
    for thread in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(int(pid) for pid in thread.read_text(encoding="ascii").split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
    return {pid for pid in found if _is_alive(pid)}


def _command(pid: int) -> str:
    try:
        # A process may give itself any bytes for a name.
        return os.fsencode(psutil.Process(pid).name()).decode(errors="replace")
    except psutil.Error:
        return "ended"


def _is_alive(pid: int) -> bool:
    """Return False for one that has ended and that nobody has waited for."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
