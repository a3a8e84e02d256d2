"""What every launcher must hold, as tests: its own test class inherits them and makes the cluster.

`PointContract` is for launchers of one worker, `GroupContract` for those of three workers or more
in processes of their own, with real groups and real faults.
"""

from __future__ import annotations

import os
import signal
import threading

import pytest

from raybench.cluster import Cluster, point_end
from raybench.job.model import Measure
from raybench.job.point import Point, Precision
from raybench.records import Answer, Device, Failure, Measurement, Status, Task

FAILING = "tests.integration.recovery_workloads:Failing"
WORLD_SIZE = 3
TIMEOUT_S = 2.0
WAITED = "ranks 0 and 2 waited in a collective"


def run(
    cluster: Cluster, *worker_ids: int, fault: str = "none", rank: int = 1, **measure: float
) -> tuple[Answer, ...]:
    """The answers of a small point on these workers, of which one rank has the fault."""
    point = Point(
        workload=FAILING,
        params={"fault": fault, "faulty_rank": rank},
        world_size=len(worker_ids),
        precision=Precision.FP32,
        batch_size=8,
        global_batch_size=8 * len(worker_ids),
        scaling="weak",
    )
    settings = Measure(**{"warmup": 2, "iterations": 4, "breakdown": False, **measure})
    return cluster.run(Task(point=point, settings=settings), worker_ids)


def failures(answers: tuple[Answer, ...]) -> list[str]:
    return [answer.detail or answer.message for answer in answers if isinstance(answer, Failure)]


def process_ids(cluster: Cluster) -> list[int]:
    return [device.process_id for device in cluster.devices]


def places(cluster: Cluster) -> list[tuple[str, int]]:
    """What a worker id stands for, whatever process it has."""
    return [(device.node_id, device.index) for device in cluster.devices]


class PointContract:
    """For a fixture `cluster` with at least one worker that was started."""

    def test_a_point_is_measured_and_what_is_known_of_the_workers_stays(self, cluster: Cluster):
        before = cluster.devices
        assert len(before) <= cluster.capacity
        assert {device.kind for device in before} == {cluster.kind}
        (answer,) = run(cluster, 0)
        assert isinstance(answer, Measurement)
        assert answer.rank == 0
        assert len(answer.repetitions[0].timed.step_ns) == 4
        cluster.refresh(0.0)
        assert (cluster.devices, cluster.lost, cluster.pending) == (before, frozenset(), 0)

    def test_a_rank_that_raises_is_a_failure_and_keeps_its_process(self, cluster: Cluster):
        before = cluster.devices
        (answer,) = run(cluster, 0, fault="raise", rank=0)
        assert isinstance(answer, Failure)
        assert (answer.status, answer.error_type) == (Status.ERROR, "ValueError")
        assert answer.message == "the workload says no"
        assert "recovery_workloads.py" in answer.detail
        assert failures(run(cluster, 0)) == []
        assert cluster.devices == before

    def test_all_workers_are_there_after_a_restart(self, cluster: Cluster):
        before = places(cluster)
        cluster.restart()
        assert places(cluster) == before
        assert failures(run(cluster, 0)) == []

    def test_nobody_else_and_no_sample_is_an_empty_answer(self, cluster: Cluster):
        seen = cluster.bystanders([0])
        assert failures(run(cluster, 0)) == []
        assert isinstance(seen(), tuple)
        assert isinstance(cluster.telemetry(), tuple)

    def test_the_facts_of_each_device_come_in_the_order_of_the_devices(self, cluster: Cluster):
        facts = cluster.read_device_facts()
        assert tuple(one.device for one in facts) == cluster.devices
        assert {one.unread for one in facts} == {""}


