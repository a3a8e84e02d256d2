"""The batch script for Slurm, on hosts of their own, with Slurm's commands played."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from tests.integration.fake_slurm import slurm
from tests.integration.namespaces import hosts, why_not

LAUNCHERS = Path(__file__).parents[2] / "docs" / "launchers"
JOB = """\
version: 1
name: slurm
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [2], batch_size: [8, 16, 32, 64]}
measure: {warmup: 2, iterations: 100000, min_seconds: 6, max_seconds: 6, breakdown: false}
"""
# Of Ray, several hosts and a sweep with six seconds a point.
PATIENCE_S = 240

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(why_not() is not None, reason=f"needs hosts of its own: {why_not()}"),
]


@contextmanager
def batch_job(folder, job, results, script="slurm.sbatch"):
    """Start the batch script on the first of two new hosts."""
    with hosts(2) as nodes, slurm(folder, nodes) as variables:
        first = nodes[0]
        own = {"RAYBENCH_OUTPUT": str(results), "RAYBENCH_TMPDIR": first.environment["RAY_TMPDIR"]}
        with subprocess.Popen(
            first.command(["bash", LAUNCHERS / script, job]),
            env={**first.environment, **variables, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as batch:
            yield batch


def child_of(process_id: int) -> int:
    """The script itself: nsenter waits for it outside and passes no signal on."""
    (child,) = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    return int(child)


def test_a_slurm_job_whose_time_is_up_is_queued_again_and_its_next_start_goes_on(tmp_path):
    job, results = tmp_path / "job.yaml", tmp_path / "results"
    job.write_text(JOB)
    with batch_job(tmp_path / "first", job, results) as batch:
        deadline_s = time.monotonic() + PATIENCE_S
        while not list(results.glob("points/*/*.parquet")) and time.monotonic() < deadline_s:
            assert batch.poll() is None, batch.communicate()
            time.sleep(0.5)
        os.kill(child_of(batch.pid), signal.SIGTERM)
        said, _ = batch.communicate(timeout=60)
        assert batch.returncode == 130, said
    assert (tmp_path / "first" / "requeued").read_text() == "7\n"
    done = pd.read_parquet(results / "points")
    assert 1 <= (done["status"] == "ok").sum() < 4, said
    with batch_job(tmp_path / "second", job, results) as batch:
        said, _ = batch.communicate(timeout=PATIENCE_S)
        assert batch.returncode == 0, said
    assert not (tmp_path / "second" / "requeued").exists()
    points = pd.read_parquet(results / "points")
    ok = points[points["status"] == "ok"]
    assert len(ok) == ok["point_id"].nunique() == 4
    assert points["run_id"].nunique() == 1
    assert set(ok["node_count"]) == {2}


@pytest.mark.timeout(2 * PATIENCE_S + 60)
def test_a_slurm_job_by_symmetric_run_spans_both_hosts(tmp_path):
    job, results = tmp_path / "job.yaml", tmp_path / "results"
    job.write_text(JOB.replace("[8, 16, 32, 64]", "[8]") + "placement: {strategy: spread}\n")
    with batch_job(tmp_path / "slurm", job, results, "slurm-symmetric.sbatch") as batch:
        said, _ = batch.communicate(timeout=2 * PATIENCE_S)  # a minute of it for the head
        assert batch.returncode == 0, said
    points = pd.read_parquet(results / "points")
    assert list(points["status"]) == ["ok"], said
    assert list(points["node_count"]) == [2]
