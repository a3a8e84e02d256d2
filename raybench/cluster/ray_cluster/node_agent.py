"""What one node can do beside its workers: sample, lock, look around, end them, read their words.

It imports no torch, and has no CUDA context.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from raybench.cluster.bystanders import Look
from raybench.cluster.device_locks import Claim, DeviceLocks, Holder
from raybench.records import Device, DeviceSample, SpanNs
from raybench.records.device_facts import DeviceFacts

_TAIL_LINES = 60
_TAIL_BYTES = 16 * 1024
_OUTPUT_BYTES = 32 * 1024  # of each stream in a point
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# By which Ray marks whose line comes next; no word of the worker's.
_MARKS = (":job_id:", ":actor_name:", ":task_name:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a process wrote, and how far each of its streams was read."""

    text: str
    read_to: Mapping[str, int]


class NodeAgent:
    """An actor beside the workers of its node; all are children of one raylet."""

    def __init__(self) -> None:
        from raybench.hardware.telemetry import memory_in_use_bytes

        # Before the first worker of this run: what other processes have.
        self._used_before_bytes = memory_in_use_bytes()
        self._samplers: list[Any] = []
        self._locks = DeviceLocks()
        self._facts: Any = None

    @property
    def logs(self) -> Path:
        """The folder with what the workers of this node write."""
        from ray._private.worker import _global_node

        session: Any = _global_node
        return Path(session.get_logs_dir_path())

    def answer(self) -> None:
        """Show that this node lives."""

    def kill(self, process_ids: Sequence[int]) -> None:
        """SIGKILL those that still are its workers."""
        kill_siblings(process_ids)

    def sample(self, devices: Sequence[Device]) -> None:
        """Begin to sample these devices, which are not sampled yet."""
        from raybench.hardware.telemetry import Sampler

        self._samplers.append(Sampler(devices))
        self._samplers[-1].start()

    def claim(self, names: Sequence[str], holder: Holder, shared: bool) -> Claim:
        """Hold these devices of this host until this process ends."""
        return self._locks.claim(names, holder, shared=shared)

    def release(self) -> None:
        """Let go of all devices that are held."""
        self._locks.close()

    def look(self, devices: Sequence[Device], holder: Holder) -> Look:
        """Who else is there now."""
        from raybench.cluster.bystanders import look

        return look(devices, self._locks, holder)

    def drain(self) -> tuple[DeviceSample, ...]:
        """Take the samples since the last call."""
        return tuple(sample for sampler in self._samplers for sample in sampler.drain())

    def device_facts(self, devices: Sequence[Device]) -> tuple[DeviceFacts, ...]:
        """Read these devices of this node, whose errors are watched from the first call on."""
        if self._facts is None:
            from raybench.hardware.device_facts import FactReader

            self._facts = FactReader()
        return tuple(self._facts.read(devices))

    def sm_clocks_mhz(self, spans_ns: Mapping[str, Sequence[SpanNs]]) -> dict[str, tuple[int, ...]]:
        """By device: its SM clock in these spans of time, as the sampler that has it read it."""
        read = {
            uuid: [sampler.sm_clocks_mhz(uuid, spans) for sampler in self._samplers]
            for uuid, spans in spans_ns.items()
        }
        return {uuid: max(clocks, key=len, default=()) for uuid, clocks in read.items()}

    def log_tail(self, process_id: int) -> str:
        """Return the last lines that the worker of this process wrote."""
        return log_tail(self.logs, process_id)

    def new_outputs(self, read_to: Mapping[int, Mapping[str, int]]) -> dict[int, Output]:
        """By process id: what each of these workers wrote since."""
        return {process: new_output(self.logs, process, ends) for process, ends in read_to.items()}

    def memory_growth_bytes(self, uuids: Sequence[str]) -> dict[str, int]:
        """By device: what is in use now beyond what was before the first worker."""
        from raybench.hardware.telemetry import memory_in_use_bytes

        now = memory_in_use_bytes()
        before = self._used_before_bytes
        return {uuid: now[uuid] - before.get(uuid, 0) for uuid in uuids if uuid in now}


def kill_siblings(process_ids: Sequence[int]) -> None:
    """SIGKILL those that still are processes of the raylet that started this one.

    The id of a process that has ended may be another's by now.
    """
    for process_id in process_ids:
        try:
            process = psutil.Process(process_id)
            if process.ppid() == os.getppid():
                process.kill()
        except psutil.NoSuchProcess:
            continue  # it is gone


def log_tail(folder: Path, process_id: int) -> str:
    """Return the last lines that a worker wrote, stdout before stderr; "" where there are none.

    folder: of the logs of Ray's session on this node.
    """
    lines: list[str] = []
    for path in _logs(folder, process_id).values():
        lines += _lines(_read(path, max(0, path.stat().st_size - _TAIL_BYTES)))
    return "\n".join(lines[-_TAIL_LINES:])


def new_output(folder: Path, process_id: int, read_to: Mapping[str, int]) -> Output:
    """Return what a worker wrote since, at most the last 32 KiB of each stream.

    read_to: how far each stream was read before.
    """
    blocks, ends = [], dict(read_to)
    for stream, path in _logs(folder, process_id).items():
        end, start = path.stat().st_size, read_to.get(stream, 0)
        ends[stream] = end
        left_out = max(0, end - _OUTPUT_BYTES - start)
        lines = _lines(_read(path, start + left_out, end))
        if left_out and lines:
            # The first line is only the end of one.
            lines = [f"({left_out} bytes before this are not kept)", *(lines[1:] or lines)]
        if lines:
            blocks.append("\n".join([f"[{stream}]", *lines]))
    return Output(text="\n".join(blocks), read_to=ends)


def _logs(folder: Path, process_id: int) -> dict[str, Path]:
    """Find the files with what the process wrote, by stream."""
    found = {}
    for stream, kind in (("stdout", "out"), ("stderr", "err")):
        # A process id may be used twice in a long session.
        logs = sorted(folder.glob(f"worker-*-{process_id}.{kind}"), key=lambda p: p.stat().st_mtime)
        if logs:
            found[stream] = logs[-1]
    return found


def _read(path: Path, start: int, end: int | None = None) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(-1 if end is None else end - start).decode(errors="replace")


def _lines(text: str) -> list[str]:
    # A progress bar writes the same line again and again.
    last_written = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    lines = (_printable(line) for line in last_written)
    return [line for line in lines if line.strip() and not line.startswith(_MARKS)]


def _printable(line: str) -> str:
    plain = _COLOURS.sub("", line)
    return "".join(letter for letter in plain if letter.isprintable() or letter == "\t")