class GroupContract(PointContract):
    """For a fixture `cluster` with three workers, each a process of its own on a CPU."""

    ALL = tuple(range(WORLD_SIZE))

    @pytest.fixture(autouse=True)
    def _ranks_have_time_to_answer(self, monkeypatch):
        """On a busy machine it is not stuck for that, and nobody waits longer than it needs."""
        monkeypatch.setattr(point_end, "GRACE_S", 10.0)

    @pytest.mark.parametrize(
        ("fault", "status", "error_type", "text", "survives"),
        [
            ("raise", Status.ERROR, "ValueError", "the workload says no", True),
            ("kill", Status.LOST, "WorkerDied", "the worker process ", False),
            # On Ray a killed and a stopped rank stand for these.
            pytest.param(
                *("segfault", Status.LOST, "WorkerDied", "died by SIGSEGV", False),
                marks=pytest.mark.long,
            ),
            ("stop", Status.TIMEOUT, "Timeout", WAITED, False),
            pytest.param(
                *("loop", Status.TIMEOUT, "Timeout", "at recovery_workloads.py:", False),
                marks=pytest.mark.long,
            ),
        ],
    )
    def test_a_fault_of_one_rank_ends_the_point_and_costs_no_other_process(
        self, cluster, fault, status, error_type, text, survives
    ):
        before, stood = process_ids(cluster), places(cluster)
        timeout_s = TIMEOUT_S if status is Status.TIMEOUT else 60.0
        answers = run(cluster, *self.ALL, fault=fault, timeout_s=timeout_s)
        failure = answers[1]
        assert isinstance(failure, Failure)
        assert (failure.status, failure.error_type) == (status, error_type)
        assert text in failure.message
        assert [getattr(answers[rank], "error_type", "") for rank in (0, 2)] == ["PeerFailed"] * 2
        after = process_ids(cluster)
        assert (after[0], after[2]) == (before[0], before[2]), answers
        assert (after[1] == before[1]) == survives
        assert (places(cluster), cluster.lost) == (stood, frozenset())
        assert failures(run(cluster, *self.ALL)) == []

    def test_a_rank_that_fails_when_the_others_have_answered_leaves_their_answers(self, cluster):
        before = process_ids(cluster)
        answers = run(cluster, *self.ALL, fault="late")
        assert [getattr(answer, "message", "") for answer in answers] == ["", "not even closed", ""]
        assert failures(run(cluster, *self.ALL)) == []
        assert process_ids(cluster) == before

    def test_a_worker_that_died_while_it_was_idle_costs_one_point(self, cluster):
        before = process_ids(cluster)
        os.kill(before[2], signal.SIGKILL)
        answers = run(cluster, *self.ALL)
        assert isinstance(answers[2], Failure)
        assert (answers[2].status, answers[2].error_type) == (Status.LOST, "WorkerDied")
        assert failures(run(cluster, *self.ALL)) == []
        after = process_ids(cluster)
        assert (after[:2], after[2] == before[2]) == (before[:2], False)

    def test_all_workers_are_there_after_a_restart(self, cluster):
        """In new processes, as are fresh workers; more than of launchers of one worker is asked."""
        assert failures(run(cluster, *self.ALL)) == []
        before, stood = set(process_ids(cluster)), places(cluster)
        cluster.restart()
        between = process_ids(cluster)
        assert places(cluster) == stood
        assert before.isdisjoint(between)
        assert failures(run(cluster, *self.ALL)) == []
        assert failures(run(cluster, 1, fresh_workers=True)) == []
        after = process_ids(cluster)
        assert (after[0], after[1] == between[1], after[2]) == (between[0], False, between[2])
        assert failures(run(cluster, *self.ALL)) == []

    def test_points_on_other_workers_run_at_once(self, cluster):
        answers: dict[tuple[int, ...], tuple[Answer, ...]] = {}

        def measure(*worker_ids: int) -> None:
            answers[worker_ids] = run(cluster, *worker_ids)

        for disjoint in ([(0, 1), (2,)], [(0,), (1, 2)]):
            threads = [threading.Thread(target=measure, args=ids) for ids in disjoint]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert [failures(answers.pop(ids)) for ids in disjoint] == [[], []]


def is_alive(device: Device) -> bool:
    try:
        os.kill(device.process_id, 0)
    except ProcessLookupError:
        return False
    return True
