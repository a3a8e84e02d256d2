"""Parses Python stacks: where a rank is, and what it waits for."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath

_FRAME = re.compile(r'^\s*File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_RAYBENCH = f"{Path(__file__).parents[1]}/"
_WORKLOADS = f"{_RAYBENCH}workloads/"
_SCRIPT_CHILD = f"{_WORKLOADS}scripts/child.py"
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3|^<frozen ")
# Library files whose functions block on a lock.
_LOCK_FILES = ("/threading.py", "/queue.py", "/multiprocessing/synchronize.py", "/filelock/_api.py")
# Source lines that acquire a lock, sleep, or wait for the device in C++ code.
_LOCK_TEXT = re.compile(r"\.acquire\(|\bflock\(|\blockf\(|\bwith\b.*lock", re.IGNORECASE)
# Files on the stack while torch compiles.
_COMPILERS = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/_inductor/async_compile.py",
    "/triton/compiler/compiler.py",
    "/triton/runtime/autotuner.py",
)
_SLEEP_TEXT = re.compile(r"\bsleep\(")
_DEVICE_TEXT = re.compile(r"\.(item|cpu|tolist|synchronize)\(")
# Kernel functions in which a thread waits for a lock.
_LOCK_KERNEL_WAITS = ("futex", "locks_lock", "flock", "fcntl_setlk", "posix_lock")


class Wait(StrEnum):
    """What a thread waits for, according to its stack and the kernel."""

    SLEEP = "sleep"
    LOCK = "lock"
    DATA = "data"
    # Other ranks, in a collective or in a backward pass.
    PEERS = "peers"
    # The script has finished a block of steps and waits for its worker.
    BLOCK_END = "block_end"
    # The rank has ended the point, and its worker waits for the next point.
    POINT_END = "point_end"
    DEVICE = "device"
    # The rank compiles, which may take minutes on one rank only.
    COMPILER = "compiler"
    # The thread computes, or waits for something else.
    NOTHING_KNOWN = "nothing_known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame of a Python stack."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{PurePath(self.path).name}:{self.line}"

    @property
    def text(self) -> str:
        """Return the source line; empty if this host does not have the file."""
        return linecache.getline(self.path, self.line).strip()


def read(text: str) -> tuple[Frame, ...]:
    """Return the frames of a stack in faulthandler's format, the innermost frame first."""
    matches = (_FRAME.match(line) for line in text.splitlines())
    return tuple(
        Frame(path=match["path"], line=int(match["line"]), function=match["function"])
        for match in matches
        if match
    )


def find_user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame in the user's code or a built-in workload; None without one."""
    return next(filter(_is_user_code, frames), None)


def _is_user_code(frame: Frame) -> bool:
    """Return whether the frame is in the user's code or in a built-in workload."""
    # raybench may be installed as a library, so check its built-in workloads first.
    if frame.path.startswith(_RAYBENCH):
        return frame.path.startswith(_WORKLOADS) and frame.path != _SCRIPT_CHILD
    return not _LIBRARY.search(frame.path)


def classify_wait(frames: Sequence[Frame], kernel_wait: str = "") -> Wait:
    """Return what the thread waits for.

    Args:
        frames: its Python stack, the innermost frame first; may be empty.
        kernel_wait: kernel function in which the thread waits, if known.
    """
    if not frames:
        return Wait.SLEEP if "nanosleep" in kernel_wait else Wait.NOTHING_KNOWN
    inner = frames[0]
    if any(frame.path.endswith(_COMPILERS) for frame in frames):
        return Wait.COMPILER
    if any("/torch/utils/data/" in frame.path for frame in frames):
        return Wait.DATA
    if "/torch/distributed/" in inner.path or "/torch/autograd/" in inner.path:
        return Wait.PEERS
    # The process of a script waits here until its worker starts the next block.
    if any(frame.path == _SCRIPT_CHILD and frame.function == "receive" for frame in frames):
        return Wait.BLOCK_END
    if "/torch/cuda/" in inner.path and inner.function == "synchronize":
        return Wait.DEVICE
    if inner.path.endswith(_LOCK_FILES):
        return Wait.LOCK
    # C functions have no frame, so read the source line that calls the C function.
    source_line = inner.text
    if _DEVICE_TEXT.search(source_line):
        return Wait.DEVICE
    if _SLEEP_TEXT.search(source_line) or (not source_line and "nanosleep" in kernel_wait):
        return Wait.SLEEP
    may_wait_for_lock = not kernel_wait or any(name in kernel_wait for name in _LOCK_KERNEL_WAITS)
    if _LOCK_TEXT.search(source_line) and may_wait_for_lock:
        return Wait.LOCK
    return Wait.SLEEP if "nanosleep" in kernel_wait else Wait.NOTHING_KNOWN
