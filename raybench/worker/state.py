"""The state of a worker's process between two points: settings are restored, leftovers are named.

This restores the settings that built-in workloads and training scripts commonly change. TF32 and
the random number generators are missing here, because `apply_precision` and `seed_all` set them
before each build. A user's class can change anything else, so another class gets new processes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch._dynamo
from torch import backends
from torch.utils.data._utils import signal_handling

from raybench.conversion import MIB

# How long threads or child processes may take to end.
_GRACE_S = 0.5
_POLL_S = 0.01
_MOST_NAMES = 3
# torch's allocator reserves small blocks in segments of 2 MiB.
_SMALL_SEGMENT_BYTES = 2 * MIB
_ATTRIBUTES = {
    "cuDNN": (backends.cudnn, ("enabled", "benchmark", "deterministic")),
    "cuBLAS": (
        backends.cuda.matmul,
        (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        ),
    ),
    # The handler of the DataLoader is restored too. Its flag makes the DataLoader set it again.
    "DataLoader": (signal_handling, ("_SIGCHLD_handler_set",)),
}
# Ray and faulthandler handle these in C: Python can neither read nor restore their handlers.
_CRASHES = {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGTRAP,
}
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# torch._dynamo has loaded all four modules.
_COMPILER_CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch._inductor.config",
    "torch.compiler.config",
)


class ProcessSetting(NamedTuple):
    """A setting of the process or of the thread that calls these functions."""

    name: str
    # Returns a value that compares equal as long as nothing has changed.
    read: Callable[[], Any]
    # Sets such a value; may raise.
    write: Callable[[Any], object]


def process_settings() -> Iterator[ProcessSetting]:
    """Yield the settings that `ProcessState.restore` restores, in the order of restoring."""
    cuda, has_cache = backends.cuda, torch.is_autocast_cache_enabled
    deterministic = torch.get_deterministic_debug_mode
    yield from (
        # Timers first: the signal of a timer may come while other settings are restored.
        ProcessSetting("interval timer", _timers, _set_timers),
        ProcessSetting("signal handler", _signal_handlers, _set_signal_handlers),
        ProcessSetting("signal mask", _signal_mask, _set_signal_mask),
        ProcessSetting("environment", lambda: dict(os.environ), _set_environment),
        ProcessSetting("working directory", _working_directory, os.chdir),
        # Set None instead of "cpu", which costs time in each call of torch.
        ProcessSetting(
            "default device",
            torch.get_default_device,
            lambda device: torch.set_default_device(None if device.type == "cpu" else device),
        ),
        ProcessSetting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        ProcessSetting("number of threads", torch.get_num_threads, torch.set_num_threads),
        ProcessSetting(
            "deterministic algorithms", deterministic, torch.set_deterministic_debug_mode
        ),
        ProcessSetting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        ProcessSetting("autocast cache", has_cache, torch.set_autocast_cache_enabled),
        ProcessSetting("autocast nesting", _autocast_nesting, _set_autocast_nesting),
        ProcessSetting("flash attention", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        ProcessSetting("math attention", cuda.math_sdp_enabled, cuda.enable_math_sdp),
        ProcessSetting("cuDNN attention", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        ProcessSetting(
            "memory-efficient attention",
            cuda.mem_efficient_sdp_enabled,
            cuda.enable_mem_efficient_sdp,
        ),
    )
    for kind in ("cpu", "cuda"):
        for name, get, put in (
            ("autocast", torch.is_autocast_enabled, torch.set_autocast_enabled),
            ("autocast dtype", torch.get_autocast_dtype, torch.set_autocast_dtype),
        ):
            yield ProcessSetting(f"{name} on {kind}", partial(get, kind), partial(put, kind))
    for library, (owner, names) in _ATTRIBUTES.items():
        for name in names:
            read, write = partial(getattr, owner, name), partial(setattr, owner, name)
            yield ProcessSetting(f"{library} {name}", read, write)
    for name in _COMPILER_CONFIGS:
        config: Any = sys.modules[name]
        yield ProcessSetting(name, config.get_config_copy, partial(_set_config, config))


def _timers() -> list[tuple[bool, float]]:
    """Return for each interval timer whether it runs, and the seconds after which it repeats."""
    times_s = map(signal.getitimer, _TIMERS)
    return [(left_s > 0, interval_s) for left_s, interval_s in times_s]


def _set_timers(before: list[tuple[bool, float]]) -> None:
    """Stop timers that were started, and give other timers their interval back."""
    for timer, now, (was_running, interval_s) in zip(_TIMERS, _timers(), before, strict=True):
        if now != (was_running, interval_s):
            signal.setitimer(timer, interval_s, interval_s)


def _signal_handlers() -> dict[int, Any]:
    """Return the handler of each signal; None for a handler that was set in C."""
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_signal_handlers(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        is_in_c = handler is None or number in _CRASHES
        if not is_in_c and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _signal_mask() -> set[int]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _set_signal_mask(before: set[int]) -> None:
    """Block exactly these signals in this thread."""
    # A pending signal that is unblocked would arrive now. Ignoring a signal discards it.
    for number in signal.sigpending() - before:
        handler = signal.signal(number, signal.SIG_IGN)
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _working_directory() -> str | None:
    """Return the current directory; None if it has been deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set_autocast_nesting(before: int) -> None:
    while _autocast_nesting() > before:
        torch.autocast_decrement_nesting()
    # Autocast drops its copies of weights only when the outermost block ends.
    torch.clear_autocast_cache()


