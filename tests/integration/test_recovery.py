"""What a fault of one rank costs: a row with its reason, little time, and no other process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from raybench.cluster import point_end
from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.connection import connect
from raybench.job.model import Measure
from raybench.job.point import Point, Precision
from raybench.records import Answer, Failure, Status, Task

FAILING = "tests.integration.recovery_workloads:Failing"
TIMEOUT_S = 3.0
WAITED = "ranks 0 and 2 waited in a collective"
# A machine that does other things too starts a process more slowly, and a rank that comes out of
# its collective may first have to read from the disk what it has not needed before.
SLACK_S = 25.0
PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def cluster(three_nodes: str) -> Iterator[RayCluster]:
    joined = RayCluster(connect(three_nodes, "cpu", wanted=3))
    joined.start(3, "pack")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(point_end, "GRACE_S", PATIENCE_S)
        yield joined
    joined.close()


def run(cluster: RayCluster, **params: str | int) -> tuple[Answer, ...]:
    point = Point(
        workload=FAILING,
        params=params,
        world_size=3,
        precision=Precision.FP32,
        batch_size=8,
        global_batch_size=24,
        scaling="weak",
    )
    # What is late has been measured whole before, which three ranks on two cores take a while for.
    is_whole = params.get("fault", "late") == "late"
    settings = Measure(warmup=2, iterations=4, timeout_s=60 if is_whole else TIMEOUT_S)
    return cluster.run(Task(point=point, settings=settings), (0, 1, 2))


def failures(answers: tuple[Answer, ...]) -> list[str]:
    return [answer.detail or answer.message for answer in answers if isinstance(answer, Failure)]


def process_ids(cluster: RayCluster) -> list[int]:
    return [device.process_id for device in cluster.devices]


@pytest.mark.parametrize(
    ("fault", "status", "error_type", "text", "survives", "limit_s"),
    [
        ("raise", Status.ERROR, "ValueError", "the workload says no", True, 2),
        ("early", Status.ERROR, "ValueError", "not even built", True, 2),
        ("oom", Status.OOM, "MemoryError", "asked for more than there is", True, 2),
        ("sys_exit", Status.ERROR, "SystemExit", "enough", True, 2),
        ("kill", Status.LOST, "WorkerDied", "ended without a word", False, 6),
        ("segfault", Status.LOST, "WorkerDied", "died by SIGSEGV", False, 6),
        ("stop", Status.TIMEOUT, "Timeout", WAITED, False, TIMEOUT_S + 3),
        ("loop", Status.TIMEOUT, "Timeout", "at recovery_workloads.py:", False, TIMEOUT_S + 3),
    ],
)
def test_a_fault_of_one_rank_ends_the_point_and_costs_no_other_process(
    cluster, fault, status, error_type, text, survives, limit_s
):
    assert failures(run(cluster)) == []
    before = process_ids(cluster)
    started_s = time.monotonic()
    answers = run(cluster, fault=fault)
    took_s = time.monotonic() - started_s
    print(f"{fault}: the next point starts {took_s:.2f} s after this one, limit {limit_s:g} s")
    failure = answers[1]
    assert isinstance(failure, Failure)
    assert (failure.status, failure.error_type) == (status, error_type)
    assert text in failure.message
    assert [getattr(answers[rank], "error_type", "") for rank in (0, 2)] == ["PeerFailed"] * 2
    after = process_ids(cluster)
    assert (after[0], after[2]) == (before[0], before[2])
    assert (after[1] == before[1]) == survives
    assert failures(run(cluster)) == []
    assert took_s < limit_s + SLACK_S


def test_a_rank_that_fails_after_the_others_have_answered_does_not_spoil_the_next_point(cluster):
    assert failures(run(cluster)) == []
    before = process_ids(cluster)
    for _ in range(2):
        answers = run(cluster, fault="late")
        assert [getattr(answer, "message", "") for answer in answers] == ["", "not even closed", ""]
        assert failures(run(cluster)) == []
    assert process_ids(cluster) == before
