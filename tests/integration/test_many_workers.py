"""Many more CPU workers than their host has cores: they start, meet, and sum what all have."""

import subprocess

import pytest

import raybench
from tests.integration.fault_runs import sweep_command

WORKERS = 64
JOB = f"""\
version: 1
name: many_workers
workload: {{kind: collective, operation: all_reduce, size_bytes: 65536}}
matrix: {{world_size: [2, {WORKERS}]}}
baseline: {{}}
placement: {{oversubscribe: true}}
measure: {{warmup: 2, iterations: 5, max_seconds: 10, timeout_s: 240, breakdown: false}}
"""
# Each loads torch, which takes seconds of a core: 200 s on two idle ones.
_LIMIT_S = 900


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(_LIMIT_S)
def test_64_workers_of_one_host_do_a_point_together(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    command = sweep_command(tmp_path, "--device", "cpu")
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S - 20)
    assert done.returncode == 0, done.stderr
    points = raybench.load(tmp_path / "results", "points").set_index("world_size")
    assert dict(points["status"]) == {2: "ok", WORKERS: "ok"}
    samples = raybench.load(tmp_path / "results", "samples")
    ranks = samples.groupby("point_id")["rank"].nunique()
    assert ranks[points.loc[WORKERS, "point_id"]] == WORKERS
    assert len(raybench.load(tmp_path / "results", "devices")) == WORKERS
