"""A driver that is told to stop or cannot write, and `--resume`: real processes and Parquet."""

import re
import resource
import shlex
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from tests.integration.sweeps import begin, raybench, table, wait_for_rows, write_text

JOB = """\
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [1, 2], batch_size: [4, 8]}
measure: {warmup: 3, iterations: 1000, max_seconds: 0.5}
"""
POINTS = 4


def started(folder):
    """A sweep that has written a point."""
    write_text(folder, JOB)
    process = begin(folder)
    wait_for_rows(process, folder, 1)
    return process


def statuses(folder):
    return list(table(folder)["status"])


@pytest.mark.long
def test_sigterm_keeps_what_finished_and_the_command_it_prints_does_the_rest(tmp_path):
    with started(tmp_path) as process:
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    # None where the signal came between two points.
    assert statuses(tmp_path).count("cancelled") <= 1
    (line,) = re.findall("^go on with: python -m raybench (.*)$", said, re.MULTILINE)
    resumed = raybench(*shlex.split(line))
    assert resumed.returncode == 0, resumed.stderr
    points = table(tmp_path)
    ok = points[points["status"] == "ok"]
    assert len(ok) == POINTS
    assert ok["point_id"].is_unique
    again = ok[ok["attempt"] == 2]["point_id"]
    assert list(again) == list(points[points["status"] == "cancelled"]["point_id"])
    nothing = raybench(*shlex.split(line))
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


def fill(process, results):
    if not results.is_mount():
        # The nearest that can be had without the right to mount: no file may grow any more.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (512, 512))
        return
    with (results / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))


def make_room(results):
    (results / "filler").unlink(missing_ok=True)


def make_read_only(_, results):
    if not results.is_mount():
        for folder in results.glob("*/*"):
            folder.chmod(0o500)
        return
    # Not while a file is open for writing, which the lock is: a mount over it can change.
    subprocess.run(["mount", "--bind", str(results), str(results)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(results)], check=True)


def make_writable(results):
    if not results.is_mount():
        for folder in results.glob("*/*"):
            folder.chmod(0o700)
        return
    subprocess.run(["umount", "--lazy", str(results)], check=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("harm", "undo", "reason"),
    [
        (fill, make_room, "No space left on device; make room there|File too large; .*"),
        (make_read_only, make_writable, "(Read-only file system|Permission denied); .*"),
    ],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_no_more_is_one_line_and_the_run_goes_on_when_it_does(
    small_disk, tmp_path, harm, undo, reason
):
    with started(tmp_path) as process:
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
    resumed = raybench(*shlex.split(go_on.removeprefix("go on with: python -m raybench ")))
    assert resumed.returncode == 0, resumed.stderr
    assert statuses(tmp_path) == ["ok"] * POINTS
