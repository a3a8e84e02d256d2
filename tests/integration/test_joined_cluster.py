"""A sweep on a cluster that is there, all of whose slots are free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd


def test_a_sweep_joins_the_cluster_at_its_address(three_nodes: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "version: 1\nname: small\n"
        "workload: {kind: mlp, hidden: 32}\nmatrix: {world_size: 3, batch_size: 4}\n"
        "placement: {strategy: spread}\nmeasure: {warmup: 2, iterations: 5}\n"
    )
    command = [sys.executable, "-m", "raybench", "sweep", str(job), "--address", three_nodes]
    results = tmp_path / "results"
    done = subprocess.run(
        [*command, "-o", str(results), "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert f"Ray cluster at {three_nodes}, up to 6 CPU workers" in done.stderr
    assert list(pd.read_parquet(results / "points")["node_count"]) == [3]
