"""What the system knows of a process, and what its responder answers. Linux; never raises."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from raybench.hangs import responder

_POLL_S = 0.02
_NS_PER_S = 1e9
_ENDED_STATES = ("Z", "X", "")


class NoAnswer(StrEnum):
    """Why a process told nothing of its flight recorder."""

    NO_RESPONDER = "no_responder"
    NOT_RUNNING = "not_running"
    LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Facts from /proc about a process and the thread that runs the rank."""

    pid: int
    # As in /proc/PID/stat: R, S, D, T, ...; empty if the process is gone.
    state: str
    # The function of the kernel in which the thread waits; empty if unknown.
    kernel_wait: str = ""
    # CPU time of the thread, or of all threads if the thread is unknown.
    cpu_s: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Return whether the process is gone, or a zombie."""
        return self.state in _ENDED_STATES

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal or a debugger has stopped it."""
        return self.state in ("T", "t")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumps:
    """The answer of a responder."""

    now_ns: int
    # Name of torch's function -> its dump, a pickle.
    data: dict[str, bytes]
    # Python's stack of the rank's thread, as faulthandler would write it.
    stack: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAnswer:
    """All that was learnt of a process."""

    facts: ProcessFacts
    # Of faulthandler, or of the responder where no signal was sent; empty where nothing came.
    stack: str = ""
    dumps: Dumps | NoAnswer = NoAnswer.NO_RESPONDER


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProgress:
    """How far a worker is in its point, as `responder.Blocks` tells."""

    # Blocks of steps that have ended.
    blocks: int
    is_in_block: bool
    # Since a block began or ended.
    age_s: float
    longest_block_s: float


def read_progress(worker_pid: int) -> BlockProgress | None:
    """Return how far a worker of this host is; None where it does not tell."""
    found = _Responding.find(worker_pid)
    if found is None:
        return None
    try:
        return found.read_progress()
    finally:
        found.close()


def ras_address(pids: Iterable[int]) -> tuple[str, int] | None:
    """Return where NCCL's service of the first of these processes that runs listens, if known."""
    for pid in pids:
        found = _Responding.find(pid)
        if found is None:
            continue
        address = found.ras
        found.close()
        host, _, port = (address or "").rpartition(":")
        if host and port.isdecimal() and not read_facts(pid).is_stopped:
            return host.strip("[]"), int(port)
    return None


def rank_process(worker_pid: int) -> int:
    """Return the process that runs the rank of a worker: its script's, else the worker's own."""
    with suppress(psutil.Error):
        children = psutil.Process(worker_pid).children(recursive=True)
        for child in children:  # parents come before their children
            if _Responding.find(child.pid) is not None:
                return child.pid
    return worker_pid


def ask(pids: Sequence[int], timeout_s: float) -> tuple[ProcessAnswer, ...]:
    """Ask these processes of this host at once, and return their answers in the same order."""
    deadline_s = time.monotonic() + timeout_s
    asked = [_Question(pid) for pid in pids]
    # A list: each look reads what has come of all.
    while any([question.is_open for question in asked]) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    answers = tuple(question.answer() for question in asked)
    for question in asked:
        question.close()
    return answers


class _Question:
    """One process that was asked for its stack and its flight recorder."""

    def __init__(self, pid: int) -> None:
        self._responding = _Responding.find(pid)
        self._facts = read_facts(pid, self._responding.thread if self._responding else None)
        self._stack = ""
        self._dumps: Dumps | None = None
        self._request = time.time_ns()
        self._is_asked = self._waits_for_stack = self._waits_for_dumps = False
        # A stopped process would only answer once it goes on.
        if self._responding and not self._facts.has_ended and not self._facts.is_stopped:
            self._is_asked = True
            self._waits_for_stack = self._responding.ask_stack()
            self._waits_for_dumps = self._responding.ask_dumps(self._request)

    @property
    def is_open(self) -> bool:
        """Return whether an answer is still to come; reads what has come."""
        if self._responding is None:
            return False
        if self._waits_for_stack:
            self._stack = self._responding.read_stack()
            self._waits_for_stack = not self._stack
        if self._waits_for_dumps:
            self._dumps = self._responding.read_dumps(self._request)
            self._waits_for_dumps = self._dumps is None
        return self._waits_for_stack or self._waits_for_dumps

    def answer(self) -> ProcessAnswer:
        dumps: Dumps | NoAnswer | None = self._dumps
        if dumps is None and self._responding is None:
            dumps = NoAnswer.NO_RESPONDER
        elif dumps is None:
            dumps = NoAnswer.LATE if self._is_asked else NoAnswer.NOT_RUNNING
        stack = self._stack or (self._dumps.stack if self._dumps else "")
        return ProcessAnswer(facts=self._facts, stack=stack, dumps=dumps)

    def close(self) -> None:
        if self._responding is not None:
            self._responding.close()


