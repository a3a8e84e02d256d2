"""A driver that dies or is told to stop, and `--resume`: real processes, signals and Parquet."""

from __future__ import annotations

import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd

import raybench
from raybench.schemas import TABLES

RAYBENCH = [sys.executable, "-m", "raybench"]
JOB = """\
version: 1
name: small
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [1, 2], batch_size: [4, 8, 16, 32, 64]}
measure: {warmup: 3, iterations: 1000, max_seconds: 0.5}
"""


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


def check_readable(results: Path) -> None:
    for table in TABLES:
        raybench.load(results, table)
        if list(results.glob(f"{table}/*/*.parquet")):
            pd.read_parquet(results / table)


def test_after_sigkill_of_the_driver_a_resumed_run_has_each_point_once(tmp_path: Path) -> None:
    seed = random.randrange(1000)
    print("seed", seed)
    chance = random.Random(seed)
    results = tmp_path / "results"
    with started(tmp_path, points=chance.randint(1, 6)) as process:
        time.sleep(chance.uniform(0, 0.6))
        second = subprocess.run(
            command(tmp_path, "--resume", "latest"), capture_output=True, text=True, timeout=60
        )
        process.kill()
    assert second.returncode == 2
    assert "is being written by another sweep" in second.stderr
    check_readable(results)
    done = statuses(tmp_path)
    assert 0 < len(done) < 10
    listed = subprocess.run(
        [*RAYBENCH, "list", "--results", str(results)], capture_output=True, text=True
    )
    assert " interrupted " in listed.stdout
    with subprocess.Popen(
        command(tmp_path, "--resume", "latest"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as resumed:
        while resumed.poll() is None:
            check_readable(results)
            time.sleep(0.1)
        _, said = resumed.communicate()
    assert resumed.returncode == 0, said
    assert f"[ 1/{10 - len(done)}]" in said or f"[1/{10 - len(done)}]" in said
    points = pd.read_parquet(results / "points")
    assert list(points["status"]) == ["ok"] * 10
    assert list(points["attempt"]) == [1] * 10
    assert points["point_id"].is_unique
    (run,) = raybench.load(results, "runs").to_dict("records")
    assert (run["status"], run["points_ok"], run["points_total"]) == ("ok", 10, 10)
    assert len(raybench.load(results, "devices")) == 2


def test_sigterm_keeps_what_finished_and_the_command_it_prints_does_the_rest(
    tmp_path: Path,
) -> None:
    with started(tmp_path, points=1) as process:
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    # None where the signal came between two points.
    assert statuses(tmp_path).count("cancelled") <= 1
    (line,) = re.findall("^go on with: raybench (.*)$", said, re.MULTILINE)
    resumed = subprocess.run(
        [*RAYBENCH, *shlex.split(line)], capture_output=True, text=True, timeout=240
    )
    assert resumed.returncode == 0, resumed.stderr
    points = pd.read_parquet(tmp_path / "results" / "points")
    ok = points[points["status"] == "ok"]
    assert len(ok) == 10
    assert ok["point_id"].is_unique
    again = ok[ok["attempt"] == 2]["point_id"]
    assert list(again) == list(points[points["status"] == "cancelled"]["point_id"])
    nothing = subprocess.run(
        [*RAYBENCH, *shlex.split(line)], capture_output=True, text=True, timeout=60
    )
    assert nothing.returncode == 0, nothing.stderr
    assert "nothing to do" in nothing.stderr
