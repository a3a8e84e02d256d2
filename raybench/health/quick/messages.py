"""Messages between the check and its child processes: pickles over a socket, read without waiting.

A child may stop in the middle of a message, so the check never waits for the rest of a message.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raybench.records.device import Device
from raybench.records.devices import DeviceFacts
from raybench.records.other_program import OtherProgram
from raybench.records.task import GroupSpec, RankInfo, Task

_HEAD = struct.Struct("<Q")
_CHUNK_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A device's process has imported its modules; it calls the driver next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A device's process owns its device."""

    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStarted:
    """A device's process cannot own its device, and ends."""

    # One line.
    message: str
    # Whether the device's memory is full.
    is_out_of_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeStore:
    """To a device's process: serve a rendezvous store, and answer with its address and port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTask:
    """To a device's process: run the task, and answer with a `RankAnswer`."""

    task: Task
    rank: RankInfo
    group: GroupSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountGpus:
    """To the node's process: answer with the number of GPUs that CUDA sees, or a `NoGpus`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoGpus:
    """Answer of the node's process: the node has GPUs, and they cannot be used."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAround:
    """To the node's process: answer with a `Surroundings`."""

    # Empty: processes of the CPU only.
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What other programs do on a GPU."""

    # All processes with a compute context, processes of the check included.
    process_ids: tuple[int, ...] = ()
    # Other programs among these processes.
    programs: tuple[OtherProgram, ...] = ()
    # Share of the last second in which a kernel ran, in percent; None if unknown.
    utilization_pct: int | None = None
    memory_free_bytes: int | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Who uses the node at one moment, and the facts of its GPUs."""

    # Monotonic clock.
    time_s: float
    # Busy time of all processors since the host started; None if unknown.
    busy_s: float | None = None
    processors: int = 0
    # Processor time of the check and its children.
    own_s: float = 0.0
    # The busiest other programs, with their processor time since the last look.
    programs: tuple[tuple[OtherProgram, float], ...] = ()
    facts: tuple[DeviceFacts, ...] = ()
    # In the order of CUDA's numbers.
    gpus: tuple[GpuUse, ...] = ()


def send(channel: socket.socket, message: object) -> None:
    """Send a message whole; blocks if the receiver reads nothing."""
    content = pickle.dumps(message)
    channel.sendall(_HEAD.pack(len(content)) + content)


def receive(channel: socket.socket) -> Any:
    """Wait for a message and return it.

    Raises:
        EOFError: the sender has ended.
    """
    (size,) = _HEAD.unpack(_receive_bytes(channel, _HEAD.size))
    return pickle.loads(_receive_bytes(channel, size))


def _receive_bytes(channel: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        chunk = channel.recv(size - len(content))
        if not chunk:
            raise EOFError
        content += chunk
    return content


class Inbox:
    """The messages that have arrived on a socket; never waits."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._content = b""
        # Whether the sender has ended.
        self.has_ended = False

    def read(self) -> Iterator[Any]:
        """Yield the messages that are complete."""
        while not self.has_ended:
            try:
                chunk = self._channel.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            self.has_ended = not chunk
            self._content += chunk
        while len(self._content) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._content)
            end = _HEAD.size + size
            if len(self._content) < end:
                return
            message = pickle.loads(self._content[_HEAD.size : end])
            self._content = self._content[end:]
            yield message
