"""A driver that is told to stop, is killed, loses its Ray or cannot write, and `--resume`."""

import os
import re
import resource
import shlex
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from tests.integration.fault_injection import harmed_sweep
from tests.integration.fault_runs import rows, start_sweep, write_job
from tests.integration.fault_workloads import HARMED
from tests.integration.sweeps import (
    RAYBENCH,
    begin,
    descendants,
    raybench,
    sweep_command,
    table,
    wait_for_rows,
    write_text,
)


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


def kill_head(process):
    # The raylet has the command lines of all others among its arguments.
    there = descendants(process.pid).items()
    [head] = [pid for pid, title in there if "gcs_server" in title.split()[0]]
    os.kill(head, signal.SIGKILL)


def test_a_run_goes_on_after_a_full_disk_a_killed_driver_and_a_dead_head(small_disk, tmp_path):
    write_job(tmp_path, [("none", 0), ("wait", 0), ("none", 0)], 1, timeout_s=90.0)
    command = sweep_command(tmp_path, "--device", "cpu")

    def ended_by(harm, stay_s=0.0):
        for name in ("marks.jsonl", HARMED):
            (tmp_path / name).unlink(missing_ok=True)
        ended = harmed_sweep(command, tmp_path, 1, 1, lambda sweep, _: harm(sweep), stay_s=stay_s)
        assert ended.gone_s is not None, ended.left
        return ended, [row["status"] for row in rows(tmp_path)]

    ended, statuses = ended_by(lambda sweep: fill(sweep, small_disk))
    assert (ended.code, statuses) == (2, ["ok"]), ended.said
    *_, go_on, kept, line = ended.said.splitlines()
    assert line.startswith(f"{small_disk}/")
    reason = "No space left on device; make room there|File too large; .*"
    assert re.search(f": cannot be written: ({reason})$", line)
    assert kept.startswith("stopped: 1 finished point is kept")
    (small_disk / "filler").unlink(missing_ok=True)
    command = [*RAYBENCH, *shlex.split(go_on.removeprefix("go on with: python -m raybench "))]

    ended, statuses = ended_by(subprocess.Popen.kill)
    assert (ended.code, statuses) == (-signal.SIGKILL, ["ok"])

    ended, statuses = ended_by(kill_head, stay_s=None)
    assert (ended.code, statuses) == (3, ["ok", "lost"]), ended.said
    assert ended.end_s < 20

    last = start_sweep(command, tmp_path)
    _, said = last.communicate(timeout=240)
    assert last.returncode == 0, said
    assert [row["number"] for row in rows(tmp_path) if row["status"] == "ok"] == [0, 1, 2]


JOB = """\
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [1, 2], batch_size: [4, 8]}
measure: {warmup: 3, iterations: 1000, max_seconds: 0.5}
"""


@pytest.mark.long
def test_sigterm_keeps_what_finished_and_the_command_it_prints_does_the_rest(tmp_path):
    write_text(tmp_path, JOB)
    with begin(tmp_path) as process:
        wait_for_rows(process, tmp_path, 1)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    # None where the signal came between two points.
    assert list(table(tmp_path)["status"]).count("cancelled") <= 1
    (line,) = re.findall("^go on with: python -m raybench (.*)$", said, re.MULTILINE)
    resumed = raybench(*shlex.split(line))
    assert resumed.returncode == 0, resumed.stderr
    points = table(tmp_path)
    ok = points[points["status"] == "ok"]
    assert len(ok) == 4
    assert ok["point_id"].is_unique
    again = ok[ok["attempt"] == 2]["point_id"]
    assert list(again) == list(points[points["status"] == "cancelled"]["point_id"])
    nothing = raybench(*shlex.split(line))
    assert nothing.returncode == 0, nothing.stderr
    assert "nothing to do" in nothing.stderr
