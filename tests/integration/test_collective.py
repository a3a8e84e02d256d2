"""The workloads without batches, swept for real: Ray, gloo, two ranks, rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

SWEEP = [sys.executable, "-m", "raybench", "sweep"]
COLLECTIVES = """\
version: 1
name: collectives
workload: {kind: collective, size_bytes: 1048576}
matrix:
  operation: [all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, sendrecv]
  world_size: 2
include:
  - {operation: all_reduce, world_size: 1}
  - {operation: all_reduce, world_size: 2, cuda_graph: true}
  - {operation: all_gather, world_size: 2, dtype: int8, in_place: true}
baseline: {}
measure: {warmup: 3, iterations: 10, max_seconds: 2, breakdown: false}
"""
MEMORY = """\
version: 1
name: memory
workload: {kind: memory, size_bytes: 4194304}
matrix: {operation: [copy, triad], world_size: [1, 2]}
baseline: {}
measure: {warmup: 3, iterations: 10, max_seconds: 2, breakdown: false}
"""


def sweep(folder: Path, text: str) -> tuple[subprocess.CompletedProcess[str], pd.DataFrame]:
    job = folder / "job.yaml"
    job.write_text(text)
    done = subprocess.run(
        [*SWEEP, str(job), "-o", str(folder / "results"), "--address", "local", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode in (0, 1), done.stderr
    return done, pd.read_parquet(folder / "results" / "points")


def params(row: pd.Series) -> dict[str, str]:
    return dict(row["params"])


@pytest.fixture(scope="module")
def collectives(tmp_path_factory):
    _, points = sweep(tmp_path_factory.mktemp("collectives"), COLLECTIVES)
    return points


def test_every_operation_is_measured_with_its_bandwidths(collectives):
    ok = collectives[collectives["status"] == "ok"]
    assert len(ok) == 7
    for _, row in ok.iterrows():
        algbw = 1048576 / (row["step_ms_mean"] / 1e3) / 1e9
        # n is 2: 2 (n - 1) / n and 1 for the operations that have it, else 1/2.
        factor = {"all_reduce": 1.0, "broadcast": 1.0, "sendrecv": 1.0}
        assert row["algbw_gb_s"] == pytest.approx(algbw)
        assert row["busbw_gb_s"] == pytest.approx(algbw * factor.get(params(row)["operation"], 0.5))
        assert pd.isna(row["batch_size"])
        assert pd.isna(row["throughput"])


def test_a_cuda_graph_on_cpus_is_skipped_and_one_rank_is_an_error(collectives):
    by_type = collectives.dropna(subset="error_type").set_index("error_type")["error_message"]
    assert by_type["NeedsCuda"] == "cuda_graph: true needs CUDA devices"
    assert "needs at least 2 ranks, world_size is 1; raise world_size" in by_type["UsageError"]
    assert len(by_type) == 2


@pytest.mark.long
def test_memory_bandwidth_is_that_of_one_device_whatever_the_rank_count(tmp_path):
    done, points = sweep(tmp_path, MEMORY)
    assert (done.returncode, set(points["status"])) == (0, {"ok"})
    for _, row in points.iterrows():
        moved = {"copy": 2, "triad": 3}[params(row)["operation"]] * 4194304
        assert row["memory_gb_s"] == pytest.approx(moved / (row["step_ms_mean"] / 1e3) / 1e9)
        assert pd.isna(row["busbw_gb_s"])
