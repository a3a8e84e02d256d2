"""Scripts of users on CUDA devices, unchanged: `pytest -m gpu tests/gpu/test_gpu_scripts.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from raybench.job.model import Measure
from raybench.records import Failure, Measurement, RankInfo, Status, Task
from raybench.worker.worker import Worker
from tests.real_scripts import SCRIPTS, make_task

if TYPE_CHECKING:
    from raybench.cluster.ray_cluster.cluster import RayCluster

pytestmark = pytest.mark.gpu

ALONE = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_measured_unchanged_on_the_device(name: str) -> None:
    answer = Worker("cuda", 0).run(make_task(name), ALONE, None)
    assert isinstance(answer, Measurement), answer
    # By CUDA events: a host's clock would have warned.
    assert answer.warnings == ()
    (repetition,) = answer.repetitions
    assert len(repetition.timed.step_ns) == 30
    assert repetition.timed.step_ns != repetition.timed.host_ns
    assert answer.peak_mem_allocated_bytes
    assert answer.breakdown is not None
    assert answer.breakdown.optimizer_ms is not None


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[RayCluster]:
    from raybench.cluster.ray_cluster.cluster import RayCluster
    from raybench.cluster.ray_cluster.connection import connect

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cluster = RayCluster(connect("local", "cuda", 2))
    cluster.start(2, "pack")
    yield cluster
    cluster.close()


@pytest.mark.parametrize("name", ["ddp.py", "fsdp.py", "hf_trainer.py", "lightning_fit.py"])
def test_ranks_train_together_on_their_own_devices(two_gpus: RayCluster, name: str) -> None:
    answers = two_gpus.run(make_task(name, 2), (0, 1))
    for answer in answers:
        assert isinstance(answer, Measurement), answer
        assert answer.warnings == ()
        assert answer.peak_mem_allocated_bytes


def test_a_rank_alone_uses_the_device_of_its_worker(two_gpus: RayCluster) -> None:
    """And not the first one, which is what LOCAL_RANK 0 would be without a mask."""
    torch.cuda.synchronize(1)
    free_before, _ = torch.cuda.mem_get_info(0)
    (answer,) = two_gpus.run(make_task("ddp.py", 1, "--hidden 16384 --layers 2"), (1,))
    assert isinstance(answer, Measurement), answer
    assert (answer.peak_mem_allocated_bytes or 0) > 2**31
    assert abs(torch.cuda.mem_get_info(0)[0] - free_before) < 2**30


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


def run_faulty(cluster: RayCluster, folder: Path, fault: str, timeout_s: float) -> list[Failure]:
    path = folder / "train.py"
    path.write_text(FAULTY.format(fault=fault), encoding="utf-8")
    task: Task = make_task("", 2)
    params = {**task.point.params, "path": str(path)}
    settings = Measure(timeout_s=timeout_s, max_seconds=5)
    task = replace(task, point=replace(task.point, params=params), settings=settings)
    answers = cluster.run(task, (0, 1))
    return [answer for answer in answers if isinstance(answer, Failure)]


def test_a_rank_that_raises_frees_the_other_from_nccl(two_gpus: RayCluster, tmp_path: Path) -> None:
    before = [device.process_id for device in two_gpus.devices]
    first, second = run_faulty(two_gpus, tmp_path, "raise ValueError('no')", 100.0)
    assert (first.error_type, second.error_type) == ("PeerFailed", "ValueError")
    assert [device.process_id for device in two_gpus.devices] == before
    answers = two_gpus.run(make_task("ddp.py", 2), (0, 1))
    assert all(isinstance(answer, Measurement) for answer in answers), answers


def test_a_rank_that_hangs_is_named(two_gpus: RayCluster, tmp_path: Path) -> None:
    first, second = run_faulty(two_gpus, tmp_path, "time.sleep(1000)", 20.0)
    assert second.status is Status.TIMEOUT
    assert "at train.py:" in second.message
    assert first.error_type == "PeerFailed"
