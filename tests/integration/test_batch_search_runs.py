"""`batch_size: auto` as a user runs it: real Ray, and a workload that runs out of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from raybench import cli

# Two workers get the smaller limit: each series has its own.
WORKLOAD = """\
class Limited:
    def __init__(self, context, *, limit: int = 21):
        self.items_per_step = context.batch_size
        if context.batch_size > limit // context.world_size:
            raise MemoryError(f"{context.batch_size} rows do not fit")

    def step(self):
        sum(range(1000))
"""
JOB = """\
version: 1
name: largest
workload: {kind: "limited:Limited"}
matrix: {world_size: [1, 2], batch_size: {start: 4, max: 100}}
measure: {warmup: 1, iterations: 3, breakdown: false}
on_error: stop
"""
ONE = [4, 8, 16, 32, 24, 20, 22, 21]
TWO = [4, 8, 16, 12, 10, 11]


def raybench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "raybench", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def sweep(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return raybench(folder, "sweep", "job.yaml", "--address", "local", "--device", "cpu", *options)


def points_of(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "results" / "points")


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searched")
    (folder / "limited.py").write_text(WORKLOAD)
    (folder / "job.yaml").write_text(JOB)
    return sweep(folder), folder


def test_each_series_ends_with_its_largest_batch_and_a_row_for_each_try(searched):
    done, folder = searched
    assert done.returncode == 0, done.stderr
    points = points_of(folder)
    for world_size, batches, limit in ((1, ONE, 21), (2, TWO, 10)):
        mine = points[points["world_size"] == world_size].sort_values("started_at")
        assert list(mine["batch_size"]) == batches
        expected = ["ok" if batch <= limit else "oom" for batch in batches]
        assert list(mine["status"]) == expected
        assert (mine["global_batch_size"] == mine["batch_size"] * world_size).all()


def test_the_report_tells_the_largest_batches(searched):
    done, folder = searched
    text = " ".join(done.stdout.split())
    assert "Largest batch that fits, per device" in text
    assert "fp32, 1 worker 21; 22 runs out of memory" in text
    assert "fp32, 2 workers 10; 11 runs out of memory" in text
    command = ["report", "--format", "json", "--results", str(folder / "results")]
    told = json.loads(CliRunner().invoke(cli.raybench, command).stdout)
    assert [found["batch_size"] for found in told["largest_batches"]] == [21, 10]


@pytest.mark.long
def test_a_run_that_lost_its_last_points_finds_the_same_batches_when_it_goes_on(searched):
    _, folder = searched
    whole = points_of(folder)
    parts = sorted((folder / "results" / "points").glob("*/*.parquet"))
    [run_id] = {part.parent.name for part in parts}
    for part in parts[-4:]:
        part.unlink()
    done = sweep(folder, "--resume", run_id)
    assert done.returncode == 0, done.stderr
    again = points_of(folder)
    assert set(again["point_id"]) == set(whole["point_id"])
    assert len(again) == len(whole)


@pytest.mark.long
def test_cpu_workers_are_not_filled_for_want_of_a_maximum(searched):
    _, folder = searched
    done = sweep(folder, "-o", "other", "--set", "matrix.batch_size=auto")
    assert done.returncode == 2
    assert "give a maximum" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((folder / "other" / "points").glob("*/*.parquet"))
