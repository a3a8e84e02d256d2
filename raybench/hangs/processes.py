"""Reads /proc about a process, and asks its responder. Linux only; never raises."""

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
# States of a process in /proc/PID/stat: zombie, dead, no such process.
_ENDED_STATES = ("Z", "X", "")
# Stopped by a signal; stopped by a debugger.
_STOPPED_STATES = ("T", "t")
# Fields of /proc/PID/stat, counted from the state: utime and stime of proc(5).
_USER_TICKS, _SYSTEM_TICKS = 11, 12


class NoAnswer(StrEnum):
    """Why a process did not dump its flight recorder."""

    NO_RESPONDER = "no_responder"
    # The process has ended or is stopped.
    NOT_RUNNING = "not_running"
    LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Facts from /proc about a process and the thread that runs the rank."""

    pid: int
    # A letter of /proc/PID/stat: R, S, D, T, ...; empty if the process is gone.
    state: str
    # Kernel function in which the thread waits, if known.
    kernel_wait: str = ""
    # CPU time of the thread, or of all threads if the thread is unknown.
    cpu_s: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Return whether the process is gone, or a zombie."""
        return self.state in _ENDED_STATES

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal or a debugger has stopped the process."""
        return self.state in _STOPPED_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumps:
    """Flight recorder and stack, dumped by the responder of a process."""

    # When the responder dumped them, by `time.time_ns`.
    now_ns: int
    # Name of torch's dump function -> its pickle.
    data: dict[str, bytes]
    # Python stack of the rank's thread in the format of faulthandler.
    stack: str = ""
    # Error of torch's dump function.
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAnswer:
    """Facts, stack and dumps of a process."""

    facts: ProcessFacts
    # Written by faulthandler, else by the responder; empty if neither wrote a stack in time.
    stack: str = ""
    dumps: Dumps | NoAnswer = NoAnswer.NO_RESPONDER


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProgress:
    """How far a worker is in its point, from the record of `responder.Blocks`."""

    # Number of finished blocks of steps.
    blocks: int
    is_in_block: bool
    # Seconds since a block began or ended.
    age_s: float
    longest_block_s: float


def read_progress(worker_pid: int) -> BlockProgress | None:
    """Return how far a worker of this host is; None if the process has no responder."""
    files = _ResponderFiles.find(worker_pid)
    if files is None:
        return None
    try:
        return files.read_progress()
    finally:
        files.close()


def find_ras_address(pids: Iterable[int]) -> tuple[str, int] | None:
    """Return the address of NCCL's RAS service in the first running process that has an address."""
    for pid in pids:
        files = _ResponderFiles.find(pid)
        if files is None:
            continue
        address = files.ras_address or ""
        files.close()
        host, _, port = address.rpartition(":")
        if host and port.isdecimal() and not read_facts(pid).is_stopped:
            return host.strip("[]"), int(port)
    return None


def rank_process(worker_pid: int) -> int:
    """Return the process that runs the rank of a worker: the script, else the worker itself."""
    with suppress(psutil.Error):
        # psutil lists parents before their children, so the script comes before its data loaders.
        for child in psutil.Process(worker_pid).children(recursive=True):
            files = _ResponderFiles.find(child.pid)
            if files is not None:
                files.close()
                return child.pid
    return worker_pid


def ask(pids: Sequence[int], timeout_s: float) -> tuple[ProcessAnswer, ...]:
    """Ask processes of this host for stack and flight recorder; return answers in this order."""
    deadline_s = time.monotonic() + timeout_s
    requests = [_PendingRequest(pid) for pid in pids]
    while True:
        for request in requests:
            request.poll()
        if all(request.is_complete for request in requests) or time.monotonic() >= deadline_s:
            break
        time.sleep(_POLL_S)
    answers = tuple(request.answer() for request in requests)
    for request in requests:
        request.close()
    return answers


