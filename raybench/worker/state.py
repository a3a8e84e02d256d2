"""The state of a worker's process between two points: settings are restored, leftovers are named.

TF32 and the random number generators are missing here, because `apply_precision` and `seed_all` set
them before each build. A user's class can change other settings, so another class gets new
processes.
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
_MAX_SHOWN_NAMES = 3
# Flag of waitid(2): also wait for children that end without a signal. `os` does not name it.
_WALL = 0x40000000
# torch's allocator reserves small blocks in segments of 2 MiB.
_SMALL_SEGMENT_BYTES = 2 * MIB
# Library -> (module or object, its attributes that are settings).
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
    # The DataLoader's signal handler is removed. This flag makes the DataLoader set it again.
    "DataLoader": (signal_handling, ("_SIGCHLD_handler_set",)),
}
# Ray and faulthandler set these handlers in C, so Python can neither read nor restore them.
_CRASH_SIGNALS = {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGTRAP,
}
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# Importing torch._dynamo loads all four modules.
_COMPILER_CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch._inductor.config",
    "torch.compiler.config",
)


class ProcessSetting(NamedTuple):
    """A setting of the process or of the current thread."""

    name: str
    # Returns the value; two equal values mean that nothing has changed.
    read: Callable[[], Any]
    # Sets a value that `read` returned; may raise.
    write: Callable[[Any], object]


def process_settings() -> Iterator[ProcessSetting]:
    """Yield the settings that `ProcessState.restore` restores, in the order of restoring."""
    cuda = backends.cuda
    yield from (
        # Timers first: a timer may send its signal while other settings are restored.
        ProcessSetting("interval timer", _timers, _set_timers),
        ProcessSetting("signal handler", _signal_handlers, _set_signal_handlers),
        ProcessSetting("signal mask", _signal_mask, _set_signal_mask),
        ProcessSetting("environment", lambda: dict(os.environ), _set_environment),
        ProcessSetting("working directory", _working_directory, os.chdir),
        ProcessSetting(
            "default device",
            torch.get_default_device,
            # Set None instead of "cpu", which costs time in each call of torch.
            lambda device: torch.set_default_device(None if device.type == "cpu" else device),
        ),
        ProcessSetting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        ProcessSetting("number of threads", torch.get_num_threads, torch.set_num_threads),
        ProcessSetting(
            "deterministic algorithms",
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
        ),
        ProcessSetting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        ProcessSetting(
            "autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
        ),
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
        yield ProcessSetting(
            f"autocast on {kind}",
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
        )
        yield ProcessSetting(
            f"autocast dtype on {kind}",
            partial(torch.get_autocast_dtype, kind),
            partial(torch.set_autocast_dtype, kind),
        )
    for library, (owner, names) in _ATTRIBUTES.items():
        for name in names:
            read, write = partial(getattr, owner, name), partial(setattr, owner, name)
            yield ProcessSetting(f"{library} {name}", read, write)
    for name in _COMPILER_CONFIGS:
        config: Any = sys.modules[name]
        yield ProcessSetting(name, config.get_config_copy, partial(_set_config, config))


def _timers() -> list[tuple[bool, float]]:
    """Return (whether the timer runs, its interval in seconds) for each interval timer."""
    times_s = map(signal.getitimer, _TIMERS)
    return [(remaining_s > 0, interval_s) for remaining_s, interval_s in times_s]


def _set_timers(saved_timers: list[tuple[bool, float]]) -> None:
    """Start each changed timer anew with its saved interval; an interval of 0 stops the timer."""
    for timer, current, saved in zip(_TIMERS, _timers(), saved_timers, strict=True):
        if current != saved:
            _, interval_s = saved  # (whether the timer ran, its interval in seconds)
            signal.setitimer(timer, interval_s, interval_s)


def _signal_handlers() -> dict[int, Any]:
    """Return the handler of each signal; None for a handler that was set in C."""
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_signal_handlers(saved: dict[int, Any]) -> None:
    for number, handler in saved.items():
        is_in_c = handler is None or number in _CRASH_SIGNALS
        if not is_in_c and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _signal_mask() -> set[int]:
    # Blocking no further signal returns the mask unchanged.
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _set_signal_mask(blocked: set[int]) -> None:
    """Block exactly these signals in this thread, and discard pending ones that are unblocked."""
    for number in signal.sigpending() - blocked:
        # Ignoring a signal for a moment discards it.
        handler = signal.signal(number, signal.SIG_IGN)
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _set_environment(saved: dict[str, str]) -> None:
    for name in os.environ.keys() - saved.keys():
        del os.environ[name]
    os.environ.update(saved)


def _working_directory() -> str | None:
    """Return the current directory; None if it has been deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


def _autocast_nesting() -> int:
    # torch returns the depth only when it changes it.
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set_autocast_nesting(depth: int) -> None:
    while _autocast_nesting() > depth:
        torch.autocast_decrement_nesting()
    # Autocast drops its copies of weights only when the outermost block ends.
    torch.clear_autocast_cache()


