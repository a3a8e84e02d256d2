"""What an agent does to the workers of its node, and reads of them, as their sibling process."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

_TAIL_LINES = 60
_TAIL_BYTES = 16 * 1024
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# By which Ray marks whose line comes next; no word of the worker's.
_MARKS = (":job_id:", ":actor_name:", ":task_name:")


def kill_siblings(process_ids: Sequence[int]) -> None:
    """SIGKILL those that still are processes of the raylet that started this one.

    The id of a process that has ended may be another's by now.
    """
    for process_id in process_ids:
        try:
            if _parent(process_id) == os.getppid():
                os.kill(process_id, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it is gone


def log_tail(folder: Path, process_id: int) -> str:
    """The last lines that this worker of Ray wrote, stdout before stderr; "" where there are none.

    folder: of the logs of Ray's session on this node.
    """
    lines: list[str] = []
    for kind in ("out", "err"):
        # A process id may be used twice in a long session.
        logs = sorted(folder.glob(f"worker-*-{process_id}.{kind}"), key=lambda p: p.stat().st_mtime)
        if logs:
            lines += _last_lines(logs[-1])
    return "\n".join(lines[-_TAIL_LINES:])


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = (_printable(line) for line in text.splitlines())
    return [line for line in lines if line.strip() and not line.startswith(_MARKS)]


def _printable(line: str) -> str:
    plain = _COLOURS.sub("", line)
    return "".join(letter for letter in plain if letter.isprintable() or letter == "\t")


def _parent(process_id: int) -> int:
    # Behind the name of the program, which may hold spaces and parentheses: state, parent.
    stat = Path(f"/proc/{process_id}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])
