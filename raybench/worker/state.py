"""The state of a worker's process between two points: settings are put back, leftovers are named.

What is put back is what built-in workloads change and what training scripts commonly change. The
precision of fp32 arithmetic and the random number generators are not in the table: both are set
anew before each build of a workload (`apply_precision`, `seed_all`). A class of the user's can
change anything else, so another class gets new processes (`RayCluster.run`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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

_GRACE_S = 0.5
_POLL_S = 0.01
_SHOWN = 3
# torch's allocator takes memory for small blocks from the device in segments of 2 MiB.
_SMALL_SEGMENT_BYTES = 2 * 2**20
_MIB = 2**20
# torch._dynamo has loaded them all.
_COMPILER_CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch._inductor.config",
    "torch.compiler.config",
)


class Setting(NamedTuple):
    """A setting of the process.

    read: returns a value that compares equal while nothing has changed. write: sets such a value.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


def settings() -> Iterator[Setting]:
    """Yield the settings of this process that are put back after each point, in this order."""
    cuda, has_cache = backends.cuda, torch.is_autocast_cache_enabled
    deterministic = torch.get_deterministic_debug_mode
    yield from (
        Setting("environment", lambda: dict(os.environ), _set_environment),
        Setting("working directory", _working_directory, os.chdir),
        Setting("default device", torch.get_default_device, _set_default_device),
        Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
        Setting("deterministic algorithms", deterministic, torch.set_deterministic_debug_mode),
        Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        Setting("autocast cache", has_cache, torch.set_autocast_cache_enabled),
        Setting("autocast nesting", _autocast_nesting, _set_autocast_nesting),
        Setting("flash attention", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        Setting("math attention", cuda.math_sdp_enabled, cuda.enable_math_sdp),
        Setting("cuDNN attention", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        Setting(
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
            yield Setting(f"{name} on {kind}", partial(get, kind), partial(put, kind))
    for name in ("enabled", "benchmark", "deterministic"):
        yield _attribute(f"cuDNN {name}", backends.cudnn, name)
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ):
        yield _attribute(f"cuBLAS {name}", backends.cuda.matmul, name)
    for name in _COMPILER_CONFIGS:
        config: Any = sys.modules[name]
        yield Setting(name, config.get_config_copy, partial(_set_config, config))


def _attribute(name: str, owner: object, attribute: str) -> Setting:
    return Setting(name, partial(getattr, owner, attribute), partial(setattr, owner, attribute))


def _set_environment(before: dict[str, str]) -> None:
    """Make the environment of this process equal to `before`."""
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _working_directory() -> str | None:
    """Return the current directory; None where it has been deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


def _set_default_device(before: torch.device) -> None:
    # None, since a default of "cpu" costs time in each call of torch.
    torch.set_default_device(None if before.type == "cpu" else before)


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set_autocast_nesting(before: int) -> None:
    """Leave autocast blocks until so many are entered, and drop its copies of weights."""
    while _autocast_nesting() > before:
        torch.autocast_decrement_nesting()
    # Autocast itself drops its copies of weights when the outermost block ends.
    torch.clear_autocast_cache()


def _set_config(config: Any, before: dict[str, Any]) -> None:
    """Set the settings of a module of torch's compiler that differ from `before`."""
    now = config.get_config_copy()
    for key, value in before.items():
        if now[key] != value:
            setattr(config, key, value)


def seed_all(seed: int) -> None:
    """Start the global random generators of Python, numpy and torch, on all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class ProcessState:
    """The settings, threads, child processes and device memory of a process when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._before = [(setting, setting.read()) for setting in settings()]
        self._device = device
        self._reserved_bytes = self._release_memory()
        self.begin()

    def begin(self) -> None:
        """Note which threads and child processes there are before a workload starts."""
        self._threads = set(_threads())
        self._children = _children()

    def restore(self) -> tuple[str, ...]:
        """Put the settings back and forget compiled code; return what is left behind.

        A noun phrase for each: a setting that cannot be put back, threads, child processes,
        memory of the device. A few milliseconds where nothing was changed.
        """
        _forget_compiled_code()
        # First: a context manager that the collector ends puts its own settings back.
        gc.collect()
        return tuple(
            [
                f"a changed {setting.name}"
                for setting, to in self._before
                if not _put_back(setting, to)
            ]
            + self._leaked()
            + self._held_memory()
        )

    def holds_device_memory(self) -> bool:
        """Return whether memory of the device is still in use after what is free was given back."""
        return bool(self._held_memory())

    def _leaked(self) -> list[str]:
        """Return in words the threads and children that were started since `begin` and stay.

        Waits half a second at most for the threads, then for the children. Ends tqdm's monitor.
        """
        _end_progress_monitor()
        threads = _wait_for_end(lambda: set(_threads()) - self._threads)
        children = _wait_for_end(lambda: _children() - self._children)
        return [
            *_count(sorted(thread.name for thread in threads), "running thread", "running threads"),
            *_count(sorted(map(_command, children)), "child process", "child processes"),
        ]

    def _held_memory(self) -> list[str]:
        """Return how much more device memory is in use than before, in words; [] below 2 MiB."""
        held_bytes = self._release_memory() - self._reserved_bytes
        is_held = held_bytes > _SMALL_SEGMENT_BYTES
        return [f"{held_bytes / _MIB:,.0f} MiB of device memory"] if is_held else []

    def _release_memory(self) -> int:
        """Give free memory back to the device; return the bytes that torch still reserves.

        0 on a CPU.
        """
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        # Reserved, not allocated: the pool of a living CUDA graph is no room for others either.
        return torch.cuda.memory_reserved(self._device)


def _put_back(setting: Setting, before: object) -> bool:
    """Put one setting back if it has changed; return False where that fails."""
    if setting.read() == before:  # writing some of them costs time, or warns
        return True
    try:
        setting.write(before)
    except (OSError, RuntimeError, TypeError, ValueError):
        return False
    return bool(setting.read() == before)


def _forget_compiled_code() -> None:
    """Drop compiled code, and end the threads and processes that compiled it.

    Without this torch.compile silently runs a function uncompiled once it was compiled for 8
    shapes in this process (`torch._dynamo.config.recompile_limit`).
    """
    # Only where something was compiled: with CUDA the reset itself imports 600 modules of Inductor.
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


def _end_progress_monitor() -> None:
    """End the thread that the first bar of tqdm starts, also one of torch.compile's.

    Does nothing where there is none; the next bar starts another.
    """
    bars: Any = sys.modules.get("tqdm.std")
    if bars is not None and (monitor := bars.tqdm.monitor) is not None:
        monitor.exit()
        bars.tqdm.monitor = None  # the next bar starts another


def _count(names: Sequence[str], one: str, many: str) -> list[str]:
    """Return `2 running threads (a, b)` with the first few names; nothing where there are none."""
    if not names:
        return []
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return [f"{len(names)} {one if len(names) == 1 else many} ({shown})"]


def _wait_for_end(remaining: Callable[[], set[Any]]) -> set[Any]:
    """Wait until nothing remains, 0.5 s at most; return what still does."""
    deadline_s = time.monotonic() + _GRACE_S
    while (left := remaining()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return left


def _threads() -> list[threading.Thread]:
    """Return Python's threads that a workload may have started."""
    return [thread for thread in threading.enumerate() if not _is_harmless(thread)]


def _is_harmless(thread: threading.Thread) -> bool:
    """Return whether a thread is not the workload's.

    A dummy stands for a thread of C++, such as autograd's, that has once run Python. A timer of
    torch's compiler notices only half a minute later that its processes have gone, and sleeps
    until then. raybench's own waits for the driver's word on the process group.
    """
    target = getattr(thread, "_target", None) or type(thread)
    of_others = str(getattr(target, "__module__", "")).startswith(("torch._inductor.", "raybench."))
    return of_others or isinstance(thread, threading._DummyThread)


def _children() -> set[int]:
    """Return the ids of living child processes, without multiprocessing's own helpers."""
    helpers = {
        forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
    }
    # Those that a fork server started are not this process's children.
    remote = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    # psutil looks at all processes of the host: 6 ms with 90 of them, not 0.3, at each point.
    direct: set[int] = set()
    for thread in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            direct.update(int(pid) for pid in thread.read_text(encoding="ascii").split())
    found = set()
    for pid in (direct | remote) - helpers:
        with suppress(psutil.Error):
            # One that has ended, and that nobody has waited for, is no child that was left.
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
    return found


def _command(pid: int) -> str:
    """Return the name of a process, in readable characters; "ended" where it has."""
    try:
        # A process may give itself any bytes for a name.
        return os.fsencode(psutil.Process(pid).name()).decode(errors="replace")
    except psutil.Error:
        return "ended"