class _PendingRequest:
    """A request to one process for its stack and its flight recorder."""

    def __init__(self, pid: int) -> None:
        """Send the request, unless the process has no responder or does not run."""
        self._responder_files = _ResponderFiles.find(pid)
        thread = self._responder_files.thread if self._responder_files else None
        self._facts = read_facts(pid, thread)
        self._stack = ""
        self._dumps: Dumps | None = None
        self._request_id = time.time_ns()
        self._is_sent = self._awaits_stack = self._awaits_dumps = False
        # A stopped process would answer only after it is continued.
        if self._responder_files and not self._facts.has_ended and not self._facts.is_stopped:
            self._is_sent = True
            self._awaits_stack = self._responder_files.request_stack()
            self._awaits_dumps = self._responder_files.request_dumps(self._request_id)

    @property
    def is_complete(self) -> bool:
        return not (self._awaits_stack or self._awaits_dumps)

    def poll(self) -> None:
        """Read the parts of the answer that have arrived."""
        if self._responder_files is None:
            return
        if self._awaits_stack:
            self._stack = self._responder_files.read_stack()
            self._awaits_stack = not self._stack
        if self._awaits_dumps:
            self._dumps = self._responder_files.read_dumps(self._request_id)
            self._awaits_dumps = self._dumps is None

    def answer(self) -> ProcessAnswer:
        """Return the parts of the answer that have been read."""
        if self._dumps is not None:
            stack = self._stack or self._dumps.stack
            return ProcessAnswer(facts=self._facts, stack=stack, dumps=self._dumps)
        if self._responder_files is None:
            reason = NoAnswer.NO_RESPONDER
        else:
            # Processes that have ended or are stopped get no request.
            reason = NoAnswer.LATE if self._is_sent else NoAnswer.NOT_RUNNING
        return ProcessAnswer(facts=self._facts, stack=self._stack, dumps=reason)

    def close(self) -> None:
        if self._responder_files is not None:
            self._responder_files.close()


class _ResponderFiles:
    """The memory files of another process's responder, opened through /proc/PID/fd."""

    def __init__(
        self, pid: int, facts: dict[str, Any], stacks_file: int, answers_file: int
    ) -> None:
        self._pid = pid
        # What the responder has written about itself: pid, thread, signal, pipe, ras.
        self._facts = facts
        # File descriptors.
        self._stacks_file, self._answers_file = stacks_file, answers_file
        self.thread: int = facts["thread"]
        self.ras_address: str | None = facts.get("ras")
        # The stacks of earlier requests end here.
        self._stack_begin = os.fstat(stacks_file).st_size

    @classmethod
    def find(cls, pid: int) -> _ResponderFiles | None:
        """Open the files of the responder; None if the process has no responder of its own."""
        paths = dict(_memory_files(pid))
        if responder.STACKS not in paths or responder.ANSWERS not in paths:
            return None
        opened = []
        try:
            stacks_file = os.open(paths[responder.STACKS], os.O_RDONLY)
            opened.append(stacks_file)
            answers_file = os.open(paths[responder.ANSWERS], os.O_RDONLY)
            opened.append(answers_file)
            facts = _read_json(answers_file, responder.FACTS_AT)
            # A forked child has the files of its parent open.
            if facts and facts["pid"] == pid:
                return cls(pid, facts, stacks_file, answers_file)
        except (OSError, KeyError):
            pass
        for file in opened:
            os.close(file)
        return None

    def request_stack(self) -> bool:
        """Send the signal of faulthandler; return whether a stack will follow."""
        signal_number = self._facts["signal"]
        # The program may have removed the handler; the signal would then end the process.
        status = Path(f"/proc/{self._pid}/status")
        if signal_number is None or not has_handler(status, signal_number):
            return False
        # The thread that runs the rank need not be the main thread.
        failed: int = ctypes.CDLL(None).tgkill(self._pid, self.thread, signal_number)
        return not failed

    def request_dumps(self, request_id: int) -> bool:
        """Write the request into the responder's pipe; return whether an answer will follow."""
        if self._facts["pipe"] is None:
            return False
        try:
            path = f"/proc/{self._pid}/fd/{self._facts['pipe']}"
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        with _closing(pipe), suppress(OSError):
            os.write(pipe, request_id.to_bytes(responder.REQUEST_BYTES, "little"))
            return True
        return False

    def read_stack(self) -> str:
        """Return the new stack; empty while it is incomplete."""
        end = os.fstat(self._stacks_file).st_size
        size = end - self._stack_begin
        text = os.pread(self._stacks_file, size, self._stack_begin).decode(errors="replace")
        # faulthandler writes a line in pieces, so only text that has stopped growing is complete.
        has_grown = os.fstat(self._stacks_file).st_size > end
        # The first line is a heading.
        has_frames = text.count("\n") > 1
        is_complete = text.endswith("\n") and has_frames and not has_grown
        return text if is_complete else ""

    def read_dumps(self, request_id: int) -> Dumps | None:
        """Return the answer to the request; None while it is incomplete."""
        # The responder writes this header last.
        header = _read_json(self._answers_file, responder.HEADER_AT)
        if not header or header.get("request") != request_id:
            return None
        # Name of a part (the stack, or torch's dump function) -> its bytes.
        data, offset = {}, responder.BODY_AT
        for name, size in header["sizes"].items():
            data[name] = os.pread(self._answers_file, size, offset)
            offset += size
        stack = data.pop(responder.STACK).decode(errors="replace")
        return Dumps(now_ns=header["now_ns"], data=data, stack=stack, error=header["error"])

    def read_progress(self) -> BlockProgress | None:
        """Return how many blocks of steps the process has finished; None before its first write."""
        data = os.pread(self._answers_file, responder.BLOCKS.size, responder.BLOCKS_AT)
        if len(data) < responder.BLOCKS.size:
            return None
        finished_blocks, began_ns, changed_ns, longest_ns = responder.BLOCKS.unpack(data)
        return BlockProgress(
            blocks=finished_blocks,
            is_in_block=began_ns > 0,  # 0 between blocks
            age_s=(time.monotonic_ns() - changed_ns) / _NS_PER_S,
            longest_block_s=longest_ns / _NS_PER_S,
        )

    def close(self) -> None:
        os.close(self._stacks_file)
        os.close(self._answers_file)