def _set_config(config: Any, saved: dict[str, Any]) -> None:
    current = config.get_config_copy()
    for key, value in saved.items():
        if current[key] != value:
            setattr(config, key, value)


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, on all devices; 0 <= seed < 2**32."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class ProcessState:
    """Settings and device memory at construction; threads and children at the last `begin`."""

    def __init__(self, device: torch.device) -> None:
        self._saved_settings = [(setting, setting.read()) for setting in process_settings()]
        self._device = device
        self._reserved_bytes = self._release_memory()
        self.begin()

    def begin(self) -> None:
        """Note the current threads and child processes; call this before each workload."""
        self._threads, self._children = _workload_threads(), _child_pids()

    def restore(self) -> tuple[str, ...]:
        """Restore settings and drop compiled code; return what the workload left behind.

        Call this on the thread of the workload, after the workload was closed and dropped.

        Returns:
            A noun phrase for each leftover: a setting that cannot be restored, and threads,
                processes and memory that remain after about 1 s.
        """
        _drop_compiled_code()
        # Collect first: a context manager that the collector ends restores its own settings.
        gc.collect()
        leftovers = []
        for setting, saved_value in self._saved_settings:
            # Write changed settings only: some writes cost time, or warn.
            if setting.read() != saved_value:
                with suppress(OSError, RuntimeError, TypeError, ValueError):
                    setting.write(saved_value)
                if setting.read() != saved_value:
                    leftovers.append(f"a changed {setting.name}")
        _end_tqdm_monitor()
        leftovers += _wait_for_end(
            "running thread", "running threads", lambda: _workload_threads() - self._threads
        )
        leftovers += _wait_for_end(
            "child process", "child processes", lambda: _child_pids() - self._children
        )
        if held_bytes := self.held_bytes():
            leftovers.append(f"{held_bytes / MIB:,.0f} MiB of device memory")
        return tuple(leftovers)

    def held_bytes(self) -> int:
        """Return the bytes that torch reserves now and did not reserve at construction.

        This waits for the device and frees cached memory first. Up to 2 MiB count as 0, and on a
        CPU the result is 0.
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
        # Count reserved memory: the pool of a living CUDA graph is not allocated, but is in use.
        return torch.cuda.memory_reserved(self._device)


def _end_tqdm_monitor() -> None:
    """End the thread that tqdm's first progress bar starts; torch.compile uses tqdm too."""
    bars: Any = sys.modules.get("tqdm.std")
    if bars is not None and (monitor := bars.tqdm.monitor) is not None:
        monitor.exit()
        bars.tqdm.monitor = None  # the next bar starts another monitor


def _wait_for_end(
    singular: str, plural: str, find_running: Callable[[], set[Any]]
) -> Iterator[str]:
    """Wait up to 0.5 s for threads or processes to end; yield a phrase if some still run."""
    deadline_s = time.monotonic() + _GRACE_S
    while (running := find_running()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    if names := sorted(map(_leftover_name, running)):
        shown = ", ".join(names[:_MAX_SHOWN_NAMES])
        more = ", ..." if len(names) > _MAX_SHOWN_NAMES else ""
        yield f"{len(names)} {singular if len(names) == 1 else plural} ({shown}{more})"


def _drop_compiled_code() -> None:
    """Drop compiled code, and end the threads and processes that compiled it.

    torch.compile runs a function uncompiled once a process has compiled it for 8 shapes
    (`torch._dynamo.config.recompile_limit`).
    """
    # Skip the reset if nothing was compiled: with CUDA, it imports 600 modules of Inductor.
    if not torch._dynamo.utils.counters["frames"]:
        return
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_module: Any = sys.modules.get("torch._inductor.async_compile")
    if compile_module is None:
        return
    compile_module.shutdown_compile_workers()
    # `pool` is a cached function; an empty cache means that the pool was never made.
    thread_pool = compile_module.AsyncCompile.pool
    if thread_pool.cache_info().currsize:
        thread_pool().shutdown()
        thread_pool.cache_clear()


def _workload_threads() -> set[threading.Thread]:
    """Return the Python threads that a workload may have started."""
    threads = set()
    for thread in threading.enumerate():
        # Leave out raybench's own threads, and torch's compiler, which has a timer thread that
        # sleeps for half a minute after the compiler has ended.
        target = getattr(thread, "_target", None) or type(thread)
        module = str(getattr(target, "__module__", ""))
        is_expected = module.startswith(("torch._inductor.", "raybench."))
        # `_DummyThread` represents a C++ thread, such as autograd's, that has called into Python.
        if not (is_expected or isinstance(thread, threading._DummyThread)):
            threads.add(thread)
    return threads


def _child_pids() -> set[int]:
    """Return the ids of living child processes, without multiprocessing's helpers."""
    helpers = {
        forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
    }
    # The parent of these processes may be a fork server, so /proc/self does not list them.
    forked = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    living = set()
    for pid in (_direct_children() | forked) - helpers:
        with suppress(psutil.Error):
            # A zombie has ended, although its parent has not waited for it.
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                living.add(pid)
    return living


def _direct_children() -> set[int]:
    """Return the ids of the children of this process, zombies included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)
    except ChildProcessError:
        # No child: skip the files, whose reading takes 7 ms in a process with 150 threads.
        return set()
    children: set[int] = set()
    # psutil would look at all processes of the host.
    for children_file in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            children.update(map(int, children_file.read_text(encoding="ascii").split()))
    return children


def _leftover_name(leftover: threading.Thread | int) -> str:
    """Return the name of a thread or a process; "ended" for a process that has ended."""
    if isinstance(leftover, threading.Thread):
        return leftover.name
    try:
        # The name of a process may be any bytes.
        return os.fsencode(psutil.Process(leftover).name()).decode(errors="replace")
    except psutil.Error:
        return "ended"
