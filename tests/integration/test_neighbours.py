"""Who is beside the points of a script on made-up GPUs: its own processes are not, others are."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from raybench.cluster.device_reservation import FOLDER_VARIABLE, DeviceLocks, this_process
from tests.integration.sweeps import raybench, table
from tests.script_files import write_script

FAKE_NVML = Path(__file__).parent / "fake_nvml"
# As a script that trains on a GPU with workers of a DataLoader: all are on the list of the GPU,
# and the workers end with the script.
SCRIPT = """
import signal
def be_on_the_gpu():
    with open(f"{os.environ['FAKE_GPUS']}/GPU-{rank:08}", "a") as processes:
        processes.write(f"{os.getpid()}\\n")

be_on_the_gpu()
for _ in range(2):
    if os.fork() == 0:
        be_on_the_gpu()
        signal.pause()
steps(10**9)
"""
OF_ANOTHER_CONTAINER = 2**22 + 1


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A folder with the processes of four GPUs, the last of which another sweep has."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    folder = tmp_path / "gpus"
    folder.mkdir()
    for number in range(4):
        (folder / f"GPU-{number:08}").touch()
    locks = DeviceLocks()
    locks.lock(["GPU-00000003"], this_process("run other-1"), shared=True)
    yield folder
    locks.close()


@pytest.fixture
def stranger():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def test_only_strangers_are_beside_a_script(gpus, stranger, tmp_path):
    (gpus / "GPU-00000001").write_text(f"{stranger}\n")
    (gpus / "GPU-00000002").write_text(f"{OF_ANOTHER_CONTAINER}\n")
    script = write_script(tmp_path, SCRIPT)
    options = ["--world-size", "1,2", "--address", "local", "--device", "cpu"]
    measure = ["measure.warmup=2", "measure.iterations=10", "measure.max_seconds=1"]
    for setting in ("matrix.batch_size=1,2,3", *measure):
        options += ["--set", setting]
    made_up = {"FAKE_GPUS": str(gpus), "PYTHONPATH": str(FAKE_NVML)}
    done = raybench(
        *("sweep", "--script", script, *options, "-o", tmp_path / "results"),
        env={**os.environ, **made_up},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    points = table(tmp_path)
    assert list(points["world_size"].value_counts()) == [3, 3]
    host = socket.gethostname()
    beside = {
        f"run other-1 of {this_process('').user} (process {os.getpid()} on {host}) "
        f"used GPU 3 of {host}",
        f"process {OF_ANOTHER_CONTAINER} (of another container) used GPU 2 of {host}",
    }
    for point in points.to_dict("records"):
        on_own, on_other = (
            ([], {f"process {stranger} (sleep) used GPU 1 of {host}"})
            if point["world_size"] == 1
            else ([f"process {stranger} (sleep) on cuda:1 of {host}"], set())
        )
        assert list(point["neighbours"]) == on_own
        assert set(point["node_neighbours"]) == beside | on_other
        warnings = {one for one in point["warnings"] if one.startswith(("not alone", "shared"))}
        assert warnings == {
            *(f"not alone: {one}" for one in on_own),
            *(f"shared node: {one}" for one in beside | on_other),
        }
