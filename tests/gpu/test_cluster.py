"""Groups of GPUs on a private Ray: identities, NCCL sums, faults. Needs two devices or more."""

import os
import time

import pytest

from raybench.hardware.devices import memory_in_use_bytes
from raybench.job.model import Measure
from raybench.job.point import Precision
from raybench.records.measurement import Measurement
from raybench.records.status import Status
from raybench.records.task import Task
from tests.cluster_contract import failures
from tests.gpu.gpus import TWO_GPUS, cluster_of
from tests.local_cluster import choose_workers
from tests.unit.fakes import make_point

pytestmark = TWO_GPUS
GPU_PROBE = "tests.gpu.gpu_workloads:GpuProbe"
cluster = cluster_of(4)


def run(cluster, world_size, *, precision=Precision.BF16, timeout_s=60.0, **params):
    point = make_point(
        workload=GPU_PROBE, params=params, world_size=world_size, precision=precision
    )
    worker_ids = choose_workers(cluster.devices, world_size, "pack")
    settings = Measure(warmup=3, iterations=20, timeout_s=timeout_s)
    return cluster.run(Task(point=point, settings=settings), worker_ids)


def test_every_worker_has_its_own_gpu(cluster):
    assert len({device.uuid for device in cluster.devices}) == len(cluster.devices)
    assert [device.index for device in cluster.devices] == list(range(len(cluster.devices)))
    for device in cluster.devices:
        assert device.kind == "cuda"
        assert device.driver_version
        assert device.power_cap_w
        assert device.niceness == 0
        assert "NVLink" in device.topology


def test_nccl_sums_in_groups_of_changing_size(cluster):
    for world_size in (1, 2, len(cluster.devices), 2, 1):
        answers = run(cluster, world_size)
        assert failures(answers) == []
        for answer in answers:
            assert isinstance(answer, Measurement)
            assert answer.peak_mem_allocated_bytes > 0
            (repetition,) = answer.repetitions
            assert min(repetition.timed.step_ns) > 0


def test_each_rank_reports_its_transport(cluster):
    if "NCCL_DEBUG" in os.environ:
        pytest.skip("the user has the log of NCCL")
    for answer in run(cluster, 2):
        (way,) = answer.transports
        assert way.startswith("NET/Socket on" if over_sockets() else ("P2P/", "SHM/"))


def test_event_times_agree_with_the_host_clock(cluster):
    (answer, *_) = run(cluster, 2, spin_ms=5)
    (repetition,) = answer.repetitions
    starts, steps = repetition.timed.start_ns, repetition.timed.step_ns
    block_ns = starts[-1] + steps[-1] - starts[0]
    assert sum(steps) == pytest.approx(block_ns, rel=1e-3)
    assert min(steps) > 4_000_000


def over_sockets():
    """Whether the ranks are told to talk as those of several hosts without InfiniBand do.

    An abort can take 3 s there, which is longer than a rank is waited for.
    """
    return os.environ.get("NCCL_P2P_DISABLE") == os.environ.get("NCCL_SHM_DISABLE") == "1"


@pytest.mark.parametrize(
    ("fault", "status", "error_type", "kept", "limit_s"),
    [
        ("raise", Status.ERROR, "ValueError", (True, True), 2),
        ("oom", Status.OOM, "OutOfMemoryError", (True, True), 2),
        ("kill", Status.LOST, "WorkerDied", (True, False), 15),
        ("stop", Status.TIMEOUT, "Timeout", (True, False), 8 + 15),
        ("hang", Status.TIMEOUT, "Timeout", (True, False), 8 + 15),
        ("skip", Status.TIMEOUT, "Timeout", (True, True), 8 + 3),
    ],
)
def test_a_fault_ends_quickly_and_spares_other_ranks(
    cluster, fault, status, error_type, kept, limit_s
):
    assert failures(run(cluster, 2)) == []
    before = [device.process_id for device in cluster.devices[:2]]
    used_before = memory_in_use_bytes()
    started_s = time.monotonic()
    answers = run(cluster, 2, fault=fault, timeout_s=8.0)
    took_s = time.monotonic() - started_s
    after = [device.process_id for device in cluster.devices[:2]]
    used = memory_in_use_bytes()
    assert failures(run(cluster, 2)) == []
    failure = answers[1]
    assert (failure.status, failure.error_type) == (status, error_type)
    kept_now = tuple(old == new for old, new in zip(before, after, strict=True))
    assert kept_now == kept or (over_sockets() and fault in ("stop", "hang"))
    for device in cluster.devices[:2]:
        assert used[device.uuid] < used_before[device.uuid] + 256 * 2**20
    assert took_s < limit_s


def test_an_error_in_close_spares_the_next_point(cluster):
    before = [device.process_id for device in cluster.devices]
    for _ in range(3):
        answers = run(cluster, 2, fault="late")
        assert answers[1].status is Status.ERROR
        assert answers[1].message.startswith("not even closed, at gpu_workloads.py:")
        assert isinstance(answers[0], Measurement) or answers[0].error_type == "PeerFailed"
        assert failures(run(cluster, 2)) == []
    assert [device.process_id for device in cluster.devices] == before
