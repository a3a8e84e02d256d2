"""A driver that is told to stop, is killed, loses its Ray or cannot write, and `--resume`."""

import os
import random
import re
import resource
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial

import pytest

import raybench
from raybench.records.status import RunStatus
from raybench.results.reader import read_runs
from raybench.results.tables import TABLES
from tests.integration import sweeps
from tests.integration.fault_injection import harmed_sweep
from tests.integration.fault_marks import HARMED
from tests.integration.fault_runs import rows, start_sweep, write_job
from tests.integration.sweeps import (
    RAYBENCH,
    begin,
    count_rows,
    cpu_sweep,
    descendants,
    sweep_command,
    table,
    wait_for,
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


def kill(process, program):
    # The raylet has the command lines of all others among its arguments.
    there = descendants(process.pid).items()
    [found] = [pid for pid, title in there if program in title.split()[0]]
    os.kill(found, signal.SIGKILL)


# What is done to the sweep, the exit code and the statuses of all attempts so far, and how long
# ranks stay in the point after it: None where nothing lets them go on.
HARMS = [(lambda sweep, _: sweep.kill(), -signal.SIGKILL, ["ok"], 0.0)]
RARER_HARMS = [
    (fill, 2, ["ok"], 0.0),
    (lambda sweep, _: kill(sweep, "gcs_server"), 3, ["ok", "lost"], None),
    (lambda sweep, _: sweep.terminate(), 130, ["ok", "lost", "cancelled"], 0.0),
    (lambda sweep, _: kill(sweep, "/raylet/raylet"), 3, ["ok", "lost", "cancelled", "lost"], None),
]


@pytest.mark.parametrize("harms", [HARMS, pytest.param(RARER_HARMS, marks=pytest.mark.long)])
def test_run_resumes_whatever_ended_its_sweep(harms, small_disk, tmp_path):
    write_job(tmp_path, [("none", 0), ("wait", 0), ("none", 0)], 1, timeout_s=90.0)
    command = sweep_command(tmp_path, "--device", "cpu")
    for harm, code, statuses, stay_s in harms:
        for name in ("marks.jsonl", HARMED):
            (tmp_path / name).unlink(missing_ok=True)
        ended = harmed_sweep(
            command,
            tmp_path,
            1,
            1,
            lambda sweep, _, harm=harm: harm(sweep, small_disk),
            stay_s=stay_s,
        )
        assert ended.gone_s is not None, ended.left
        assert (ended.code, [row["status"] for row in rows(tmp_path)]) == (code, statuses)
        assert "Traceback" not in ended.said
        if code == 3:
            assert ended.end_s < 20
        if harm is fill:
            *_, kept, line = ended.said.splitlines()
            assert line.startswith(f"{small_disk}/")
            reason = "No space left on device; make room there|File too large; .*"
            assert re.search(f": cannot be written: ({reason})$", line)
            assert kept.startswith("stopped: 1 finished point is kept")
            (small_disk / "filler").unlink(missing_ok=True)
        # A killed sweep prints no command.
        command = sweep_command(tmp_path, "--device", "cpu", "--resume", "latest")
        for go_on in re.findall("^go on with: python -m raybench (.*)$", ended.said, re.MULTILINE):
            command = [*RAYBENCH, *shlex.split(go_on)]
    last = start_sweep(command, tmp_path)
    _, said = last.communicate(timeout=240)
    assert last.returncode == 0, said
    assert [row["number"] for row in rows(tmp_path) if row["status"] == "ok"] == [0, 1, 2]


POINTS = 8
SMALL = """\
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [1, 2], batch_size: [1, 2, 3, 4]}
measure: {warmup: 3, iterations: 2000, max_seconds: 0.2, breakdown: false}
"""


@pytest.mark.long
def test_sigkills_leave_whole_tables_and_each_point_once(tmp_path):
    write_text(tmp_path, SMALL)
    results, said = tmp_path / "results", tmp_path / "stderr.txt"
    seed = random.randrange(1000)
    print("seed", seed)
    chance = random.Random(seed)

    def started():
        with said.open("wb") as file:
            return begin(tmp_path, *go_on(), stdout=subprocess.DEVNULL, stderr=file)

    def go_on():
        return ["--resume", "latest"] if list(results.glob("runs/*/run.parquet")) else []

    def has(process, count):
        """Whether the driver has its cluster, and the run so many rows."""
        assert process.poll() is None, said.read_text()
        return "; run " in said.read_text() and count_rows(tmp_path) >= count

    def check_readable():
        for name in TABLES:
            if list(results.glob(f"{name}/*/[!.]*.parquet")):
                table(tmp_path, name)
                raybench.load(results, name)

    for _ in range(2):
        before = count_rows(tmp_path)
        with started() as process:
            # While Ray starts, while workers do, or after a row.
            more = chance.choice([None, 0, 1, 1])
            if more is not None:
                wait_for(partial(has, process, before + more), within_s=120)
            time.sleep(chance.uniform(0.5, 3.0) if more is None else chance.uniform(0.0, 0.6))
            assert process.poll() is None, said.read_text()
            process.kill()
        print(more, count_rows(tmp_path))
        check_readable()
        if results.exists():
            assert [run.status for run in read_runs(results)] in ([RunStatus.INTERRUPTED], [])
    with started() as process:
        wait_for(partial(has, process, 0), within_s=120)
        # Beside the first, which has the processors, or it would be refused for that.
        second = cpu_sweep(tmp_path, *go_on(), "--shared")
        process.kill()
    assert second.returncode == 2
    assert "is being written by another sweep" in second.stderr
    assert " interrupted " in sweeps.raybench("list", "--results", results).stdout
    with started() as process:
        while process.poll() is None:
            check_readable()
            time.sleep(0.1)
    assert process.returncode == 0, said.read_text()
    found = table(tmp_path)
    assert list(found["status"]) == ["ok"] * POINTS
    assert list(found["attempt"]) == [1] * POINTS
    assert found["point_id"].is_unique
    samples = table(tmp_path, "samples")
    # What a killed attempt left is removed when the run goes on, and made again.
    counts = samples[~samples["is_warmup"]].groupby("point_id")["iteration"].nunique()
    assert counts.to_dict() == found.set_index("point_id")["iterations"].to_dict()
    (run,) = read_runs(results)
    assert (run.status, run.points_ok, run.points_total) == (RunStatus.OK, POINTS, POINTS)
    assert {path.name for path in results.rglob(".*")} <= {".driver"}
