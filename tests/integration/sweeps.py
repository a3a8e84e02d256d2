"""`raybench` run in a process of its own, as a user runs it, and the tables that it writes."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

RAYBENCH = [sys.executable, "-m", "raybench"]


def raybench(*words: object, timeout_s: float = 240, **more: Any) -> subprocess.CompletedProcess:
    """Run a command to its end."""
    return subprocess.run(
        [*RAYBENCH, *map(str, words)], capture_output=True, text=True, timeout=timeout_s, **more
    )


def write_text(folder: Path, text: str) -> None:
    """Write the job of this folder; `text` is what follows its version and name."""
    (folder / "job.yaml").write_text(f"version: 1\nname: small\n{text}")


def sweep_command(folder: Path, *options: str, address: str = "local") -> list[str]:
    """Sweep the job of this folder into its `results`."""
    results = ["-o", str(folder / "results"), "--address", address]
    return [*RAYBENCH, "sweep", str(folder / "job.yaml"), *results, *options]


def cpu_sweep(folder: Path, *options: str, **more: Any) -> subprocess.CompletedProcess:
    """Run the sweep of this folder on CPU workers to its end."""
    words = sweep_command(folder, "--device", "cpu", *options)[len(RAYBENCH) :]
    return raybench(*words, **more)


def begin(folder: Path, *options: str, **more: Any) -> subprocess.Popen:
    """Start the sweep of this folder on CPU workers."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more}
    return subprocess.Popen(sweep_command(folder, "--device", "cpu", *options), **pipes)


def table(folder: Path, name: str = "points") -> pd.DataFrame:
    return pd.read_parquet(folder / "results" / name)


def count_rows(folder: Path) -> int:
    """How many points are written."""
    return len(list((folder / "results").glob("points/*/[!.]*.parquet")))


def wait_for_rows(process: subprocess.Popen, folder: Path, count: int) -> None:
    """Wait until the sweep, which must not end before, has written so many points."""

    def are_there() -> bool:
        assert process.poll() is None, process.communicate()
        return count_rows(folder) >= count

    wait_for(are_there, within_s=240)


def wait_for(holds: Callable[[], bool], within_s: float) -> float:
    """Until this holds; how long that took."""
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < within_s
        time.sleep(0.05)
    return time.monotonic() - started_s


def descendants(process_id: int) -> dict[int, str]:
    """The living processes below this one, with their titles."""
    try:
        found = psutil.Process(process_id).children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    return {one.pid: title for one in found if (title := title_of(one.pid))}


def title_of(process_id: int) -> str | None:
    """The command line of a process; None when it is gone or a zombie."""
    try:
        return " ".join(psutil.Process(process_id).cmdline()).strip() or None
    except psutil.Error:
        return None
