"""What happens to the driver of a sweep: signals, a full disk, results that cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import raybench
from benchmarks.cluster_faults import Harm, ended_entry
from raybench.results.schema import TABLES
from tests.integration.fault_injection import Waiting, harmed_sweep
from tests.integration.fault_runs import descendants, rows, start_sweep, sweep_command, write_job

_GONE_S = 15.0
_DISK_KIB = 256
_POINTS = 4


def measured() -> list[dict[str, Any]]:
    """One entry per fault, as `faults.table` shows them."""
    ok2, cancelled = ["ok", "ok"], ["ok", "cancelled"]
    found = [
        harmed("SIGINT once", told(signal.SIGINT), ok2, 130),
        harmed("SIGINT twice", told(signal.SIGINT, signal.SIGINT), cancelled, 130, stay_s=None),
        harmed("SIGTERM", told(signal.SIGTERM), cancelled, 130, stay_s=None),
        harmed("SIGKILL of the driver", told(signal.SIGKILL), ["ok"], -9, stay_s=None),
        harmed("raylet of a private Ray killed", kill_raylet, ["ok", "lost"], 3, stay_s=None),
    ]
    if os.geteuid() != 0:
        print("disk full, results read-only: not made, only root may mount")
        return found
    return [
        *found,
        harmed("disk full", fill, ["ok"], 2, on_disk=True),
        harmed("results read-only", make_read_only, ["ok"], 2),
    ]


def told(*signals: int) -> Callable[[Path], Harm]:
    def harm(process: subprocess.Popen[str], _: Waiting) -> None:
        first, *others = signals
        process.send_signal(first)
        for number in others:
            time.sleep(1.0)
            process.send_signal(number)

    return lambda _: harm


def kill_raylet(_: Path) -> Harm:
    def harm(process: subprocess.Popen[str], __: Waiting) -> None:
        (raylet,) = (pid for pid, title in descendants(process.pid).items() if is_raylet(title))
        os.kill(raylet, signal.SIGKILL)

    return harm


def is_raylet(title: str) -> bool:
    return title.split()[0].endswith("/raylet")


def fill(folder: Path) -> Harm:
    def harm(_: subprocess.Popen[str], __: Waiting) -> None:
        with (folder / "results" / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1024))
            except OSError:
                return

    return harm


def make_read_only(folder: Path) -> Harm:
    def harm(_: subprocess.Popen[str], __: Waiting) -> None:
        # A mount that holds a file open for writing cannot become read-only; one over it can.
        results = str(folder / "results")
        subprocess.run(["mount", "--bind", results, results], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", results], check=True)

    return harm


def harmed(
    what: str,
    harm: Callable[[Path], Harm],
    wanted: Sequence[str],
    code: int,
    *,
    stay_s: float | None = 0.0,
    on_disk: bool = False,
) -> dict[str, Any]:
    """Make the fault in the second of four points; then the harm is undone and the run resumed."""
    with tempfile.TemporaryDirectory(prefix="faults") as name, ExitStack() as at_the_end:
        folder = Path(name)
        if on_disk:
            at_the_end.callback(mount_disk(folder))
        write_job(folder, [("none", 0), ("wait", 0), ("none", 0), ("none", 0)], 2, timeout_s=90.0)
        command = sweep_command(folder, "--device", "cpu")
        ended = harmed_sweep(command, folder, 1, 2, harm(folder), stay_s=stay_s)
        print(ended.said, flush=True)
        entry = ended_entry(what, folder, ended, wanted, code)
        if what == "results read-only":
            subprocess.run(["umount", "--lazy", str(folder / "results")], check=True)
        (folder / "results" / "filler").unlink(missing_ok=True)
        after = resumed(folder)
        right = entry["as_wanted"] and after["whole"] and (ended.gone_s or 99) <= _GONE_S
        return entry | {"resumed": after, "as_wanted": right}


def mount_disk(folder: Path) -> Callable[[], object]:
    """Mount a small disk for the results; what takes it off again."""
    results = folder / "results"
    results.mkdir()
    size = f"size={_DISK_KIB}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(results)], check=True)
    return lambda: subprocess.run(["umount", "--lazy", str(results)], check=True)


def resumed(folder: Path) -> dict[str, Any]:
    """Whether every table can be read before, and each point is ok exactly once after."""
    for table in TABLES:
        raybench.load(folder / "results", table)
    command = sweep_command(folder, "--device", "cpu", "--resume", "latest")
    process = start_sweep(command, folder)
    _, said = process.communicate()
    count = Counter(row["number"] for row in rows(folder) if row["status"] == "ok")
    whole = process.returncode == 0 and count == dict.fromkeys(range(_POINTS), 1)
    return {"exit_code": process.returncode, "said": said, "whole": whole}
