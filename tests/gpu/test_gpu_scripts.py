"""Scripts of users on CUDA devices, unchanged: `pytest -m gpu tests/gpu/test_gpu_scripts.py`."""

import ctypes
import os
import re
from dataclasses import replace

import pytest
import torch

from raybench.hardware import nvml
from raybench.records.measurement import Measurement
from raybench.records.status import Status
from raybench.worker.worker import Worker
from tests.gpu.gpus import private_ray
from tests.integration.sweeps import raybench, table
from tests.real_scripts import SCRIPTS, make_task
from tests.unit.fakes import ALONE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_measured_unchanged_on_the_device(name):
    answer = Worker("cuda", 0).run(make_task(name), ALONE, None)
    assert isinstance(answer, Measurement), answer
    # By CUDA events: a host's clock would have warned.
    assert answer.doubts == ()
    (repetition,) = answer.repetitions
    assert len(repetition.timed.step_ns) == 30
    assert repetition.timed.step_ns != repetition.timed.host_ns
    assert answer.peak_mem_allocated_bytes
    assert answer.breakdown.optimizer_ms is not None


# The workers of the loader are forks of a process with a CUDA context, which NVML lists until the
# last of them has ended.
LOADS = """
import os, torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 10**9
    def __getitem__(self, number):
        return torch.ones(64)

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
model = torch.nn.Linear(64, 64, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
for rows in DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork"):
    optimizer.zero_grad()
    model(rows.to(device)).square().mean().backward()
    optimizer.step()
"""


# Before the tests with two workers in this process, which would be beside it.
@pytest.fixture(scope="module")
def sweep_of_loaders(tmp_path_factory):
    """The folder of a sweep of twelve points, each on one GPU, and who was on the GPUs before."""
    folder = tmp_path_factory.mktemp("loaders")
    script = folder / "train.py"
    script.write_text(LOADS, encoding="utf-8")
    before = set().union(*(nvml.process_ids(nvml.device(uuid)) for uuid in nvml.uuids()))
    settings = [
        "matrix.batch_size=" + ",".join(map(str, range(1, 13))),
        *("placement.isolation=device", "measure.breakdown=false"),
        *("measure.warmup=2", "measure.iterations=10", "measure.max_seconds=2"),
    ]
    options = [word for setting in settings for word in ("--set", setting)]
    where = ["--address", "local", "--device", "cuda", "-o", folder / "results"]
    done = raybench("sweep", "--script", script, "--world-size", "1", *options, *where)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return folder, before


def test_a_script_with_loader_workers_is_alone(sweep_of_loaders):
    folder, before = sweep_of_loaders
    points = table(folder)
    assert list(points["status"]) == ["ok"] * 12
    told = [
        text
        for column in ("neighbours", "node_neighbours")
        for texts in points[column]
        for text in texts
    ]
    print(told, before)
    strangers = {int(number) for text in told for number in re.findall(r"process (\d+)", text)}
    assert strangers <= before


def test_workers_tell_the_nccl_that_they_loaded(sweep_of_loaders):
    devices = table(sweep_of_loaders[0], "devices")
    for device in devices.to_dict("records"):
        version, path = dict(device["versions"])["nccl"], device["nccl_path"]
        print(version, path)
        assert re.search(r"/libnccl\.so\.2[0-9.]*$", path)
        number = ctypes.c_int()
        assert ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) == 0
        major, minor, patch = (int(part) for part in version.split("."))
        assert number.value == major * 10_000 + minor * 100 + patch
        if "LD_PRELOAD" not in os.environ:
            assert (major, minor, patch) == torch.cuda.nccl.version()


@pytest.fixture(scope="module")
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with private_ray(2) as cluster:
        yield cluster


# Plain DistributedDataParallel trains below, after a fault.
@pytest.mark.parametrize("name", ["fsdp.py", "hf_trainer.py", "lightning_fit.py"])
def test_ranks_train_together_on_their_own_devices(two_gpus, name):
    answers = two_gpus.run(make_task(name, 2), (0, 1))
    for answer in answers:
        assert isinstance(answer, Measurement), answer
        assert answer.doubts == ()
        assert answer.peak_mem_allocated_bytes


NAMES_ITS_DEVICE = """
import os
import torch
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
print("it trains on", torch.cuda.get_device_properties(device).uuid)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(8, device=device))], lr=0.1)
while True:
    optimizer.step()
"""


def test_a_single_rank_uses_its_workers_device(two_gpus, tmp_path):
    """And not the first one, which is what LOCAL_RANK 0 would be without a mask."""
    (answer,) = two_gpus.run(task_of(tmp_path, NAMES_ITS_DEVICE, world_size=1), (1,))
    assert isinstance(answer, Measurement), answer
    assert two_gpus.devices[1].uuid.removeprefix("GPU-") in answer.output


def task_of(folder, text, **asked):
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    task = make_task("", **asked)
    params = {**task.point.params, "path": str(path)}
    return replace(task, point=replace(task.point, params=params))


FAULTY = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    if step == 5 and rank == 1:
        {fault}
    optimizer.zero_grad()
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    ("fault", "timeout_s", "status", "words"),
    [
        ("raise ValueError('no')", 100.0, Status.ERROR, "no"),
        ("time.sleep(1000)", 20.0, Status.TIMEOUT, "at train.py:"),
    ],
)
def test_a_failing_rank_is_named_and_frees_peers(
    two_gpus, tmp_path, fault, timeout_s, status, words
):
    before = [device.process_id for device in two_gpus.devices]
    text = FAULTY.format(fault=fault)
    task = task_of(tmp_path, text, world_size=2, timeout_s=timeout_s, max_seconds=5)
    first, second = two_gpus.run(task, (0, 1))
    assert (first.error_type, second.status) == ("PeerFailed", status)
    assert words in second.message
    if status is Status.ERROR:
        assert [device.process_id for device in two_gpus.devices] == before
        answers = two_gpus.run(make_task("ddp.py", 2), (0, 1))
        assert all(isinstance(answer, Measurement) for answer in answers), answers
