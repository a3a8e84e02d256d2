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
# As a script that trains on the GPU of its worker, with workers of a DataLoader: they are on the
# list of the GPU, and end with the script.
SCRIPT = """
import signal
from pathlib import Path
[gpu] = [
    file
    for file in Path(os.environ["FAKE_GPUS"]).iterdir()
    if str(os.getppid()) in file.read_text().split()
]
def be_on_the_gpu():
    with gpu.open("a") as processes:
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


def swept(folder, gpus, world_sizes, *settings):
    """The points of a sweep of the script."""
    options = ["--world-size", world_sizes, "--address", "local", "--device", "cpu"]
    quick = ["measure.warmup=2", "measure.iterations=10", "measure.max_seconds=1"]
    for setting in (*quick, "measure.breakdown=false", *settings):
        options += ["--set", setting]
    made_up = {"FAKE_GPUS": str(gpus), "PYTHONPATH": str(FAKE_NVML)}
    script = write_script(folder, SCRIPT)
    done = raybench(
        *("sweep", "--script", script, *options, "-o", folder / "results"),
        env={**os.environ, **made_up},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return table(folder).to_dict("records")


@pytest.mark.long
def test_only_strangers_are_beside_a_script(gpus, stranger, tmp_path):
    (gpus / "GPU-00000001").write_text(f"{stranger}\n")
    (gpus / "GPU-00000002").write_text(f"{OF_ANOTHER_CONTAINER}\n")
    points = swept(tmp_path, gpus, "1,2", "matrix.batch_size=1,2,3")
    assert [point["world_size"] for point in points].count(2) == 3
    host = socket.gethostname()
    beside = {
        f"run other-1 of {this_process('').user} (process {os.getpid()} on {host}) "
        f"used GPU 3 of {host}",
        f"process {OF_ANOTHER_CONTAINER} (of another container) used GPU 2 of {host}",
    }
    for point in points:
        on_own, on_other = (
            ([], {f"process {stranger} (sleep) used GPU 1 of {host}"})
            if point["world_size"] == 1
            else ([f"process {stranger} (sleep) on cuda:1 of {host}"], set())
        )
        assert list(point["neighbours"]) == on_own
        assert set(point["node_neighbours"]) == beside | on_other
        kinds = ("not_alone", "shared_node")
        doubts = {(d["kind"], d["subject"]) for d in point["doubts"] if d["kind"] in kinds}
        assert doubts == {
            *(("not_alone", one) for one in on_own),
            *(("shared_node", one) for one in beside | on_other),
        }


@pytest.mark.long
def test_scripts_side_by_side_are_no_strangers(gpus, tmp_path):
    batches = "matrix.batch_size=" + ",".join(map(str, range(1, 9)))
    points = swept(tmp_path, gpus, "1", batches, "placement.isolation=device")
    ids = {point["point_id"] for point in points}
    assert len(ids) == 8
    for point in points:
        assert ids.issuperset(point["neighbours"])
        assert all(one.startswith("run other-1 of ") for one in point["node_neighbours"])
