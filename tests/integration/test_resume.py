"""A driver that is told to stop or cannot write, and `--resume`: real processes and Parquet."""

from __future__ import annotations

import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

RAYBENCH = [sys.executable, "-m", "raybench"]
JOB = """\
version: 1
name: small
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [1, 2], batch_size: [4, 8]}
measure: {warmup: 3, iterations: 1000, max_seconds: 0.5}
"""


POINTS = 4


def command(folder: Path, *options: str) -> list[str]:
    results = ["-o", str(folder / "results")]
    where = ["--address", "local", "--device", "cpu"]
    return [*RAYBENCH, "sweep", str(folder / "job.yaml"), *results, *where, *options]


def started(folder: Path, points: int) -> subprocess.Popen[str]:
    """A sweep that has written so many points."""
    (folder / "job.yaml").write_text(JOB)
    process = subprocess.Popen(
        command(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 120
    while len(list((folder / "results").glob("points/*/[!.]*.parquet"))) < points:
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.05)
    return process


def statuses(folder: Path) -> list[str]:
    return list(pd.read_parquet(folder / "results" / "points")["status"])


@pytest.mark.long
def test_sigterm_keeps_what_finished_and_the_command_it_prints_does_the_rest(tmp_path):
    with started(tmp_path, points=1) as process:
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    # None where the signal came between two points.
    assert statuses(tmp_path).count("cancelled") <= 1
    (line,) = re.findall("^go on with: python -m raybench (.*)$", said, re.MULTILINE)
    resumed = subprocess.run(
        [*RAYBENCH, *shlex.split(line)], capture_output=True, text=True, timeout=240
    )
    assert resumed.returncode == 0, resumed.stderr
    points = pd.read_parquet(tmp_path / "results" / "points")
    ok = points[points["status"] == "ok"]
    assert len(ok) == POINTS
    assert ok["point_id"].is_unique
    again = ok[ok["attempt"] == 2]["point_id"]
    assert list(again) == list(points[points["status"] == "cancelled"]["point_id"])
    nothing = subprocess.run(
        [*RAYBENCH, *shlex.split(line)], capture_output=True, text=True, timeout=60
    )
    assert nothing.returncode == 0, nothing.stderr
    assert "nothing to do" in nothing.stderr


@pytest.fixture
def small_disk(tmp_path):
    """The results folder, on a disk of its own where this process may mount one."""
    results = tmp_path / "results"
    results.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(results)]
    subprocess.run(mount, capture_output=True)
    yield results
    if results.is_mount():
        subprocess.run(["umount", "--lazy", str(results)], check=True)


def fill(process: subprocess.Popen[str], results: Path) -> None:
    if not results.is_mount():
        # The nearest that can be had without the right to mount: no file may grow any more.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (512, 512))
        return
    with (results / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))


def make_room(results: Path) -> None:
    (results / "filler").unlink(missing_ok=True)


def make_read_only(_: subprocess.Popen[str], results: Path) -> None:
    if not results.is_mount():
        for folder in results.glob("*/*"):
            folder.chmod(0o500)
        return
    # Not while a file is open for writing, which the lock is: a mount over it can change.
    subprocess.run(["mount", "--bind", str(results), str(results)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(results)], check=True)


def make_writable(results: Path) -> None:
    if not results.is_mount():
        for folder in results.glob("*/*"):
            folder.chmod(0o700)
        return
    subprocess.run(["umount", "--lazy", str(results)], check=True)


@pytest.mark.parametrize(
    ("harm", "undo", "reason"),
    [
        pytest.param(
            fill,
            make_room,
            "No space left on device; make room there|File too large; .*",
            marks=pytest.mark.long,
        ),
        pytest.param(
            make_read_only,
            make_writable,
            "(Read-only file system|Permission denied); .*",
            marks=pytest.mark.long,
        ),
    ],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_no_more_is_one_line_and_the_run_goes_on_when_it_does(
    small_disk, tmp_path, harm, undo, reason
):
    with started(tmp_path, points=1) as process:
        harm(process, small_disk)
        _, said = process.communicate(timeout=60)
    undo(small_disk)
    assert process.returncode == 2, said
    *_, go_on, kept, line = said.splitlines()
    assert line.startswith(f"{small_disk}/")
    assert re.search(f": cannot be written: ({reason})$", line)
    assert kept.startswith("stopped: ")
    done = statuses(tmp_path)
    assert done == ["ok"] * len(done)
    assert 1 <= len(done) < POINTS
    words = shlex.split(go_on.removeprefix("go on with: python -m raybench "))
    resumed = subprocess.run([*RAYBENCH, *words], capture_output=True, text=True, timeout=240)
    assert resumed.returncode == 0, resumed.stderr
    assert statuses(tmp_path) == ["ok"] * POINTS