class _Responding:
    """The responder of another process, through the files that it holds open."""

    def __init__(self, pid: int, facts: dict[str, Any], stacks: int, answers: int) -> None:
        self._pid, self._facts = pid, facts
        self._stacks, self._answers = stacks, answers
        self.thread: int = facts["thread"]
        self.ras: str | None = facts.get("ras")
        self._stack_at = os.fstat(stacks).st_size

    @classmethod
    def find(cls, pid: int) -> _Responding | None:
        """Return the responder of the process; None if the process has no responder."""
        files = dict(_memory_files(pid))
        if not {responder.STACKS, responder.ANSWERS} <= files.keys():
            return None
        opened = []
        try:
            for name in (responder.STACKS, responder.ANSWERS):
                opened.append(os.open(files[name], os.O_RDONLY))
            facts = _read_json(opened[1], responder.FACTS_AT)
            # A forked child holds the files of its parent.
            if facts and facts["pid"] == pid:
                return cls(pid, facts, *opened)
        except (OSError, KeyError):
            pass
        for file in opened:
            os.close(file)
        return None

    def ask_stack(self) -> bool:
        """Send the signal; return whether a stack will follow."""
        number = self._facts["signal"]
        # Without its handler, which the program may have replaced, the signal ends the process.
        if number is None or not has_handler(Path(f"/proc/{self._pid}/status"), number):
            return False
        # To the thread that runs the rank, which need not be the main one.
        failed: int = ctypes.CDLL(None).tgkill(self._pid, self.thread, number)
        return not failed

    def ask_dumps(self, request: int) -> bool:
        """Write the request to the pipe; return whether an answer will follow."""
        if self._facts["pipe"] is None:
            return False
        try:
            path = f"/proc/{self._pid}/fd/{self._facts['pipe']}"
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        with _closing(pipe), suppress(OSError):
            os.write(pipe, request.to_bytes(responder.REQUEST_BYTES, "little"))
            return True
        return False

    def read_stack(self) -> str:
        """Return the stack that came since the responder was found; empty before its end."""
        size = os.fstat(self._stacks).st_size - self._stack_at
        text = os.pread(self._stacks, size, self._stack_at).decode(errors="replace")
        # faulthandler writes a line in pieces, so only text that has stopped growing is complete.
        is_whole = text.endswith("\n") and size == os.fstat(self._stacks).st_size - self._stack_at
        return text if is_whole and text.count("\n") > 1 else ""

    def read_dumps(self, request: int) -> Dumps | None:
        """Return the answer to the request; None before it is complete."""
        head = _read_json(self._answers, responder.HEAD_AT)
        if not head or head.get("request") != request:
            return None
        data, place = {}, responder.BODY_AT
        for name, size in head["sizes"].items():
            data[name] = os.pread(self._answers, size, place)
            place += size
        stack = data.pop(responder.STACK).decode(errors="replace")
        return Dumps(now_ns=head["now_ns"], data=data, stack=stack, error=head["error"])

    def read_progress(self) -> BlockProgress | None:
        data = os.pread(self._answers, responder.BLOCKS.size, responder.BLOCKS_AT)
        if len(data) < responder.BLOCKS.size:
            return None
        blocks, begun_ns, last_ns, longest_ns = responder.BLOCKS.unpack(data)
        return BlockProgress(
            blocks=blocks,
            is_in_block=begun_ns > 0,
            age_s=(time.monotonic_ns() - last_ns) / _NS_PER_S,
            longest_block_s=longest_ns / _NS_PER_S,
        )

    def close(self) -> None:
        os.close(self._stacks)
        os.close(self._answers)


@contextmanager
def _closing(file: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(file)


def _memory_files(pid: int) -> Iterable[tuple[str, str]]:
    """Yield name and path of each memory file that the process holds open."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("/memfd:"):
                    yield target.removeprefix("/memfd:").removesuffix(" (deleted)"), str(entry)


def _read_json(file: int, place: int) -> dict[str, Any] | None:
    data = os.pread(file, responder.HEAD_AT - responder.FACTS_AT, place).rstrip(b"\0")
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_facts(pid: int, thread: int | None = None) -> ProcessFacts:
    """Return what /proc tells of the process; a state of "" where there is none."""
    process = Path(f"/proc/{pid}")
    of_thread = process / "task" / str(thread or pid)
    fields = _stat(process)
    if not fields:
        return ProcessFacts(pid=pid, state="")
    state, wait = fields[0], ""
    if thread_fields := _stat(of_thread):
        fields = thread_fields
        # "D" or "R" of the thread tells more than that of another one; stopped are all of them.
        state = state if state in ("T", "t", "Z", "X") else fields[0]
    with suppress(OSError):
        wait = (of_thread / "wchan").read_text().strip("0 \n")
    ticks = int(fields[11]) + int(fields[12])
    cpu_s = ticks / os.sysconf("SC_CLK_TCK")
    return ProcessFacts(pid=pid, state=state, kernel_wait=wait, cpu_s=cpu_s)


def _stat(folder: Path) -> list[str]:
    """Return the fields of `stat` from the state on; empty where it cannot be read."""
    try:
        text = (folder / "stat").read_text(errors="replace")
    except OSError:
        return []
    # The name before it, in brackets, may hold blanks and brackets.
    return text.rpartition(")")[2].split()


def has_handler(status: Path, number: int) -> bool:
    """Return whether the kernel says that a process has a handler for the signal.

    Args:
        status: /proc/PID/status of the process. gVisor's file does not list handlers.
    """
    try:
        text = status.read_text(errors="replace")
    except OSError:
        return False
    for line in text.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