@contextmanager
def _closing(file: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(file)


def _memory_files(pid: int) -> Iterable[tuple[str, str]]:
    """Yield name and path of each memory file that the process has open."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("/memfd:"):
                    yield target.removeprefix("/memfd:").removesuffix(" (deleted)"), str(entry)


def _read_json(file: int, offset: int) -> dict[str, Any] | None:
    """Return the object that a responder wrote at this offset, if there is one."""
    data = os.pread(file, responder.JSON_BYTES, offset).rstrip(b"\0")
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_facts(pid: int, thread: int | None = None) -> ProcessFacts:
    """Read /proc about a process; the state is empty if the process is gone.

    Args:
        thread: the kernel's id of the thread that runs the rank; by default the main thread.
    """
    process_folder = Path(f"/proc/{pid}")
    thread_folder = process_folder / "task" / str(thread or pid)
    process_stat = _read_stat(process_folder)
    if not process_stat:
        return ProcessFacts(pid=pid, state="")
    stat = _read_stat(thread_folder) or process_stat
    # A stopped or ended process has stopped all its threads; otherwise the thread's state counts.
    is_process_state = process_stat[0] in (*_STOPPED_STATES, *_ENDED_STATES)
    state = process_stat[0] if is_process_state else stat[0]
    kernel_wait = ""
    with suppress(OSError):
        # The kernel writes "0" while the thread runs.
        kernel_wait = (thread_folder / "wchan").read_text().strip("0 \n")
    ticks = int(stat[_USER_TICKS]) + int(stat[_SYSTEM_TICKS])
    cpu_s = ticks / os.sysconf("SC_CLK_TCK")
    return ProcessFacts(pid=pid, state=state, kernel_wait=kernel_wait, cpu_s=cpu_s)


def _read_stat(folder: Path) -> list[str]:
    """Return the fields of the file `stat` from the state on; empty if it cannot be read."""
    try:
        text = (folder / "stat").read_text(errors="replace")
    except OSError:
        return []
    # The program's name stands before the state, in brackets, and may hold blanks and brackets.
    return text.rpartition(")")[2].split()


def has_handler(status: Path, signal_number: int) -> bool:
    """Return whether a process has a handler for the signal; False on gVisor, which lists none.

    Args:
        status: /proc/PID/status of the process.
    """
    try:
        text = status.read_text(errors="replace")
    except OSError:
        return False
    for line in text.splitlines():
        if line.startswith("SigCgt:"):
            # A mask in hexadecimal, whose lowest bit is signal 1.
            handled_signals = int(line.split()[1], 16)
            return bool(handled_signals >> (signal_number - 1) & 1)
    return False
