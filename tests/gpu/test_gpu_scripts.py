"""Scripts of users on CUDA devices, unchanged: `pytest -m gpu tests/gpu/test_gpu_scripts.py`."""

from dataclasses import replace

import pytest
import torch

from raybench.records import Measurement, Status
from raybench.worker.worker import Worker
from tests.gpu.gpus import private_ray
from tests.real_scripts import SCRIPTS, make_task
from tests.unit.fakes import ALONE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_measured_unchanged_on_the_device(name):
    answer = Worker("cuda", 0).run(make_task(name), ALONE, None)
    assert isinstance(answer, Measurement), answer
    # By CUDA events: a host's clock would have warned.
    assert answer.warnings == ()
    (repetition,) = answer.repetitions
    assert len(repetition.timed.step_ns) == 30
    assert repetition.timed.step_ns != repetition.timed.host_ns
    assert answer.peak_mem_allocated_bytes
    assert answer.breakdown.optimizer_ms is not None


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
        assert answer.warnings == ()
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


def test_a_rank_alone_uses_the_device_of_its_worker(two_gpus, tmp_path):
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
def test_a_rank_that_raises_or_hangs_is_named_and_frees_the_other_from_nccl(
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
