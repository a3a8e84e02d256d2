"""How the Ray that a sweep starts for itself brings up processes."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import ray

from raybench.cluster.ray_cluster.nodes import NodeAgent, start_on_node
from raybench.cluster.ray_cluster.start import connect_ray
from tests.integration.fault_runs import environment
from tests.integration.sweeps import begin, descendants, sweep_command, wait_for, write_text

_STUCK = """\
import pathlib, time
pathlib.Path(__file__).with_name("begun").touch()
time.sleep(600)
"""


@pytest.fixture
def raylet():
    """The process of a private Ray that was told of one CPU."""
    connect_ray("local", "cpu", wanted=1)
    yield ray._private.worker._global_node.all_processes["raylet"][0].process.pid
    ray.shutdown()


class Nothing:
    pass


@pytest.mark.long
def test_stuck_process_does_not_delay_other_processes(raylet, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(_STUCK)
    environment = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    _stuck = ray.remote(Nothing).options(num_cpus=0, runtime_env=environment).remote()
    wait_for((tmp_path / "begun").exists, within_s=30)
    node_id = ray.get_runtime_context().get_node_id()
    others = [start_on_node(NodeAgent, node_id) for _ in range(2)]
    ray.get([other.__ray_ready__.remote() for other in others], timeout=60)
    titles = descendants(raylet).values()
    assert sum(title.startswith("ray::NodeAgent") for title in titles) == 2
    assert [title for title in titles if title.startswith("ray::IDLE")] == []
    # Each names the folder of its Ray; that of a cluster of other tests may have them.
    private = [words for words in descendants(os.getpid()).values() if "/raybench-" in words]
    assert any("/gcs_server " in words for words in private)
    unused = ("/dashboard.py ", "/monitor.py ", "/log_monitor.py ")
    assert [words for words in private if any(name in words for name in unused)] == []


# What is killed, with which signal, how long after it was seen; of those in the second list once
# the driver has joined Ray and starts its workers.
AT_RAYS_START = [
    ("gcs_server", "SIGKILL", 0.0),
    ("gcs_server", "SIGKILL", 0.3),
    ("gcs_server", "SIGTERM", 0.5),
    ("raylet", "SIGKILL", 0.0),
    ("raylet", "SIGTERM", 0.5),
    ("runtime_env/agent", "SIGKILL", 0.4),
    ("dashboard/agent", "SIGTERM", 0.3),
]
AT_THE_WORKERS_START = [
    ("gcs_server", "SIGKILL", 1.0),
    ("gcs_server", "SIGTERM", 2.0),
    ("raylet", "SIGKILL", 0.5),
    ("raylet", "SIGTERM", 1.0),
    ("RuntimeEnvAgent", "SIGTERM", 0.3),
    ("RuntimeEnvAgent", "SIGKILL", 2.0),
    ("DashboardAgent", "SIGKILL", 1.0),
]
# 5 s where a core is free; Ray itself waits for a minute.
_MOST_S = 30.0
SMALL_JOB = """\
workload: {kind: mlp, hidden: 8, layers: 1}
matrix: {world_size: [1, 2], batch_size: 1}
measure: {warmup: 1, iterations: 3, breakdown: false}
"""


class Struck:
    """A sweep of which a process was ended while it started: what it said, and how late."""

    def __init__(self, folder, title, signal_name, delay_s, said):
        write_text(folder, SMALL_JOB)
        errors = folder / "stderr.txt"
        own = {**environment(folder), "RAYBENCH_LOCK_DIR": str(folder / "locks")}
        with (
            errors.open("w") as said_by_it,
            begin(folder, stdout=subprocess.DEVNULL, stderr=said_by_it, env=own) as driver,
        ):
            wait_for(lambda: self._is_there(driver, title, said, errors), within_s=90)
            time.sleep(delay_s)
            os.kill(_victims(driver.pid, title)[0], getattr(signal, signal_name))
            struck_s = time.monotonic()
            self.returncode = driver.wait(timeout=120)
        self.after_s = time.monotonic() - struck_s
        # Without the estimate and the phases of the start.
        self.lines = [
            line
            for line in errors.read_text().splitlines()
            if not re.match(r"\d+ points?: about |starting ", line)
        ]

    @staticmethod
    def _is_there(driver, title, said, errors):
        assert driver.poll() is None, errors.read_text()
        return said in errors.read_text() and bool(_victims(driver.pid, title))


def _victims(driver, title):
    # The raylet has the command lines of all others among its arguments.
    found = descendants(driver).items()
    return [process for process, words in found if title in " ".join(words.split(" ")[:4])]


@pytest.mark.long
@pytest.mark.parametrize("fault", AT_RAYS_START, ids=lambda fault: " by ".join(fault[:2]))
def test_death_while_ray_starts_is_one_line(fault, tmp_path):
    struck = Struck(tmp_path, *fault, said="")
    assert struck.returncode == 3, struck.lines
    (line,) = struck.lines
    assert line.startswith("the private Ray of this host did not start: ")
    assert "nothing is measured yet, so type the same command again" in line
    assert struck.after_s < _MOST_S


@pytest.mark.long
@pytest.mark.parametrize("fault", AT_THE_WORKERS_START, ids=lambda fault: " by ".join(fault[:2]))
def test_death_while_workers_start_names_resume_command(fault, tmp_path):
    struck = Struck(tmp_path, *fault, said="; run ")
    assert struck.returncode == 3, struck.lines
    _, again, stopped, reason = struck.lines
    assert again.startswith("go on with: ")
    assert " --resume small-" in again
    assert stopped == "stopped before any point finished"
    assert reason.endswith(" is gone")
    assert struck.after_s < _MOST_S


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_worker_killed_during_start_is_restarted(name, tmp_path):
    struck = Struck(tmp_path, "ray::_Worker", name, 0.2, said="; run ")
    assert struck.returncode == 0, struck.lines
    assert struck.lines[1].startswith("a worker could not start: its process ")
    assert struck.lines[1].endswith("(tried once more)")
    assert [line.split()[1] for line in struck.lines[2:]] == ["ok", "ok"]


# The head is killed when all points are measured, where Ray would wait for it for a minute.
ENDS_WITHOUT_HEAD = """\
import sys
from raybench import cli
import psutil
from raybench.cluster.ray_cluster.pool import WorkerPool
close = WorkerPool.close
def close_without_head(workers):
    [head] = [one for one in psutil.Process().children() if one.name() == "gcs_server"]
    head.kill()
    close(workers)
WorkerPool.close = close_without_head
sys.argv = ["raybench", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.long
def test_head_death_during_release_keeps_finished_run(tmp_path):
    write_text(tmp_path, SMALL_JOB)
    command = sweep_command(tmp_path, "--device", "cpu")
    options = command[command.index("raybench") + 1 :]
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WITHOUT_HEAD, *options],
        env={**environment(tmp_path), "RAYBENCH_LOCK_DIR": str(tmp_path / "locks")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "/s" in done.stdout, "the report is printed"
