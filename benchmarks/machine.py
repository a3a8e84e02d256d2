"""What a benchmark of reading and reporting ran on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

# The folders of an absolute path, but not those of an address or of a fraction.
_FOLDERS = re.compile(r"(?<![\w.:/~…-])/(?:[^/\s'\"<>|:;,()]+/)+")
_PACKAGES = ("pyarrow", "pandas", "numpy", "pydantic", "click", "rich")


def machine() -> dict[str, object]:
    """Tell the processor, how many of its cores this process may use, its load now, and versions.

    load_1min: the benchmark itself is about 1 of it; more, and others slowed it down.
    """
    named = [line for line in _cpu_lines() if line.startswith("model name")]
    return {
        "processor": named[0].partition(":")[2].strip() if named else platform.machine(),
        "cores_used": len(os.sched_getaffinity(0)),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
    }


def _cpu_lines() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def commit() -> str:
    """Find the commit of this code; RAYBENCH_COMMIT tells it of a copy of a repository."""
    if told := os.environ.get("RAYBENCH_COMMIT"):
        return told
    git = ["git", "rev-parse", "HEAD"]
    here = Path(__file__).parent
    return subprocess.run(git, cwd=here, capture_output=True, text=True).stdout.strip()


def without_paths(text: str) -> str:
    """Return the text without the folders of this machine: of a path only its last name stays."""
    return _FOLDERS.sub("…/", text)
