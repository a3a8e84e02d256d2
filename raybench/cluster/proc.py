"""What /proc says of the processes of this host. `reaper` reads it by itself: it runs alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

_PARENT, _USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM, _BEGAN = 1, 11, 12, 13, 14, 19
# user, nice, system, irq, softirq
_BUSY = (0, 1, 2, 5, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Processor time of a process, and of its children that have ended and were waited for.

    began: tells it from a later process of the same number.
    """

    began: str
    own_s: float
    children_s: float


def parents() -> dict[int, int]:
    """Process -> its parent; empty where there is no /proc."""
    try:
        with os.scandir("/proc") as entries:
            numbers = [int(entry.name) for entry in entries if entry.name.isdecimal()]
    except OSError:
        return {}
    facts = ((number, _stat(number)) for number in numbers)
    return {number: int(stat[_PARENT]) for number, stat in facts if stat}


def with_descendants(found: Set[int], parents_of: Mapping[int, int]) -> set[int]:
    """Add to these processes their children, the children of these, ..."""
    known = set(found)
    while more := {p for p, parent in parents_of.items() if parent in known} - known:
        known |= more
    return known


def time_spent(process: int) -> Spent | None:
    """None for a process that is gone."""
    stat = _stat(process)
    if not stat:
        return None
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return Spent(
        began=stat[_BEGAN],
        own_s=(int(stat[_USER]) + int(stat[_SYSTEM])) / ticks_per_s,
        children_s=(int(stat[_CHILDREN_USER]) + int(stat[_CHILDREN_SYSTEM])) / ticks_per_s,
    )


def busy_s(processors: Set[int]) -> float | None:
    """How long these processors have worked since the host was started; None where nobody knows."""
    names = {f"cpu{number}" for number in processors}
    lines = (line.split() for line in read_host("stat").splitlines())
    busy = [sum(int(line[place + 1]) for place in _BUSY) for line in lines if line[0] in names]
    return sum(busy) / os.sysconf("SC_CLK_TCK") if busy else None


def name(process: int) -> str:
    """Return what a process is called; empty for one that is gone, or of another container."""
    shown = read(process, "comm").decode(errors="replace").strip()
    return "".join(letter if letter.isprintable() else "?" for letter in shown)


def read(process: int, file: str) -> bytes:
    """Nothing of a process that is gone, or another user's."""
    try:
        return Path("/proc", str(process), file).read_bytes()
    except OSError:
        return b""


def read_host(file: str) -> str:
    """Read a file of the whole host; empty where there is none."""
    try:
        return Path("/proc", file).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _stat(process: int) -> list[str]:
    """State, parent, process group, ...; empty for a process that is gone."""
    # Behind the name of the program, which may hold spaces and parentheses.
    return read(process, "stat").decode(errors="replace").rpartition(")")[2].split()
