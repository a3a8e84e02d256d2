"""A script as a process below the worker: its start, what it is asked, and how it ends."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from raybench.errors import DETAIL_CHARACTERS, shorten_start
from raybench.records import Cause, Failure, Samples, Status

_CHILD = Path(__file__).with_name("child.py")
_LOOK_S = 0.05
# For so long after its time is up a script is left alone: the driver looks which rank hangs, and
# ends that one first.
_NAME_S = 1.3
_END_S = 2.0
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
_OUT_OF_MEMORY_WORDS = ("can't allocate memory", "out of memory", "ALLOC_FAILED")


class ScriptFailedError(Exception):
    """The script has failed, so that there is nothing to measure. failure: says how, for rank 0."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ScriptAbortedError(Exception):
    """Another rank has failed, and ended the process group of the worker."""


class ScriptEndedError(Exception):
    """The script came to its end before it was asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a script is to be given up.

    is_aborted: whether another rank has failed. timeout_s: until just before the time of the point
    is up: then the script writes where it is, and the driver sees who hangs.
    """

    is_aborted: Callable[[], bool]
    timeout_s: float


class ScriptProcess:
    """A script that runs until its first step, and then as many steps as it is asked for.

    step_of: as of the workload `script`. environment: all of it. folder: its current directory.
    parts: times in each step of the last block, in ms, by name; only after `mark_parts`.
    peaks: bytes that torch's allocator gave, and took, since `forget_memory`; None on a CPU.
    """

    def __init__(
        self,
        path: Path,
        arguments: Sequence[str],
        *,
        step_of: str,
        environment: Mapping[str, str],
        folder: Path,
        limits: Limits,
    ) -> None:
        self._limits, self._step_of = limits, step_of
        self._deadline_s = time.monotonic() + limits.timeout_s
        self._has_stepped = self._has_ended = self._is_held = False
        self.parts: Mapping[str, Sequence[float]] = {}
        self.peaks: tuple[int | None, int | None] = None, None
        options = json.dumps({"step_of": step_of, "timeout_s": limits.timeout_s})
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-u", str(_CHILD), str(theirs.fileno()), options),
                    *(str(path), *arguments),
                ],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # By which all that it starts is ended with it.
                process_group=0,
            )
        self._socket, self._read = ours, b""
        self._handle = os.pidfd_open(self._process.pid)

    def wait_for_first_step(self) -> Mapping[str, Any]:
        """Wait until an optimizer has stepped, and return the facts that the process then sends.

        Raises ScriptFailedError where the script fails before, and ScriptAbortedError where another
        rank has failed.
        """
        facts: Mapping[str, Any] = self._receive()["begun"]
        self._has_stepped = self._is_held = True
        return facts

    def run_steps(self, iterations: int, *, lead_in: int = 0) -> Samples:
        """Return the times of so many iterations after `lead_in` others; fewer if the script ends.

        Raises ScriptEndedError when it has ended already, and as `wait_for_first_step`.
        """
        if self._has_ended:
            raise ScriptEndedError
        self._send(do="steps", iterations=iterations, lead_in=lead_in)
        self._is_held = False
        try:
            message = self._receive()
        except ScriptEndedError:
            return Samples()
        self._is_held = not self._has_ended
        taken = message["samples"]
        self.peaks = taken["allocated_bytes"], taken["reserved_bytes"]
        self.parts = taken["parts"]
        return Samples(
            start_ns=tuple(taken["start_ns"]),
            step_ns=tuple(taken["step_ns"]),
            host_ns=tuple(taken["host_ns"]),
        )

    def forget_memory(self) -> None:
        """Reset the peaks of memory."""
        self._send(do="forget_memory")

    def mark_parts(self, module: str, *, has_peers: bool) -> str:
        """Time the parts of later steps; return why that is not possible, else an empty text.

        `parts` has them after each block. module: its class `ScriptMarks` times them in the script.
        has_peers: also time how gradients are reduced. Raises as `run_steps`.
        """
        if self._has_ended:
            raise ScriptEndedError
        self._send(do="mark_parts", how={"module": module, "has_peers": has_peers})
        return str(self._receive()["why_not"])

    def time_gradients(self) -> None:
        """Have DDP reduce gradients in a way that takes the time; only where `mark_parts` can."""
        self._send(do="time_gradients")

    def keep_gradients(self) -> None:
        """Have DDP leave gradients as each rank has them."""
        self._send(do="keep_gradients")

    def end(self) -> None:
        """End the script where it is, and all that it has started."""
        started: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # while they have not lost their parent
            started = psutil.Process(self._process.pid).children(recursive=True)
        self._send(do="end")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S if self._is_held else 0.0)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._socket.close()
        os.close(self._handle)

    def _send(self, **message: Any) -> None:
        # Where the process has ended, that is the next message.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> dict[str, Any]:
        """Wait for the next message. Raises as `wait_for_first_step`, and ScriptEndedError."""
        sources = self._socket.fileno(), self._handle
        while True:
            # Just after the time is up the driver sees who hangs.
            over_s = time.monotonic() - self._deadline_s
            if not 0 <= over_s < _NAME_S and self._limits.is_aborted():
                raise ScriptAbortedError
            ready, _, _ = select.select(sources, [], [], _LOOK_S)
            if sources[0] in ready:
                if (message := self._next_message()) is not None:
                    return self._check(message)
            elif ready:  # what it has started may hold its end of the socket
                return self._check({"ended": {"code": self._process.wait(), "samples": None}})

    def _next_message(self) -> dict[str, Any] | None:
        """Receive once, and return the next message; None while its line is not whole.

        Where the script has closed its end, waits for the process to end, for a few seconds, and
        returns a message `ended` with its exit code.
        """
        try:
            read = self._socket.recv(1 << 20)
        except ConnectionResetError:
            read = b""
        if not read:
            select.select([self._handle], [], [], _END_S)
            return {"ended": {"code": self._process.poll(), "samples": None}}
        self._read += read
        line, newline, rest = self._read.partition(b"\n")
        if not newline:
            return None
        self._read = rest
        message: dict[str, Any] = json.loads(line)
        return message

    def _check(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message that goes on with the script; raise for one that tells of its end."""
        if "raised" in message:
            raise ScriptFailedError(_error_of_script(message["raised"]))
        if "ended" not in message:
            return message
        self._has_ended = True
        ended = message["ended"]
        if failure := self._why_failed(ended):
            raise ScriptFailedError(failure)
        if not ended["samples"]:
            raise ScriptEndedError
        return {"samples": ended["samples"]}

    def _why_failed(self, ended: Mapping[str, Any]) -> Failure | None:
        """Return the failure that an end is; None for one after which the steps count."""
        code = ended["code"]
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return _failure(Cause.WORKER_DIED, f"the process of the script died by {name}")
        if code:
            return _failure(Cause.SCRIPT_EXIT, f"the script ended with exit code {code}")
        if not self._has_stepped:
            return _failure(Cause.NO_STEPS, self._why_no_steps(ended.get("optimizers", ())))
        return None

    def _why_no_steps(self, optimizers: Sequence[str]) -> str:
        if optimizers:
            return (
                f"no optimizer {self._step_of} has stepped, by which step_of ends an iteration; "
                f"those that did: {', '.join(optimizers)}"
            )
        return (
            "the script ended and no optimizer of torch.optim has stepped: an iteration ends "
            "where Optimizer.step returns"
        )


def _failure(cause: Cause, message: str) -> Failure:
    return Failure.of(cause, rank=0, message=message, worker_reusable=True)


def _error_of_script(told: Mapping[str, Any]) -> Failure:
    """Return what the script raised, as if the worker's workload had."""
    message = told["message"].strip()
    is_oom = not set(_OUT_OF_MEMORY).isdisjoint(told["bases"]) or (
        "RuntimeError" in told["bases"] and any(word in message for word in _OUT_OF_MEMORY_WORDS)
    )
    return Failure(
        rank=0,
        status=Status.OOM if is_oom else Status.ERROR,
        error_type=told["type"],
        message=next(iter(message.splitlines()), "") or f"{told['type']}: no message",
        detail=shorten_start(told["traceback"], DETAIL_CHARACTERS),
        # What it did to its device has ended with its process.
        worker_reusable=True,
    )
