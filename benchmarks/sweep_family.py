"""All processes that a sweep ever had, also those that others have adopted, and what each is."""

from __future__ import annotations

import threading
from pathlib import Path

from raybench.cluster import proc

_LOOK_S = 0.4
# A process becomes a watcher soon after it was forked, or never.
_YOUNG_LOOKS = 5
_SHARED_MEMORY = Path("/dev/shm")
# What a process is -> what its command line has near its beginning. A raylet has the command lines
# of Ray's agents further on.
_KINDS = {
    "watcher": ("reaper.py",),
    "raylet": ("/raylet/raylet",),
    "head": ("gcs_server",),
    "rank": ("ray::_Worker",),
    "agent": ("ray::NodeAgent",),
    "store": ("ray::_Store",),
    "starting worker": ("setup_worker.py", "default_worker.py", "ray::IDLE"),
    "agent of Ray": (
        *("ray::DashboardAgent", "ray::RuntimeEnvAgent", "/agent.py", "/agent/main.py"),
        *("log_monitor.py", "/monitor.py", "/dashboard.py"),
    ),
}
VICTIMS = ("driver", *_KINDS)
_WORDS = 4


class Family:
    """The processes of one sweep, by number and start, while its driver lives and after it.

    shared_memory: names in /dev/shm that one of them had open or mapped.
    """

    def __init__(self, driver: int) -> None:
        self._driver = driver
        self._seen: dict[int, str] = {}
        self._strangers: dict[int, int] = {}
        self._known_names = shared_memory()
        self.shared_memory: set[str] = set()
        self._ended = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def stop(self) -> None:
        self._ended.set()
        self._watching.join()

    def living(self) -> dict[int, str]:
        """Map numbers to command lines."""
        known = {p: now for p, began in list(self._seen.items()) if (now := _began(p)) == began}
        return {process: _title(process) for process in known}

    def of_kind(self, kind: str) -> list[int]:
        """Those that live and are of one of the VICTIMS."""
        if kind == "driver":
            return [self._driver]
        living = self.living().items()
        return sorted(p for p, title in living if p != self._driver and _kind(title) == kind)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        parents = proc.parents()
        alive = {p for p, began in self._seen.items() if _began(p) == began}
        found = proc.with_descendants(alive | ({self._driver} & parents.keys()), parents)
        watched = {str(process) for process in found}
        found |= {p for p in self._young(set(parents) - found) if _watches(p) in watched}
        self._seen |= {p: began for p in found if (began := _began(p))}
        self._note_shared_memory(found)

    def _young(self, strangers: set[int]) -> list[int]:
        looks = self._strangers
        self._strangers = {process: looks.get(process, 0) + 1 for process in strangers}
        return [process for process, count in self._strangers.items() if count <= _YOUNG_LOOKS]

    def _note_shared_memory(self, found: set[int]) -> None:
        new = shared_memory() - self._known_names
        self._known_names |= new
        self.shared_memory |= {name for name in new if any(uses(p, name) for p in found)}


def shared_memory() -> set[str]:
    """List the names in /dev/shm."""
    return {path.name for path in _SHARED_MEMORY.iterdir()}


def uses(process: int, name: str) -> bool:
    """Whether a process has this name of /dev/shm open or mapped."""
    path = str(_SHARED_MEMORY / name)
    return path.encode() in proc.read(process, "maps") or path in _open_files(process)


def _open_files(process: int) -> list[str]:
    try:
        return [str(link.readlink()) for link in Path(f"/proc/{process}/fd").iterdir()]
    except OSError:
        return []  # it is gone, or closes files


def _kind(title: str) -> str:
    beginning = " ".join(title.split()[:_WORDS])
    return next((k for k, parts in _KINDS.items() if any(p in beginning for p in parts)), "")


def _began(process: int) -> str:
    """When a living process began; empty for one that is gone or waits to be buried."""
    stat = proc.read(process, "stat").rpartition(b")")[2].split()
    return stat[19].decode() if stat and stat[0] not in (b"Z", b"X") else ""


def _title(process: int) -> str:
    return proc.read(process, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _watches(process: int) -> str:
    """Find the number of the process that a watcher watches."""
    words = _title(process).split()
    places = [place for place, word in enumerate(words) if word.endswith("reaper.py")]
    return words[places[0] + 2] if places and len(words) > places[0] + 2 else ""
