"""Makes the process of a rank answer from outside while its main thread is stuck.

A process has one responder, `of_this_process`. It keeps two memory files, which `processes.py`
finds and opens through /proc/PID/fd:

* STACKS, to which faulthandler writes the stack of the rank's thread on a signal. Its handler is
  plain C: it works while C code holds the interpreter lock. A stopped process does not run it.
  System calls go on after it, but for a few, such as `poll` and C's `sleep`, which end early.
* ANSWERS, to which a thread of this process writes torch's flight recorder when a byte arrives in a
  pipe. The thread sleeps in `read` until then. It needs the interpreter lock.

torch's own pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE) would answer without the interpreter lock, but
only for NCCL, and it needs a lock too for Python's stacks; of the ways to hang, only C code that
never gives the lock back would gain by it, and there the stack tells enough.

ANSWERS also says how far the point is (`Blocks`): the rank writes 32 bytes around each block of
steps, and nobody reads them before a point has run for some seconds.

Processes of scripts load this file alone: it imports nothing of raybench and no torch.
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
# Where in ANSWERS: facts on this process, the head of the last answer, the progress, the body of
# the answer. The first two are JSON, each written by one call and filled up with zeros.
FACTS_AT, HEAD_AT, BLOCKS_AT, BODY_AT = 0, 512, 1024, 1536
# The record of `Blocks`: number of ended blocks, begin of the current block (0: no block runs),
# last change, longest block. Times are ns of the monotonic clock, which all processes of a host
# share.
BLOCKS = struct.Struct("<4q")
# Address of NCCL's RAS service. Each process gets an address of its own unless the user sets one.
RAS_VARIABLE = "NCCL_RAS_ADDR"
# The address that `choose_ras_address` has set; a script must not inherit it from its worker.
CHOSEN_RAS_VARIABLE = "RAYBENCH_RAS_ADDR"
# Name of the Python stack in an answer.
STACK = "stack"
# A request is a number, which its answer repeats.
REQUEST_BYTES = 8
# torch's dumps: of NCCL's groups, in builds for CUDA, and of the other ones.
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
# Real-time signals after this number; lower ones are the C library's. Programs use few of them.
_FIRST_SIGNAL = 9


class Blocks:
    """How many blocks of steps this process has finished in its point."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.restart()

    def restart(self) -> None:
        """Forget the blocks so far: a point begins or has ended."""
        self._count = self._begun_ns = self._longest_ns = 0
        self._write()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the `with` block as a block of steps, unless it raises."""
        self._begun_ns = time.monotonic_ns()
        self._write()
        yield
        self._longest_ns = max(self._longest_ns, time.monotonic_ns() - self._begun_ns)
        self._count, self._begun_ns = self._count + 1, 0
        self._write()

    def _write(self) -> None:
        now_ns = time.monotonic_ns()
        state = BLOCKS.pack(self._count, self._begun_ns, now_ns, self._longest_ns)
        os.pwrite(self._file, state, BLOCKS_AT)


class Responder:
    """The answers of this process; one lives as long as the process."""

    def __init__(self) -> None:
        """Let the calling thread's stack be read from outside; starts no thread."""
        self._stacks = os.memfd_create(STACKS)
        self._answers = os.memfd_create(ANSWERS)
        self._note_thread()
        self._pipe: int | None = None
        self._signal = self._register()
        self.blocks = Blocks(self._answers)
        self._write_facts()

    def serve(self) -> None:
        """Start the thread that dumps the flight recorder on request; later calls do nothing."""
        if self._pipe is not None:
            return
        self._pipe, self._keeps_pipe_open = os.pipe()
        threading.Thread(target=self._serve_requests, name="raybench-hangs", daemon=True).start()
        self._write_facts()

    def watch_this_thread(self) -> None:
        """Show the stack of the calling thread from now on."""
        self._note_thread()
        self._write_facts()

    def _note_thread(self) -> None:
        # The kernel and Python number threads differently.
        self._thread_id, self._python_id = threading.get_native_id(), threading.get_ident()

    def _register(self) -> int | None:
        """Return the signal that writes a stack; None where all are taken."""
        for number in range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMAX + 1):
            if signal.getsignal(number) is signal.SIG_DFL:
                # One thread only: the frames of the others change while they are read.
                faulthandler.register(number, file=self._stacks, all_threads=False)
                return number
        return None

    def _write_facts(self) -> None:
        facts = {
            "pid": os.getpid(),
            "thread": self._thread_id,
            "signal": self._signal,
            "pipe": self._pipe,
            "ras": os.environ.get(RAS_VARIABLE),
        }
        self._write(FACTS_AT, facts)

    def _write(self, place: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        os.pwrite(self._answers, data.ljust(HEAD_AT - FACTS_AT, b"\0"), place)

    def _serve_requests(self) -> None:
        assert self._pipe is not None
        while True:
            request = int.from_bytes(os.read(self._pipe, REQUEST_BYTES), "little")
            # `_dump` reports errors of torch in its answer. Any other error must not end this
            # thread; that request then gets no answer.
            with suppress(Exception):
                self._dump(request)

    def _dump(self, request: int) -> None:
        """Write the dumps, and then their head, which completes the answer."""
        stack = self._python_stack()
        os.pwrite(self._answers, stack, BODY_AT)
        sizes, error, place = {STACK: len(stack)}, "", BODY_AT + len(stack)
        torch_part = sys.modules.get("torch._C._distributed_c10d")
        for name in _DUMPS:
            dump = getattr(torch_part, name, None)
            if dump is None:
                continue
            try:
                # No lines of the calls: for them torch would import its compiler, which may take
                # ten seconds on a busy host.
                data = dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
            # Versions of torch raise different errors, so the answer has the error as text.
            except Exception as raised:
                error = ascii(raised)[:80]
                continue
            os.pwrite(self._answers, data, place)
            sizes[name], place = len(data), place + len(data)
        answer = {"request": request, "now_ns": time.time_ns(), "sizes": sizes, "error": error}
        self._write(HEAD_AT, answer)

    def _python_stack(self) -> bytes:
        """Return the stack of the rank's thread in the format of faulthandler."""
        frame, lines = sys._current_frames().get(self._python_id), []
        while frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
            frame = frame.f_back
        return "".join(lines).encode(errors="replace")


_of_process: dict[int, Responder] = {}


def of_this_process() -> Responder:
    """Return the responder of this process; the first call makes it."""
    pid = os.getpid()  # a forked child needs its own
    if pid not in _of_process:
        _of_process[pid] = Responder()
    return _of_process[pid]


def choose_ras_address() -> None:
    """Set NCCL_RAS_ADDR to a free port of this host, unless the user has set it.

    At NCCL's default address all jobs of a user on this host would answer for each other.
    """
    if RAS_VARIABLE not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        os.environ[RAS_VARIABLE] = os.environ[CHOSEN_RAS_VARIABLE] = address
