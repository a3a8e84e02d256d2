"""Sweeps without Ray: processes of this host, of a torchrun, and of an srun, which is played."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pandas as pd
import psutil
import pytest

from raybench.cluster import Cluster
from raybench.cluster.connect import connect
from raybench.records import Device, Measurement
from tests.cluster_contract import WORLD_SIZE, GroupContract, is_alive, run
from tests.process_cluster import start_forks

FAULTY = "tests.integration.probe_workloads:Faulty"
JOB = f"""\
version: 1
name: processes
workload: {{kind: '{FAULTY}', faulty_rank: 1}}
matrix: {{fault: FAULTS, world_size: 2, batch_size: 8}}
measure: {{warmup: 2, iterations: 4, breakdown: false, timeout_s: 20}}
placement: {{oversubscribe: true}}
"""
SWEEP = [sys.executable, "-m", "raybench", "sweep"]
PATIENCE_S = 200


def write_job(folder: Path, faults: str) -> Path:
    job = folder / "job.yaml"
    job.write_text(JOB.replace("FAULTS", faults))
    return job


def begin(
    job: Path, results: Path, *options: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*SWEEP, str(job), "-o", str(results), "--device", "cpu", *options],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def filled_columns(points: pd.DataFrame) -> set[str]:
    return set(points.columns[points.notna().any()])


def test_a_rank_tells_of_itself_and_of_its_steps_what_it_tells_under_ray(
    three_workers: Cluster, tmp_path: Path
) -> None:
    forks = start_forks(2, tmp_path)
    forks.start(2, "pack")
    (by_ray, ray_device), (by_processes, device) = (
        (run(cluster, 0, 1)[0], cluster.devices[0]) for cluster in (three_workers, forks)
    )
    forks.close()
    assert isinstance(by_processes, Measurement)
    assert filled_fields(by_processes) == filled_fields(by_ray)
    assert filled_fields(device) == filled_fields(ray_device)
    assert device.environment.keys() == ray_device.environment.keys()


def filled_fields(value: Measurement | Device) -> set[str]:
    """The fields that hold something."""
    return {field.name for field in fields(value) if getattr(value, field.name) not in (None, ())}


@pytest.mark.long
def test_a_killed_rank_costs_its_point_and_rows_have_the_columns_that_ray_gives(
    tmp_path: Path,
) -> None:
    job, results = write_job(tmp_path, "[kill, none]"), tmp_path / "results"
    sweep = begin(job, results, "--launcher", "processes")
    told, _ = sweep.communicate(timeout=PATIENCE_S)
    assert sweep.returncode == 1, told
    points = pd.read_parquet(results / "points")
    assert sorted(points["status"]) == ["lost", "lost", "ok"], told
    lost = points[points["status"] == "lost"]
    assert set(lost["error_type"]) == {"WorkerDied"}
    assert lost["error_message"].str.endswith("the worker process died by SIGKILL").all()
    assert set(lost["error_rank"]) == {1}
    assert "processes of this host, up to 2 CPU workers; run" in told
    assert "[W" not in told
    with_ray = tmp_path / "ray"
    sweep = begin(write_job(tmp_path, "none"), with_ray, "--address", "local")
    told, _ = sweep.communicate(timeout=PATIENCE_S)
    assert sweep.returncode == 0, told
    of_ray = pd.read_parquet(with_ray / "points")
    assert filled_columns(points[points["status"] == "ok"]) == filled_columns(of_ray)
    tables = {path.name for path in results.iterdir()}
    assert tables == {path.name for path in with_ray.iterdir()}


def test_an_address_is_rays(tmp_path: Path) -> None:
    sweep = begin(
        write_job(tmp_path, "none"), tmp_path, "--launcher", "processes", "--address", "local"
    )
    told, _ = sweep.communicate(timeout=PATIENCE_S)
    assert sweep.returncode == 2
    assert told == "--address local: is Ray's; --launcher processes has none\n"


def srun_variables(job_id: int, task: int, nodes: int) -> dict[str, str]:
    """What srun sets for a task of two, on one node or on two."""
    return {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(task),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": str(task if nodes == 1 else 0),
        "SLURM_NODEID": str(task if nodes == 2 else 0),
        "SLURM_STEP_TASKS_PER_NODE": "2" if nodes == 1 else "1(x2)",
        "SLURM_STEP_NODELIST": "localhost",
    }


def srun(
    job: Path, results: Path, job_id: int, nodes: int, *options: str
) -> list[subprocess.Popen[str]]:
    return [
        begin(
            job,
            results,
            "--launcher",
            "processes",
            *options,
            environment={
                **srun_variables(job_id, task, nodes),
                "RAYBENCH_SECRET": "known to both",
            },
        )
        for task in range(2)
    ]


def outputs(tasks: list[subprocess.Popen[str]]) -> list[str]:
    return [task.communicate(timeout=PATIENCE_S)[0] for task in tasks]


def test_two_hosts_without_a_secret_are_told_how_to_make_one(tmp_path: Path) -> None:
    environment = srun_variables(os.getpid(), task=1, nodes=2)
    job = write_job(tmp_path, "none")
    task = begin(job, tmp_path, "--launcher", "processes", environment=environment)
    told, _ = task.communicate(timeout=PATIENCE_S)
    assert task.returncode == 2, told
    assert "export RAYBENCH_SECRET=$(openssl rand -hex 16) before srun" in told


@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2])
def test_of_two_tasks_of_an_srun_the_first_sweeps_and_the_other_has_a_rank(
    tmp_path: Path, nodes: int
) -> None:
    job, results = write_job(tmp_path, "[kill, none]"), tmp_path / "results"
    tasks = srun(job, results, os.getpid(), nodes, "--set", "placement.strategy=spread")
    told = outputs(tasks)
    assert [task.returncode for task in tasks] == [1, 0], told
    assert told[1] == ""
    points = pd.read_parquet(results / "points")
    assert sorted(points["status"]) == ["lost", "lost", "ok"], told
    devices = pd.read_parquet(results / "devices")
    assert devices["node_id"].nunique() == nodes
    assert f"{2 if nodes == 1 else 2 * (os.cpu_count() or 1)} CPU workers" in told[0]


@pytest.mark.long
def test_torchrun_starts_a_sweep_on_its_processes(tmp_path: Path) -> None:
    job, results = write_job(tmp_path, "none"), tmp_path / "results"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sweep = ["-m", "raybench", "sweep", str(job), "-o", str(results), "--device", "cpu"]
    done = subprocess.run(
        [*torchrun, *sweep, "--launcher", "processes"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes of torchrun, up to 2 CPU workers" in done.stderr
    assert list(pd.read_parquet(results / "points")["status"]) == ["ok"]


@pytest.mark.long
def test_nothing_is_left_of_a_sweep_whose_driver_is_killed(tmp_path: Path) -> None:
    job = write_job(tmp_path, "hang")
    sweep = begin(job, tmp_path / "results", "--launcher", "processes")
    driver = psutil.Process(sweep.pid)
    deadline_s = time.monotonic() + PATIENCE_S
    while len(ours := driver.children(recursive=True)) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.2)
    sweep.send_signal(signal.SIGKILL)
    sweep.communicate(timeout=PATIENCE_S)
    _, alive = psutil.wait_procs(ours, timeout=20)
    assert alive == []


@pytest.mark.long
class TestProcesses(GroupContract):
    """With processes of their own, as users have them; with forks it is in the unit tests."""

    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls) -> Iterator[Cluster]:
        joined = connect(
            "processes", "auto", "cpu", WORLD_SIZE, end=pytest.fail, oversubscribe=True
        )
        joined.start(WORLD_SIZE, "pack")
        yield joined
        devices = joined.devices
        joined.close()
        deadline_s = time.monotonic() + PATIENCE_S
        while any(map(is_alive, devices)) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert not any(map(is_alive, devices))

    def test_a_host_whose_agent_dies_is_lost_and_its_rank_says_so(self, cluster: Cluster) -> None:
        """Last: there is no host after it."""
        (agent,) = {psutil.Process(one.process_id).ppid() for one in cluster.devices}
        os.kill(agent, signal.SIGKILL)
        deadline_s = time.monotonic() + PATIENCE_S
        while not cluster.lost and time.monotonic() < deadline_s:
            cluster.refresh(0.1)
            time.sleep(0.1)
        assert cluster.lost == frozenset(range(WORLD_SIZE))
