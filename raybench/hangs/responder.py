"""Answers requests in the process of a rank while its main thread is stuck.

Each process has one responder (`of_this_process`) with two memory files, which `processes.py` opens
through /proc/PID/fd:

* STACKS: on a signal, faulthandler writes the stack of the rank's thread. The handler is plain C,
  so it works while C code holds the GIL. A stopped process does not run it. Most system calls
  resume after the signal; `poll` and C's `sleep` return early.
* ANSWERS: a thread writes torch's flight recorder after a request arrives in a pipe. The thread
  needs the GIL and sleeps between requests. `Blocks` writes the progress of the point: 32 bytes
  before and after each block of steps.

torch's own pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE) dumps without the GIL, but only NCCL's groups.

Scripts load this file by its path, so it imports neither raybench nor torch.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

STACKS = "raybench-hang-stacks"
ANSWERS = "raybench-hang-answers"
# Offsets in ANSWERS: facts about this process, header of the last answer, progress, body of the
# answer.
FACTS_AT, HEADER_AT, BLOCKS_AT, BODY_AT = 0, 512, 1024, 1536
# Facts and header are JSON, padded with zeros to this size and written by one call.
JSON_BYTES = 512
# The record of `Blocks`: number of finished blocks, begin of the current block (0: no block runs),
# last change, length of the longest block. Times are ns of the monotonic clock, which all processes
# of a host share.
BLOCKS = struct.Struct("<4q")
# Address of NCCL's RAS service. Each process gets an address of its own unless the user sets one.
RAS_VARIABLE = "NCCL_RAS_ADDR"
# The address that `choose_ras_address` has set; a script must not inherit it from its worker.
CHOSEN_RAS_VARIABLE = "RAYBENCH_RAS_ADDR"
# Name of the Python stack in the body of an answer.
STACK = "stack"
# A request is a number, which its answer repeats.
REQUEST_BYTES = 8
# torch's functions that dump the recorder: of NCCL groups (in builds for CUDA), of other groups.
_DUMP_FUNCTIONS = ("_dump_nccl_trace", "_dump_fr_trace")
# Number of real-time signals that are left to other programs.
_SKIPPED_SIGNALS = 9
_MAX_ERROR_CHARACTERS = 80


class Blocks:
    """Records how many blocks of steps this process has finished in its point."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.restart()

    def restart(self) -> None:
        """Start again at zero, because a point begins or has ended."""
        self._count = self._began_ns = self._longest_ns = 0
        self._write()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record that a block of steps runs; count the block unless it raises."""
        self._began_ns = time.monotonic_ns()
        self._write()
        yield
        self._longest_ns = max(self._longest_ns, time.monotonic_ns() - self._began_ns)
        self._count, self._began_ns = self._count + 1, 0
        self._write()

    def _write(self) -> None:
        changed_ns = time.monotonic_ns()
        record = BLOCKS.pack(self._count, self._began_ns, changed_ns, self._longest_ns)
        os.pwrite(self._file, record, BLOCKS_AT)


class Responder:
    """Answers requests about this process, for as long as the process lives."""

    def __init__(self) -> None:
        """Let other processes read the stack of the calling thread; starts no thread."""
        # Other processes open both memory files through /proc.
        self._stacks_file = os.memfd_create(STACKS)
        self._answers_file = os.memfd_create(ANSWERS)
        self._note_thread()
        # Requests can arrive after `serve` has opened the pipe.
        self._request_pipe: int | None = None
        # On this signal the stack is written; None if no signal is free.
        self._signal = self._register_stack_signal()
        # The progress of the point.
        self.blocks = Blocks(self._answers_file)
        self._write_facts()  # other processes need the numbers of thread, signal and pipe

    def serve(self) -> None:
        """Start the thread that answers requests; later calls do nothing."""
        if self._request_pipe is not None:
            return
        # Keep the write end open: without writers, `os.read` would return at once.
        self._request_pipe, self._write_end = os.pipe()
        threading.Thread(target=self._serve_requests, name="raybench-hangs", daemon=True).start()
        self._write_facts()  # other processes need the number of the pipe

    def watch_this_thread(self) -> None:
        """Answer with the stack of the calling thread from now on."""
        self._note_thread()
        self._write_facts()

    def _note_thread(self) -> None:
        # The kernel and Python number threads differently.
        self._thread_id, self._python_id = threading.get_native_id(), threading.get_ident()

    def _register_stack_signal(self) -> int | None:
        """Register faulthandler for a free signal; return None if no signal is free."""
        # Programs use few real-time signals, and mostly the first ones.
        for number in range(signal.SIGRTMIN + _SKIPPED_SIGNALS, signal.SIGRTMAX + 1):
            if signal.getsignal(number) is signal.SIG_DFL:
                # faulthandler cannot read the frames of other threads safely while they run.
                faulthandler.register(number, file=self._stacks_file, all_threads=False)
                return number
        return None

    def _write_facts(self) -> None:
        """Write how to reach this process to the beginning of the file of answers."""
        facts = {
            "pid": os.getpid(),
            "thread": self._thread_id,
            "signal": self._signal,
            "pipe": self._request_pipe,
            "ras": os.environ.get(RAS_VARIABLE),
        }
        self._write_json(FACTS_AT, facts)

    def _write_json(self, offset: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        os.pwrite(self._answers_file, data.ljust(JSON_BYTES, b"\0"), offset)

    def _serve_requests(self) -> None:
        """Answer each request that arrives in the pipe; never return."""
        assert self._request_pipe is not None
        while True:
            request = int.from_bytes(os.read(self._request_pipe, REQUEST_BYTES), "little")
            # The answer contains the errors of torch. Any other error must not end this thread;
            # the request then gets no answer.
            with suppress(Exception):
                self._write_answer(request)

    def _write_answer(self, request: int) -> None:
        """Write the stack and the dumps, then the header, which marks the answer as complete."""
        # Name of a part (the stack, or torch's dump function) -> its bytes.
        parts = {STACK: self._python_stack()}
        error = ""
        # A process without torch.distributed has no flight recorder.
        torch_distributed = sys.modules.get("torch._C._distributed_c10d")
        for name in _DUMP_FUNCTIONS:
            dump = getattr(torch_distributed, name, None)
            if dump is None:
                continue
            try:
                # With stack traces torch would import its compiler, which may take ten seconds on
                # a busy host.
                parts[name] = dump(
                    includeCollectives=True, includeStackTraces=False, onlyActive=False
                )
            # Each version of torch raises another error, so the answer contains the error as text.
            except Exception as raised:
                error = ascii(raised)[:_MAX_ERROR_CHARACTERS]
        os.pwrite(self._answers_file, b"".join(parts.values()), BODY_AT)
        sizes = {name: len(part) for name, part in parts.items()}
        header = {"request": request, "now_ns": time.time_ns(), "sizes": sizes, "error": error}
        self._write_json(HEADER_AT, header)

    def _python_stack(self) -> bytes:
        """Return the stack of the rank's thread in the format of faulthandler."""
        lines = []
        frame = sys._current_frames().get(self._python_id)
        while frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
            frame = frame.f_back
        return "".join(lines).encode(errors="replace")


_of_process: dict[int, Responder] = {}


def of_this_process() -> Responder:
    """Return the responder of this process; the first call creates it."""
    # A forked child inherits the dictionary, but needs a responder of its own.
    pid = os.getpid()
    if pid not in _of_process:
        _of_process[pid] = Responder()
    return _of_process[pid]


def choose_ras_address() -> None:
    """Set NCCL_RAS_ADDR to a free port of this host, unless the user has set it.

    At NCCL's default address the jobs of a user on this host would answer for each other.
    """
    if RAS_VARIABLE not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        os.environ[RAS_VARIABLE] = os.environ[CHOSEN_RAS_VARIABLE] = address
