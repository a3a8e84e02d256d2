"""A sweep before and after a change of NCCL, and what `raybench compare` tells of it."""

import json
import os

import pytest

from tests.integration.sweeps import cpu_sweep, raybench, table, write_text
from tests.nccl_files import compile_nccl

JOB = """\
workload: {kind: mlp, hidden: 32, layers: 1}
matrix: {world_size: [1], batch_size: [8]}
baseline: {world_size: 1}
measure: {warmup: 2, iterations: 20, max_seconds: 1}
"""


@pytest.mark.long
def test_compare_names_the_change_of_the_loaded_nccl(tmp_path):
    write_text(tmp_path, JOB)
    libraries = {
        version: compile_nccl(tmp_path / version, number)
        for version, number in (("2.27.3", 22703), ("2.28.9", 22809))
    }
    for library in libraries.values():
        done = cpu_sweep(tmp_path, env={**os.environ, "LD_PRELOAD": str(library)})
        assert done.returncode == 0, done.stderr
    devices = table(tmp_path, "devices").sort_values("nccl_path")
    assert list(devices["nccl_path"]) == [str(library) for library in libraries.values()]
    assert [dict(one)["nccl"] for one in devices["versions"]] == list(libraries)
    runs = table(tmp_path, "runs").sort_values("started_at")["run_id"]
    results = ("--results", tmp_path / "results")
    shown = raybench("compare", *runs, *results)
    assert "nccl" in shown.stdout, shown.stdout + shown.stderr
    told = json.loads(raybench("compare", *runs, *results, "--format", "json").stdout)
    changes = {one["name"]: (one["base"], one["new"]) for one in told["changes"]}
    assert changes["nccl"] == tuple(libraries)
    assert changes["nccl_path"] == tuple(map(str, libraries.values()))
