"""The child processes of a quick check: started at once, asked together, killed at a deadline.

Nothing here waits without a limit: a signal cannot interrupt a stuck driver call, and a process in
such a call does not even end when it is killed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from raybench.errors import shorten_start
from raybench.hangs.processes import ProcessFacts, read_facts
from raybench.health.quick.messages import Inbox, send
from raybench.records.device import DeviceKind
from raybench.records.environment import path_to_raybench

_OUTPUT_CHARACTERS = 300
# A child without a request ends at once when the check closes its socket.
_END_S = 1.0
# As for workers in Ray: when a peer dies, NCCL's watchdog must not keep a survivor for a minute.
_VARIABLES = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A child ended before it answered."""

    # Negative: minus the signal that ended it.
    exit_code: int
    # Its last line of output; may be empty.
    last_line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A child did not answer in time, and was killed."""

    # What the kernel said of the child before it was killed.
    facts: ProcessFacts
    # Time since the last message or request.
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What came of a request to several children."""

    # Child -> its answer.
    received: Mapping[Child, Any]
    # Child -> why it has no answer; these children have ended.
    lost: Mapping[Child, Death | Silence]


def _open_output() -> IO[bytes]:
    """Return a file for the output of a child; its owner closes it."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        # A full or read-only disk must not end the check.
        return Path(os.devnull).open("w+b")


class Child:
    """A child process with a socket to it."""

    def __init__(self, module: str, *arguments: str) -> None:
        """Start the module; its last argument is the descriptor of its end of the socket."""
        self._channel, theirs = socket.socketpair()
        self._output = _open_output()
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **path_to_raybench(),
            **_VARIABLES,
        }
        with theirs:
            # -P: a module in the working directory, such as torch.py, is not of this installation,
            # and root may run the check. Start a new session, so that its children are killed
            # with it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        self._inbox = Inbox(self._channel)
        # Messages that have arrived, and that `take_message` has not returned yet.
        self._arrived: list[Any] = []
        # When a message was last sent or taken, by `time.monotonic`.
        self._last_message_s = time.monotonic()

    @property
    def process_id(self) -> int:
        """Id of the process, which is also the id of its process group."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor of the socket, for `select`."""
        return self._channel.fileno()

    def send(self, message: object) -> None:
        """Send a message; a child that has ended gets nothing."""
        self._last_message_s = time.monotonic()
        with suppress(OSError):
            send(self._channel, message)

    def take_message(self) -> Any | None:
        """Return the next message that has arrived; None if there is none."""
        self._arrived += self._inbox.read()
        if not self._arrived:
            return None
        self._last_message_s = time.monotonic()
        return self._arrived.pop(0)

    @property
    def has_hung_up(self) -> bool:
        """Whether no further message can come."""
        return self._inbox.has_ended and not self._arrived

    def death(self) -> Death:
        """Return how the process ended; call it after `has_hung_up`."""
        try:
            exit_code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            # The process closed its socket and still runs, so there is no exit code.
            self.kill()
            exit_code = 0
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        last_line = shorten_start(lines[-1], _OUTPUT_CHARACTERS) if lines else ""
        return Death(exit_code=exit_code, last_line=last_line)

    def silence(self) -> Silence:
        """Return what the kernel says of the process, and kill it."""
        waited_s = time.monotonic() - self._last_message_s
        silence = Silence(facts=read_facts(self.process_id), waited_s=waited_s)
        self.kill()
        return silence

    def kill(self) -> None:
        """Kill the process and its children; do not wait, because it may hang in the driver."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process_id, signal.SIGKILL)

    def hang_up(self) -> None:
        """Close the socket, whereupon an idle child ends."""
        self._channel.close()
        self._output.close()

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None


def start_device_process(kind: DeviceKind, index: int) -> Child:
    """Start the process of a device; it sends `Imported`, then `Started` or `NotStarted`."""
    return Child("raybench.health.quick.device_process", kind, str(index))


def start_node_process() -> Child:
    """Start the process that looks at the node."""
    return Child("raybench.health.quick.node_process")


def ask(requests: Mapping[Child, object], deadline_s: float) -> Answers:
    """Send each child its request, and return what came of it.

    Args:
        deadline_s: when to kill children without an answer, by `time.monotonic`.
    """
    for child, request in requests.items():
        child.send(request)
    return collect(requests, deadline_s)


def collect(children: Iterable[Child], deadline_s: float) -> Answers:
    """Wait for one message of each child; kill a child without a message at the deadline."""
    waiting = list(children)
    received: dict[Child, Any] = {}
    lost: dict[Child, Death | Silence] = {}
    while waiting:
        for child in list(waiting):
            message = child.take_message()
            if message is not None:
                received[child] = message
            elif child.has_hung_up:
                lost[child] = child.death()
            else:
                continue
            waiting.remove(child)
        left_s = deadline_s - time.monotonic()
        if not waiting or left_s <= 0:
            break
        select.select(waiting, [], [], left_s)
    lost |= {child: child.silence() for child in waiting}
    return Answers(received=received, lost=lost)


def end_all(children: Sequence[Child]) -> None:
    """End all children; wait up to a second, because devices should be free afterwards."""
    for child in children:
        child.hang_up()
    deadline_s = time.monotonic() + _END_S
    while not all(child.has_ended() for child in children) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    for child in children:
        if not child.has_ended():
            child.kill()
