"""Reads Python stacks: where a rank is, and for what it waits there."""

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
_LOCK_FILES = ("/threading.py", "/queue.py", "/multiprocessing/synchronize.py", "/filelock/_api.py")
_LOCK_TEXT = re.compile(r"\.acquire\(|\bflock\(|\blockf\(|\bwith\b.*lock", re.IGNORECASE)
# torch compiles while one of these files is on the stack.
_COMPILERS = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/_inductor/async_compile.py",
    "/triton/compiler/compiler.py",
    "/triton/runtime/autotuner.py",
)
_SLEEP_TEXT = re.compile(r"\bsleep\(")
# Calls whose C++ code waits for the device.
_DEVICE_TEXT = re.compile(r"\.(item|cpu|tolist|synchronize)\(")
_LOCK_WAITS = ("futex", "locks_lock", "flock", "fcntl_setlk", "posix_lock")


class Wait(StrEnum):
    """For what a thread waits, as far as its stack and the system tell."""

    SLEEP = "sleep"
    LOCK = "lock"
    DATA = "data"
    # Other ranks, in a collective or in a backward pass.
    PEERS = "peers"
    # Its worker: the script has finished its block of steps.
    BLOCK_END = "block_end"
    # Its point has no more steps: the rank has answered.
    POINT_END = "point_end"
    DEVICE = "device"
    # It compiles, which may take minutes on one rank only.
    COMPILER = "compiler"
    # It computes, or waits for something else.
    NOTHING_KNOWN = "nothing_known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line of a stack."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{PurePath(self.path).name}:{self.line}"

    @property
    def text(self) -> str:
        """Return the source of the line, on a host that has the file; else empty."""
        return linecache.getline(self.path, self.line).strip()


def read(text: str) -> tuple[Frame, ...]:
    """Return the frames of a stack that faulthandler wrote, the innermost first."""
    found = (_FRAME.match(line) for line in text.splitlines())
    return tuple(
        Frame(path=match["path"], line=int(match["line"]), function=match["function"])
        for match in found
        if match
    )


def place_of(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame in the user's code or a built-in workload; None without one."""
    return next(filter(_is_users, frames), None)


def _is_users(frame: Frame) -> bool:
    # A checkout or an installed package: its workloads are what is measured.
    if frame.path.startswith(_RAYBENCH):
        return frame.path.startswith(_WORKLOADS) and frame.path != _SCRIPT_CHILD
    return not _LIBRARY.search(frame.path)


def wait_of(frames: Sequence[Frame], kernel_wait: str = "") -> Wait:
    """Return for what the thread waits. kernel_wait: as in `ProcessFacts`."""
    if not frames:
        return Wait.SLEEP if "nanosleep" in kernel_wait else Wait.NOTHING_KNOWN
    inner = frames[0]
    if any(frame.path.endswith(_COMPILERS) for frame in frames):
        return Wait.COMPILER
    if any("/torch/utils/data/" in frame.path for frame in frames):
        return Wait.DATA
    if "/torch/distributed/" in inner.path or "/torch/autograd/" in inner.path:
        return Wait.PEERS
    if any(frame.path == _SCRIPT_CHILD and frame.function == "receive" for frame in frames):
        return Wait.BLOCK_END
    if "/torch/cuda/" in inner.path and inner.function == "synchronize":
        return Wait.DEVICE
    if inner.path.endswith(_LOCK_FILES):
        return Wait.LOCK
    text = inner.text
    if _DEVICE_TEXT.search(text):
        return Wait.DEVICE
    if _SLEEP_TEXT.search(text) or (not text and "nanosleep" in kernel_wait):
        return Wait.SLEEP
    is_asleep_on_lock = not kernel_wait or any(name in kernel_wait for name in _LOCK_WAITS)
    if _LOCK_TEXT.search(text) and is_asleep_on_lock:
        return Wait.LOCK
    return Wait.SLEEP if "nanosleep" in kernel_wait else Wait.NOTHING_KNOWN
