"""What faulty ranks and the tests of their sweeps both know. Without torch, which takes seconds."""

import json
import os
import socket
import time
from pathlib import Path

# The file in the folder of marks that lets waiting ranks go on.
HARMED = "harmed"
CGROUP_PREFIX = "raybench-fault-"
_CGROUPS = Path("/sys/fs/cgroup")
_LIMIT_OF_V1 = "memory.limit_in_bytes"


def mark(folder: str | Path, event: str, **facts: object) -> None:
    """Add a line to the folder's marks.jsonl, with the time of this host in nanoseconds."""
    where = {"pid": os.getpid(), "ppid": os.getppid(), "host": socket.gethostname()}
    line = json.dumps({"time_ns": time.time_ns(), "event": event, **where, **facts})
    # One write of few bytes at the end of a file is never mixed with another's.
    file = os.open(Path(folder, "marks.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def memory_cgroups() -> tuple[Path, str] | None:
    """Where this process may make a memory cgroup, and the name of its limit; None: nowhere."""
    for folder, limit in ((_CGROUPS, "memory.max"), (_CGROUPS / "memory", _LIMIT_OF_V1)):
        listed = folder / ("cgroup.subtree_control" if folder == _CGROUPS else limit)
        has_memory = listed.is_file() and (folder != _CGROUPS or "memory" in listed.read_text())
        if has_memory and os.access(folder, os.W_OK):
            return folder, limit
    return None