def _set_config(config: Any, before: dict[str, Any]) -> None:
    now = config.get_config_copy()
    for key, value in before.items():
        if now[key] != value:
            setattr(config, key, value)


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, on all devices; 0 <= seed < 2**32."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class ProcessState:
    """Settings and device memory at construction; threads and children at the last `begin`."""

    def __init__(self, device: torch.device) -> None:
        self._before = [(setting, setting.read()) for setting in process_settings()]
        self._device = device
        self._reserved_bytes = self._release_memory()
        self.begin()

    def begin(self) -> None:
        """Note the current threads and child processes; call this before each workload."""
        self._threads, self._children = _threads(), _children()

    def restore(self) -> tuple[str, ...]:
        """Restore settings and forget compiled code; return what the workload left behind.

        Call this on the thread of the workload, after the workload was closed and dropped. Waits up
        to 0.5 s for threads to end, then up to 0.5 s for child processes.

        Returns:
            A noun phrase for each leftover: a setting that cannot be restored, threads, processes,
                memory.
        """
        _forget_compiled_code()
        # Collect first: a context manager that the collector ends restores its own settings.
        gc.collect()
        leftovers = []
        for setting, before in self._before:
            if setting.read() != before:  # write only then: some writes cost time, or warn
                with suppress(OSError, RuntimeError, TypeError, ValueError):
                    setting.write(before)
                if setting.read() != before:
                    leftovers.append(f"a changed {setting.name}")
        _end_monitor_of_tqdm()
        leftovers += _describe_remaining(
            "running thread", "running threads", lambda: _threads() - self._threads
        )
        leftovers += _describe_remaining(
            "child process", "child processes", lambda: _children() - self._children
        )
        if held_bytes := self.held_bytes():
            leftovers.append(f"{held_bytes / MIB:,.0f} MiB of device memory")
        return tuple(leftovers)

    def held_bytes(self) -> int:
        """Return the bytes that torch reserves beyond the construction of this object.

        Waits for the device and frees cached memory first. Up to 2 MiB count as 0; on a CPU the
        result is 0. Raises the error of a failed device.
        """
        held_bytes = self._release_memory() - self._reserved_bytes
        return held_bytes if held_bytes > _SMALL_SEGMENT_BYTES else 0

    def _release_memory(self) -> int:
        """Free cached memory; return the bytes that torch still reserves, 0 on a CPU."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        # Reserved, not allocated: the next workload cannot use the pool of a living CUDA graph.
        return torch.cuda.memory_reserved(self._device)


def _end_monitor_of_tqdm() -> None:
    """End the thread that the first progress bar of tqdm starts, also in torch.compile."""
    bars: Any = sys.modules.get("tqdm.std")
    if bars is not None and (monitor := bars.tqdm.monitor) is not None:
        monitor.exit()
        bars.tqdm.monitor = None  # the next bar starts another monitor


def _describe_remaining(
    singular: str, plural: str, remaining: Callable[[], set[Any]]
) -> Iterator[str]:
    """Wait up to 0.5 s for threads or processes to end; yield a phrase if some still run."""
    deadline_s = time.monotonic() + _GRACE_S
    while (running := remaining()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    if names := sorted(map(_name, running)):
        shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        yield f"{len(names)} {singular if len(names) == 1 else plural} ({shown})"


def _forget_compiled_code() -> None:
    """Drop compiled code, and end the threads and processes that compiled it.

    Otherwise torch.compile silently runs a function uncompiled after it was compiled for 8 shapes
    in this process (`torch._dynamo.config.recompile_limit`).
    """
    # Skip the reset if nothing was compiled: with CUDA it imports 600 modules of Inductor.
    if not torch._dynamo.utils.counters["frames"]:
        return
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_module: Any = sys.modules.get("torch._inductor.async_compile")
    if compile_module is None:
        return
    compile_module.shutdown_compile_workers()
    threads = compile_module.AsyncCompile.pool
    if threads.cache_info().currsize:
        threads().shutdown()
        threads.cache_clear()


def _threads() -> set[threading.Thread]:
    """Return the Python threads that a workload may have started."""
    threads = set()
    for thread in threading.enumerate():
        # A timer thread of torch's compiler sleeps for half a minute after its processes have
        # ended. raybench's own thread watches the process group.
        target = getattr(thread, "_target", None) or type(thread)
        module = str(getattr(target, "__module__", ""))
        is_expected = module.startswith(("torch._inductor.", "raybench."))
        # `_DummyThread` represents a C++ thread, such as autograd's, that has called into Python.
        if not (is_expected or isinstance(thread, threading._DummyThread)):
            threads.add(thread)
    return threads


def _children() -> set[int]:
    """Return the ids of living child processes, without multiprocessing's helpers."""
    helpers = {
        forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
    }
    # Processes that a fork server started are not children of this process.
    remote = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    # psutil would look at all processes of the host, which takes 6 ms instead of 0.3 ms.
    direct: set[int] = set()
    for thread in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            direct.update(int(pid) for pid in thread.read_text(encoding="ascii").split())
    children = set()
    for pid in (direct | remote) - helpers:
        with suppress(psutil.Error):
            # A zombie has ended, although nobody has waited for it.
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                children.add(pid)
    return children


def _name(leftover: threading.Thread | int) -> str:
    """Return the name of a thread or a process; "ended" for a process that has ended."""
    if isinstance(leftover, threading.Thread):
        return leftover.name
    try:
        # The name of a process may be any bytes.
        return os.fsencode(psutil.Process(leftover).name()).decode(errors="replace")
    except psutil.Error:
        return "ended"
