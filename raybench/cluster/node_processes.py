"""What an agent does to the workers of its node, and reads of them, as their sibling process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

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
